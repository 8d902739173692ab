"""`js.with_exchange` around steps of other libraries trains as `js.make_train_step` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.refusals import Refusal, each
from train.libraries import (
    ADAM,
    BATCHES,
    FORMS,
    MOMENTS,
    PARAMS,
    PARTS,
    REPLICAS,
    SPECS,
    WIDTH,
    assert_close,
    loss_fn,
    placed,
    start,
    stepped,
)

MESHES = {
    "virtual": lambda: js.virtual_mesh({"replica": REPLICAS}),
    "devices": lambda: js.make_mesh({"replica": REPLICAS}),
    "fsdp": lambda: js.make_mesh({"replica": REPLICAS, "fsdp": 2}),
}
VIRTUAL = js.virtual_mesh({"replica": REPLICAS})
WEIGHTS = np.random.default_rng(0).integers(1, 4, (len(BATCHES), REPLICAS)).astype(np.float32)
WEIGHTS[3:, 1] = 0
MEAN = js.all_reduce_gradients("replica")
SYNCS = {
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "diloco": js.diloco("replica", sync_every=3),
    "slowmo of sgp": js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "fragments": js.diloco("replica", sync_every=4, delay=1, fragments=2, merge=0.5),
    "reset": js.diloco("replica", sync_every=3, inner_state="reset"),
    "average": js.local_sgd("replica", sync_every=2, inner_state="average"),
    "rate": js.slowmo(
        "replica", base=js.local_sgd("replica"), sync_every=3, learning_rate="optimizer"
    ),
}
SCHEDULED = optax.inject_hyperparams(optax.sgd)(
    learning_rate=lambda t: jnp.asarray([0.02, 0.05, 0.1])[t % 3], momentum=0.9
)


@functools.cache
def reference(sync, optimizer=ADAM, is_weighted=False, gradients=None):
    """Return the step of this package on virtual replicas, and its last state."""
    sync = SYNCS.get(sync, sync)
    options = {"sync": sync, "mesh": VIRTUAL, "donate": False, "gradients": gradients}
    step = js.make_train_step(loss_fn, optimizer, **options)
    state = step.init(PARAMS)
    for i, batch in enumerate(BATCHES):
        state, _ = step(state, batch, WEIGHTS[i] if is_weighted else None)
    return step, state


def made(sync="diloco", mesh=VIRTUAL, train_step=stepped, **options):
    return js.with_exchange(train_step, SYNCS.get(sync, sync), mesh=mesh, **{**PARTS, **options})


def run(step, state, **options):
    for i, batch in enumerate(BATCHES):
        given = {name: values[i] for name, values in options.items()}
        state, metrics = step(state, batch, **given)
    return state, metrics


CASES = [
    ("plain", "local_sgd", "virtual", {"mode": "host"}),
    ("plain", "slowmo of sgp", "devices", {"mode": "host", "map_with": "vmap"}),
    ("plain", "fragments", "fsdp", {}),
    ("nnx", "slowmo of sgp", "fsdp", {"map_with": "vmap"}),
    ("nnx", "diloco", "devices", {"mode": "host"}),
    ("weighted", "local_sgd", "devices", {"map_with": "vmap"}),
    ("weighted", "diloco", "virtual", {"gradients": MEAN}),
    ("plain", "diloco", "fsdp", {"gradients": MEAN}),
    # They read and change the state of the optimizer.
    ("moments", "reset", "devices", {"mode": "host"}),
    ("moments", "average", "devices", {}),
    ("moments", "rate", "virtual", {"mode": "host"}),
]


@pytest.mark.parametrize(("form", "sync", "mesh", "options"), CASES)
def test_a_step_of_another_library_trains_as_the_training_step(form, sync, mesh, options):
    """So does a scan of it. State that is sharded inside a replica stays so.

    A replica of weight 0 keeps its state, or takes the mean of the others' gradients.
    """
    mesh, weight = MESHES[mesh](), WEIGHTS if form == "weighted" else None
    train_step, state, parts, as_dict = FORMS[form if form == "nnx" else "plain"](placed(mesh))
    optimizer = SCHEDULED if form == "moments" else ADAM
    if form == "moments":
        train_step, parts = functools.partial(stepped, optimizer=optimizer), PARTS | MOMENTS
        state = start(placed(mesh), optimizer)
    step = js.with_exchange(train_step, SYNCS[sync], mesh=mesh, **parts, **options)
    other, expected = reference(sync, optimizer, weight is not None, options.get("gradients"))
    called, losses = step.init(state), []
    for t, batch in enumerate(BATCHES, 1):
        assert step.next_phase(called) == step.phase(t) == other.phase(t)
        called, metrics = step(called, batch, weight=None if weight is None else weight[t - 1])
        losses.append(metrics["loss"])
    ends = [called]
    if weight is None:  # a scan has one for all updates
        scanned, before = step.scan(step.init(state), BATCHES[:5])
        scanned, after = step.scan(scanned, BATCHES[5:])
        assert step.next_phase(scanned) == other.next_phase(expected)
        assert_close(np.concatenate([before["loss"], after["loss"]]), np.stack(losses))
        ends.append(scanned)
    for end in ends:
        params = as_dict(parts["get_params"](end.state))
        assert_close(params, expected.params)
        assert_close(as_dict(step.consensus(end)), other.consensus(expected))
        if form != "nnx":
            assert_close(end.state["opt"], expected.opt_state)
        if "fsdp" in mesh.shape:
            for name, x in params.items():
                lies = NamedSharding(mesh, P("replica", *SPECS[name]))
                assert x.sharding.is_equivalent_to(lies, x.ndim)
    if weight is not None and not options.get("gradients"):
        assert called.state["n"].tolist() == [7, 3, 7, 7]
        assert losses[-1][1] == 0
    report = js.comm_report(step, called, BATCHES[0])
    if "local" in report.kinds and not options.get("gradients"):
        assert not [row for row in report.select(kind="local") if "replica" in row.axis]


def test_the_loop_gives_weights_and_an_evaluation_needs_a_state_with_parameters():
    """The weights of a `js.train.WeightedBatch` are the step's `weight`, no further argument."""
    step = made("local_sgd")
    weighted = [js.train.WeightedBatch(*both) for both in zip(BATCHES, WEIGHTS, strict=True)]
    *_, last = js.train_loop(step, step.init(start(PARAMS)), weighted)
    end, _ = run(step, step.init(start(PARAMS)), weight=WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, last.state, end)
    hooks = [js.train.Evaluate(lambda params, _: params, mesh=VIRTUAL, every=1)]
    with pytest.raises(ValueError, match=r"got ReplicaState.*`consensus\(state\)`"):
        next(js.train_loop(step, step.init(start(PARAMS)), BATCHES, hooks=hooks))


@pytest.mark.parametrize(("mode", "kind"), [("traced", jnp.asarray), ("host", bool)])
def test_without_communication_replicas_train_independently(mode, kind):
    """Each exchange is a round of the graph's rotation, and a skipped one is none."""
    step = made("slowmo of sgp", MESHES["devices"](), mode=mode)
    end, _ = run(step, step.init(start(PARAMS)), communicate=[kind(False)] * len(BATCHES))
    assert_close(end.state["params"], reference("none")[1].params)
    state, phases = step.init(start(PARAMS)), []
    for t, batch in enumerate(BATCHES, 1):
        phases.append(step.next_phase(state))
        state, _ = step(state, batch, communicate=kind(t != 2))
    first, skipped, *rest = phases
    assert (first, skipped) == (("round 0",), ("round 1",))
    assert rest[:2] == [("round 1",), ("slow",)]


@pytest.mark.parametrize(("mesh", "is_weighted"), [("virtual", True), ("fsdp", False)])
def test_of_statistics_the_floating_arrays_are_averaged(mesh, is_weighted):
    """Counters and keys beside them are each replica's own."""

    def train_step(state, batch):
        new, metrics = stepped(state, batch)
        mean, n, key = state["model"]
        moved = 0.9 * mean + 0.1 * batch.mean(0), n + 1, jax.random.split(key)[0]
        return new | {"model": moved}, metrics

    part = lambda state: state["model"], lambda state, new: state | {"model": new}
    mesh = MESHES[mesh]()
    step = made("local_sgd", mesh, train_step, statistics=part)
    first = np.zeros(WIDTH, np.float32), np.int32(0), jax.random.key(1)
    state = step.init(start(placed(mesh)) | {"model": first})
    state, _ = run(step, state, **({"weight": WEIGHTS} if is_weighted else {}))
    mean, n, keys = state.state["model"]
    assert n.tolist() == ([7, 3, 7, 7] if is_weighted else [7] * REPLICAS)
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == REPLICAS
    expected = np.zeros((REPLICAS, WIDTH))
    for t, batch in enumerate(BATCHES, 1):
        weight = WEIGHTS[t - 1] if is_weighted else np.ones(REPLICAS)
        moved = 0.9 * expected + 0.1 * batch.reshape(REPLICAS, 2, WIDTH).mean(1)
        expected = np.where(weight[:, None] > 0, moved, expected)
        if t % 2 == 0:
            expected = np.tile(np.average(expected, axis=0, weights=weight), (REPLICAS, 1))
    assert_close(mean, expected)


def test_arguments_that_are_not_split_reach_every_replica_whole():
    def train_step(state, batch, settings):
        new, metrics = stepped(state, batch + settings["shift"][None])
        return new, metrics | {"seen": settings["table"].sum()}

    given = {"table": np.arange(5, dtype=np.float32)}
    step = made("diloco", MESHES["devices"](), train_step, in_axes=(0, {"shift": 0, "table": None}))
    given["shift"] = np.zeros((len(BATCHES), REPLICAS * WIDTH), np.float32)
    end, several = step.scan(step.init(start(PARAMS)), BATCHES, given)
    assert_close(end.state["params"], reference("diloco")[1].params)
    np.testing.assert_array_equal(several["seen"], np.full((len(BATCHES), REPLICAS), 10))


ONE = start(PARAMS) | {"mean": np.zeros(3, np.float32)}
STATISTICS = lambda state: state["mean"], lambda state, new: state | {"mean": new}


def started(state=ONE, **options):
    return made(**{"statistics": STATISTICS, **options}).init(state)


def called(state=None, batch=BATCHES[0], *more, **options):
    step = made(**options)
    return step(step.init(start(PARAMS)) if state is None else state, batch, *more)


def returning(what):
    return lambda: called(train_step=lambda state, batch: what(*stepped(state, batch)))


REFUSED = {
    "reset": Refusal(lambda: made("reset"), "`inner_state`", "`get_opt_state`"),
    "an argument less": Refusal(lambda: called(in_axes=(0, None)), "`in_axes`", "1 further"),
    "averaged twice": Refusal(
        lambda: started(statistics=tuple(PARTS.values())), "`statistics`", "parameters"
    ),
    "the other order": Refusal(
        returning(lambda state, metrics: (metrics["loss"], state)), "`train_step`", "1 arrays"
    ),
}


@each(REFUSED)
def test_refused(refusal):
    refusal.check()


def test_statistics_that_are_forgotten_and_raw_keys_are_told():
    """Warnings are errors in this suite; the counters of nnx beside typed keys look like keys."""
    with pytest.warns(UserWarning, match=r"with_exchange: mean of the state are never averaged"):
        started(statistics=None, **MOMENTS)
    started(**MOMENTS)
    with pytest.warns(UserWarning, match="`state`: key looks like a PRNG key without a type"):
        made().init(start(PARAMS) | {"key": jax.random.PRNGKey(0)})
    counts = {"counts": np.zeros(2, np.uint32)}
    state = made().init(start(PARAMS) | {"key": jax.random.key(0)} | counts)
    assert len({str(jax.random.key_data(x)) for x in state.state["key"]}) == REPLICAS
    np.testing.assert_array_equal(state.state["counts"], np.zeros((REPLICAS, 2)))
