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
from train.libraries import (
    ADAM,
    BATCHES,
    FORMS,
    MOMENTS,
    PARAMS,
    PARTS,
    RANDOM,
    REPLICAS,
    SPECS,
    WIDTH,
    loss_fn,
    start,
    stepped,
)

MESHES = {
    "virtual": lambda: js.virtual_mesh({"replica": REPLICAS}),
    "devices": lambda: js.make_mesh({"replica": REPLICAS}),
    "fsdp": lambda: js.make_mesh({"replica": REPLICAS, "fsdp": 2}),
}
SYNCS = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "diloco": lambda: js.diloco("replica", sync_every=3),
    "slowmo of sgp": lambda: js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "fragments": lambda: js.diloco("replica", sync_every=4, delay=1, fragments=2, merge=0.5),
}


def placed(mesh):
    if "fsdp" not in mesh.shape:
        return PARAMS
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in PARAMS.items()}


def reference(sync, optimizer=ADAM, weights=None, loss=loss_fn, model_state=None, **options):
    """Return the step of this package on virtual replicas, and its last state."""
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, donate=False, **options)
    state = step.init(PARAMS, model_state=model_state)
    for i, batch in enumerate(BATCHES):
        state, _ = step(state, batch, None if weights is None else weights[i])
    return step, state


@functools.cache
def known(sync):
    return reference(SYNCS[sync]())


def assert_close(tree, expected, tolerance=2e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        *jax.device_get((tree, expected)),
    )


@pytest.mark.parametrize(
    ("form", "sync", "mesh", "mode", "map_with"),
    [
        ("plain", "local_sgd", "virtual", "host", "shard_map"),
        ("plain", "slowmo of sgp", "devices", "host", "vmap"),
        ("plain", "fragments", "fsdp", "traced", "shard_map"),
        ("plain", "slowmo of sgp", "fsdp", "traced", "vmap"),
        ("flax", "diloco", "devices", "traced", "shard_map"),
        ("flax", "fragments", "fsdp", "host", "vmap"),
        ("nnx", "fragments", "virtual", "traced", "vmap"),
        ("nnx", "diloco", "fsdp", "host", "shard_map"),
    ],
)
def test_a_step_of_another_library_trains_as_the_training_step(form, sync, mesh, mode, map_with):
    """So does a scan of it. State that is sharded inside a replica stays so."""
    mesh = MESHES[mesh]()
    train_step, state, parts, as_dict = FORMS[form](placed(mesh))
    settings = {"mesh": mesh, "mode": mode, "map_with": map_with}
    step = js.with_exchange(train_step, SYNCS[sync](), **settings, **parts)
    other, expected = known(sync)
    called, scanned = step.init(state), step.init(state)
    losses = []
    for t, batch in enumerate(BATCHES, 1):
        assert step.next_phase(called) == step.phase(t) == other.phase(t)
        called, metrics = step(called, batch)
        losses.append(metrics["loss"])
    first, then = BATCHES[:5], BATCHES[5:]
    scanned, before = step.scan(scanned, first)
    scanned, after = step.scan(scanned, then)
    assert step.next_phase(scanned) == other.next_phase(expected)
    assert_close(np.concatenate([before["loss"], after["loss"]]), np.stack(losses))
    for end in called, scanned:
        params = as_dict(parts["get_params"](end.state))
        assert_close(params, expected.params)
        assert_close(as_dict(step.consensus(end)), other.consensus(expected))
        if "fsdp" in mesh.shape:
            for name, x in params.items():
                lies = NamedSharding(mesh, P("replica", *SPECS[name]))
                assert x.sharding.is_equivalent_to(lies, x.ndim)
    report = js.comm_report(step, called, BATCHES[0])
    if "local" in report.kinds:
        assert not [row for row in report.select(kind="local") if "replica" in row.axis]


WEIGHTS = RANDOM.integers(1, 4, size=(len(BATCHES), REPLICAS)).astype(np.float32)
WEIGHTS[3:, 1] = 0


def run(step, state, **options):
    for i, batch in enumerate(BATCHES):
        given = {name: values[i] for name, values in options.items()}
        state, metrics = step(state, batch, **given)
    return state, metrics


@pytest.mark.parametrize(
    ("mesh", "map_with"), [("virtual", "shard_map"), ("devices", "vmap"), ("fsdp", "shard_map")]
)
def test_a_replica_of_weight_0_keeps_its_state_and_follows_the_others(mesh, map_with):
    mesh = MESHES[mesh]()
    step = js.with_exchange(stepped, SYNCS["local_sgd"](), mesh=mesh, map_with=map_with, **PARTS)
    end, metrics = run(step, step.init(start(placed(mesh))), weight=WEIGHTS)
    _, expected = reference(SYNCS["local_sgd"](), weights=WEIGHTS)
    assert_close(end.state["params"], expected.params)
    assert_close(end.state["opt"], expected.opt_state)
    assert end.state["n"].tolist() == [7, 3, 7, 7]
    assert metrics["loss"][1] == 0


def test_the_loop_gives_weights_and_an_evaluation_needs_a_state_with_parameters():
    """The weights of a `js.train.WeightedBatch` are the step's `weight`, no further argument."""
    mesh = MESHES["virtual"]()
    step = js.with_exchange(stepped, SYNCS["local_sgd"](), mesh=mesh, **PARTS)
    weighted = [js.train.WeightedBatch(*both) for both in zip(BATCHES, WEIGHTS, strict=True)]
    *_, last = js.train_loop(step, step.init(start(PARAMS)), weighted)
    end, _ = run(step, step.init(start(PARAMS)), weight=WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, last.state, end)
    hooks = [js.train.Evaluate(lambda params, _: params, mesh=mesh, every=1)]
    with pytest.raises(ValueError, match=r"got ReplicaState.*`consensus\(state\)`"):
        next(js.train_loop(step, step.init(start(PARAMS)), BATCHES, hooks=hooks))


@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.asarray])
def test_without_communication_replicas_train_independently(mode, kind):
    """Each exchange is a round of the graph's rotation, and a skipped one is none."""
    sync = js.sgp("replica", graph=js.topology.directed_exponential(REPLICAS))
    sync = js.slowmo("replica", base=sync, sync_every=4)
    mesh = MESHES["devices"]()
    step = js.with_exchange(stepped, sync, mesh=mesh, mode=mode, **PARTS)
    silent = [kind(False)] * len(BATCHES)
    end, _ = run(step, step.init(start(PARAMS)), communicate=silent)
    assert_close(end.state["params"], reference("none")[1].params)
    state, phases = step.init(start(PARAMS)), []
    for t, batch in enumerate(BATCHES, 1):
        phases.append(step.next_phase(state))
        state, _ = step(state, batch, communicate=kind(t != 2))
    first, skipped, *rest = phases
    assert (first, skipped) == (("round 0",), ("round 1",))
    assert rest == [("round 1",), ("slow",), ("round 2",), ("round 3",), ("round 0",)]


def test_statistics_are_averaged_whenever_parameters_are():
    def moved(model_state, batch):
        return {"mean": 0.9 * model_state["mean"] + 0.1 * batch.mean(0), "n": model_state["n"] + 1}

    def loss(params, batch, *, model_state):
        return loss_fn(params, batch), ({}, moved(model_state, batch))

    def train_step(state, batch):
        new, metrics = stepped(state, batch)
        return new | {"model": moved(state["model"], batch)}, metrics

    first = {"mean": np.zeros(WIDTH, np.float32), "n": np.int32(0)}
    statistics = (
        lambda state: state["model"]["mean"],
        lambda state, mean: state | {"model": state["model"] | {"mean": mean}},
    )
    _, expected = reference(SYNCS["diloco"](), loss=loss, model_state=first)
    mesh = MESHES["devices"]()
    step = js.with_exchange(
        train_step, SYNCS["diloco"](), mesh=mesh, statistics=statistics, **PARTS
    )
    end, _ = run(step, step.init(start(PARAMS) | {"model": first}))
    assert_close(end.state["model"], expected.model_state)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize("mesh", MESHES)
def test_of_statistics_the_floating_arrays_are_averaged(mesh, weights):
    """Counters and keys beside them are each replica's own."""

    def train_step(state, batch):
        new, metrics = stepped(state, batch)
        mean, n, key = state["model"]
        moved = 0.9 * mean + 0.1 * batch.mean(0), n + 1, jax.random.split(key)[0]
        return new | {"model": moved}, metrics

    part = lambda state: state["model"], lambda state, new: state | {"model": new}
    mesh, key = MESHES[mesh](), jax.random.key(1)
    step = js.with_exchange(train_step, SYNCS["local_sgd"](), mesh=mesh, statistics=part, **PARTS)
    first = np.zeros(WIDTH, np.float32), np.int32(0), key
    state = step.init(start(placed(mesh)) | {"model": first})
    state, _ = run(step, state, **({} if weights is None else {"weight": weights}))
    mean, n, keys = state.state["model"]
    assert n.tolist() == ([7] * REPLICAS if weights is None else [7, 3, 7, 7])
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == REPLICAS
    expected = np.zeros((REPLICAS, WIDTH))
    for t, batch in enumerate(BATCHES, 1):
        weight = np.ones(REPLICAS) if weights is None else weights[t - 1]
        moved = 0.9 * expected + 0.1 * batch.reshape(REPLICAS, 2, WIDTH).mean(1)
        expected = np.where(weight[:, None] > 0, moved, expected)
        if t % 2 == 0:
            expected = np.tile(np.average(expected, axis=0, weights=weight), (REPLICAS, 1))
    assert_close(mean, expected)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize(
    ("mesh", "map_with"), [("virtual", "shard_map"), ("devices", "vmap"), ("fsdp", "shard_map")]
)
def test_gradients_are_reduced_where_the_step_says_so(mesh, map_with, weights):
    """A replica of weight 0 then takes the mean of the others' gradients."""
    reduction = js.all_reduce_gradients("replica")
    _, expected = reference(SYNCS["diloco"](), weights=weights, gradients=reduction)
    mesh = MESHES[mesh]()
    settings = {"mesh": mesh, "map_with": map_with, "gradients": reduction}
    step = js.with_exchange(stepped, SYNCS["diloco"](), **settings, **PARTS)
    state = step.init(start(placed(mesh)))
    end, _ = run(step, state, **({} if weights is None else {"weight": weights}))
    assert_close(end.state["params"], expected.params)


SCHEDULED = optax.inject_hyperparams(optax.sgd)(
    learning_rate=lambda t: jnp.asarray([0.02, 0.05, 0.1])[t % 3], momentum=0.9
)
READS_THE_OPTIMIZER = {
    "reset": lambda: js.diloco("replica", sync_every=3, inner_state="reset"),
    "average": lambda: js.local_sgd("replica", sync_every=2, inner_state="average"),
    "rate": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica"), sync_every=3, learning_rate="optimizer"
    ),
}


@pytest.mark.parametrize("reads", READS_THE_OPTIMIZER)
@pytest.mark.parametrize("mode", ["traced", "host"])
def test_the_exchange_reads_and_changes_the_state_of_the_optimizer(reads, mode):
    _, expected = reference(READS_THE_OPTIMIZER[reads](), SCHEDULED)
    train_step = functools.partial(stepped, optimizer=SCHEDULED)
    step = js.with_exchange(
        train_step, READS_THE_OPTIMIZER[reads](), mesh=MESHES["devices"](), mode=mode,
        **PARTS, **MOMENTS,
    )  # fmt: skip
    end, _ = run(step, step.init(start(PARAMS, SCHEDULED)))
    assert_close(end.state["params"], expected.params)
    assert_close(end.state["opt"], expected.opt_state)


def test_arguments_that_are_not_split_reach_every_replica_whole():
    def train_step(state, batch, settings):
        new, metrics = stepped(state, batch + settings["shift"][None])
        return new, metrics | {"seen": settings["table"].sum()}

    table = np.arange(5, dtype=np.float32)
    shift = np.zeros((len(BATCHES), REPLICAS * WIDTH), np.float32)
    in_axes = (0, {"shift": 0, "table": None})
    for mesh in "virtual", "devices":
        step = js.with_exchange(
            train_step, SYNCS["diloco"](), mesh=MESHES[mesh](), in_axes=in_axes, **PARTS
        )
        called = scanned = None
        called, scanned = step.init(start(PARAMS)), step.init(start(PARAMS))
        for batch, x in zip(BATCHES, shift, strict=True):
            called, metrics = step(called, batch, {"shift": x, "table": table})
        scanned, several = step.scan(scanned, BATCHES, {"shift": shift, "table": table})
        for end in called, scanned:
            assert_close(end.state["params"], known("diloco")[1].params)
        assert metrics["seen"].tolist() == [10] * REPLICAS
        assert several["seen"].shape == (len(BATCHES), REPLICAS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sync": READS_THE_OPTIMIZER["reset"]()}, "`inner_state`='reset'.*`get_opt_state`"),
        ({"sync": READS_THE_OPTIMIZER["rate"]()}, '`learning_rate`="optimizer".*`get_opt_state`'),
        (
            {"get_opt_state": MOMENTS["get_opt_state"]},
            "`set_opt_state` must be a function, got None",
        ),
        ({"sync": ADAM}, "`sync` must be a js.ParameterTransform"),
        ({"train_step": None}, "`train_step` must be a function"),
        ({"get_params": "params"}, "`get_params` must be a function"),
        ({"statistics": MOMENTS["get_opt_state"]}, "`statistics` must be two functions"),
        ({"map_with": "pmap"}, "`map_with`"),
        ({"mode": "once"}, "`mode`"),
        ({"sync": js.local_sgd("data")}, r"`sync` must exchange over axes of `mesh`.*\['data'\]"),
        ({"gradients": js.all_reduce_gradients("data")}, r"`gradients` .*\['data'\]"),
        ({"gradients": 3}, "`gradients` must be None or a reduction"),
        ({"in_axes": 1}, "`in_axes` must hold 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed, message):
    given = {"train_step": stepped, "sync": SYNCS["diloco"](), **PARTS, **changed}
    with pytest.raises(ValueError, match=message):
        js.with_exchange(mesh=MESHES["virtual"](), **given)


def test_a_reduction_needs_the_axis_of_the_replicas():
    with pytest.raises(ValueError, match=r"`gradients` needs .*\['fsdp'\]"):
        js.with_exchange(
            stepped, SYNCS["diloco"](), mesh=MESHES["fsdp"](), map_with="vmap",
            gradients=js.all_reduce_gradients("replica"), **PARTS,
        )  # fmt: skip


def test_wrong_states_and_batches_are_refused_by_name():
    step = js.with_exchange(
        stepped, SYNCS["diloco"](), mesh=MESHES["devices"](), in_axes=(0, None), **PARTS
    )
    state, alone = step.init(start(PARAMS)), start(PARAMS)
    batch, integers = BATCHES[0], start({"n": np.int32([1])}, optax.sgd(0.1))
    wrong = [
        ("`state` must be of `init", lambda: step(alone, batch, 0)),
        ("`state` must be of `init", lambda: step.scan(alone, BATCHES, 0)),
        ("`in_axes` must .* 1 further", lambda: step(state, batch)),
        ("`batch`", lambda: step(state, batch[:3], 0)),
        ("`communicate` must be", lambda: step(state, batch, 0, communicate="no")),
        ("`batches` must have the same first dim", lambda: step.scan(state, np.float32(1), 0)),
        ("floating", lambda: step.init(integers)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()


def test_fragments_are_those_of_one_model():
    """A function of leaves divides the first parameters; others are refused by name."""
    sync = js.diloco("replica", sync_every=4, fragments=lambda name: int(name == "out"))
    step = js.with_exchange(stepped, sync, mesh=MESHES["virtual"](), **PARTS)
    state = step.init(start(PARAMS))
    assert step.phase(4) == step.next_phase(state, 3)
    with pytest.raises(ValueError, match=r"only one of the two has \['more'\]"):
        step.init(start(PARAMS | {"more": np.zeros(WIDTH, np.float32)}))


def test_functions_that_do_not_set_what_they_get_are_refused():
    """Else parameters would never be exchanged, and nothing would say so."""
    pairs = {
        "params": (PARTS["get_params"], PARTS["set_params"]),
        "opt_state": (MOMENTS["get_opt_state"], MOMENTS["set_opt_state"]),
        "statistics": (lambda state: state["mean"], lambda state, new: state | {"mean": new}),
    }
    wrong = {
        "old arrays": lambda get, put: (get, lambda state, new: state),
        "in another form": lambda get, put: (lambda state: (get(state),), put),
    }

    def made(pairs):
        (get, put), (get_opt, put_opt), statistics = pairs.values()
        return js.with_exchange(
            stepped, SYNCS["diloco"](), mesh=MESHES["virtual"](), statistics=statistics,
            get_params=get, set_params=put, get_opt_state=get_opt, set_opt_state=put_opt,
        )  # fmt: skip

    one = start(PARAMS) | {"mean": np.zeros(3, np.float32)}
    made(pairs).init(one)
    for name, pair in pairs.items():
        for message, change in wrong.items():
            step = made(pairs | {name: change(*pair)})
            with pytest.raises(ValueError, match=f"functions for `{name}` .*{message}"):
                step.init(one)


def test_statistics_that_are_parameters_or_forgotten_are_told():
    """Parameters would be averaged twice, and statistics never."""
    statistics = (lambda state: state["mean"], lambda state, new: state | {"mean": new})
    one = start(PARAMS) | {"mean": np.zeros(3, np.float32), "rate": np.float32(1)}
    settings = {"mesh": MESHES["virtual"](), **PARTS}
    both = (PARTS["get_params"], PARTS["set_params"])
    step = js.with_exchange(stepped, SYNCS["diloco"](), statistics=both, **settings)
    with pytest.raises(ValueError, match="`statistics` must not be parameters"):
        step.init(one)
    step = js.with_exchange(stepped, SYNCS["diloco"](), **settings, **MOMENTS)
    with pytest.warns(UserWarning, match=r"with_exchange: mean of the state are never averaged"):
        step.init(one)
    for more in ({"statistics": statistics, **MOMENTS}, {}):  # warnings are errors
        js.with_exchange(stepped, SYNCS["diloco"](), **settings, **more).init(one)


@pytest.mark.parametrize("mesh", ["virtual", "devices"])
@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (lambda state, metrics: state, "dict"),
        (lambda state, metrics: (metrics["loss"], state), "a pair that begins with .* 1 arrays"),
        (lambda state, metrics: (state, metrics, 0), "tuple"),
        (lambda state, metrics: ({"params": state["params"]}, metrics), "dict of 3 arrays"),
        (lambda state, metrics: None, "NoneType"),
    ],
)
def test_a_step_that_returns_something_else_is_refused_by_name(mesh, returned, what):
    def train_step(state, batch):
        return returned(*stepped(state, batch))

    step = js.with_exchange(train_step, SYNCS["diloco"](), mesh=MESHES[mesh](), **PARTS)
    with pytest.raises(
        ValueError, match=rf"`train_step` must return .*dict of 11 arrays, .*{what}"
    ):
        step(step.init(start(PARAMS)), BATCHES[0])


def test_other_leaves_are_named():
    step = js.with_exchange(stepped, SYNCS["diloco"](), mesh=MESHES["virtual"](), **PARTS)
    for leaf in jax.nn.relu, "batch", b"raw", object():
        with pytest.raises(ValueError, match=rf"with_exchange: .* got act \({type(leaf).__name__}"):
            step.init(start(PARAMS) | {"act": leaf})
    with pytest.warns(UserWarning, match="`state`: key looks like a PRNG key without a type"):
        step.init(start(PARAMS) | {"key": jax.random.PRNGKey(0)})


@pytest.mark.parametrize("shape", [(2,), (4,)])
def test_counters_beside_typed_keys_are_no_keys(shape):
    """A warning is an error in this suite; the counters of nnx, of 4 layers, look like raw keys."""
    state = start(PARAMS) | {"key": jax.random.key(0), "counts": np.zeros(shape, np.uint32)}
    step = js.with_exchange(
        stepped, js.local_sgd("replica"), mesh=js.virtual_mesh({"replica": REPLICAS}), **PARTS
    )
    replicas, _ = step(step.init(state), BATCHES[0])
    assert len({str(jax.random.key_data(x)) for x in replicas.state["key"]}) == REPLICAS
    np.testing.assert_array_equal(replicas.state["counts"], np.zeros((REPLICAS, *shape)))
