"""Arguments, axes, leaves and states that algorithms refuse, and what they warn of once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.bad_input import PARAMS, one_update, trace, warning_messages
from support.refusals import Refusal, each
from support.transforms import IRREGULAR

LOCAL = js.local_sgd("replica", sync_every=3)
SLOW = functools.partial(js.slowmo, "replica", base=LOCAL, sync_every=6)
LOCAL_SGD, SGP, DILOCO = (
    functools.partial(f, "replica") for f in (js.local_sgd, js.sgp, js.diloco)
)
FOUR = js.virtual_mesh({"replica": 4})
RING, BFLOAT16 = js.topology.ring(4), js.codecs.bfloat16()
FLOAT16 = js.codecs.float16(error_feedback=True)
UNEVEN = js.topology.self_weighted([0.3, 0.5, 0.65, 0.4])
ALL_BEFORE = js.every(12, start=4, before="all")
ADAM = optax.adam(0.1)
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


def nothing_kept(graph, step):
    """Every node passes on all of its values."""
    p = js.topology.mixing_matrix(graph, None, step)
    np.fill_diagonal(p, 0)
    return p / p.sum(0)


def of(make, *said, **options):
    """Refused where it is made: by the first option and its value, unless `said` has others."""
    (name, value), *_ = options.items()
    found = (f"`{name}`", value) if not said else (f"`{name}`", *said) if len(said) == 1 else said
    return Refusal(lambda: make(**options), *found)


def first(tx, *said, init=None, execution="vmap", **options):
    """Refused in a first update."""
    update = one_update(tx, init=init, **options)
    return Refusal(lambda: trace(update, PARAMS, execution=execution), *said)


def stepped(sync, optimizer, *said, error=ValueError):
    """Refused in a training step."""

    def call():
        loss = lambda params, batch: jnp.sum(params["w"]) * batch.mean()  # noqa: E731
        step = js.make_train_step(loss, optimizer, sync=sync, mesh=FOUR)
        step(step.init({"b": jnp.ones(2), "w": jnp.ones(3)}), np.ones(4, np.float32))

    return Refusal(call, *said, error=error)


ARGUMENTS = {
    **{
        f"an argument of {name}": Refusal(
            functools.partial(make, **{wrong: 1}), f"no argument `{wrong}`", f"`{right}`", TypeError
        )
        for name, make, wrong, right in (
            ("diloco", DILOCO, "learning_rate", "outer_optimizer"),
            ("slowmo", SLOW, "outer_optimizer", "slow_learning_rate"),
            ("local_sgd", LOCAL_SGD, "every", "sync_every"),
        )
    },
    "period 0": of(LOCAL_SGD, sync_every=0),
    "period of slow steps": of(SLOW, sync_every=2.5),
    "period of outer steps": of(DILOCO, sync_every=0),
    "axis": of(js.sgp, axis_name=None),
    "graph": of(SGP, graph="ring"),
    "graph that is a mixing": of(SGP, "uniform_mixing", graph=js.topology.uniform_mixing()),
    "graph that is none": first(SGP(graph=lambda n: [[1], [0]] * n), "`graph`", "list"),
    "graph of other sizes": first(SGP(graph=lambda n: js.topology.ring(8)), "`graph`", "ring(8)"),
    "graph of a base": first(SLOW(base=SGP(graph=js.topology.ring(8))), "`graph`", "ring(8)"),
    "graph of a step": stepped(SGP(graph=js.topology.ring(8)), optax.sgd(0.1), "`graph`", 8),
    "an outer optimizer that needs the loss": stepped(
        DILOCO(sync_every=1, outer_optimizer=optax.contrib.reduce_on_plateau()), optax.sgd(0.1),
        "`outer_optimizer`", "`value`", error=TypeError,
    ),
    "graph of other axes": Refusal(
        lambda: js.sgp(("a", "b"), graph=RING).bound({"a": 2, "b": 4}), "('a', 'b')", 8
    ),
    "mixing": of(SGP, mixing=0.5),
    "mixing, once it is sized": first(SGP(mixing=lambda *_: np.eye(3)), "(4, 4)", "(3, 3)"),
    "overlap -1": of(SGP, overlap=-1),
    "overlap, nothing kept": of(SGP, 2, overlap=2, graph=RING, mixing=nothing_kept),
    "push_sum": of(SGP, push_sum=1),
    "push_sum for a mixing": of(SGP, "ring(4)", push_sum=False, graph=RING, mixing=UNEVEN),
    "push_sum for a graph": of(SGP, "custom(4)", push_sum=False, graph=IRREGULAR),
    "momentum 1": of(SLOW, momentum=1.0),
    "momentum below 0": of(js.slow_momentum, momentum=-0.1),
    "slow rate below 0": of(SLOW, slow_learning_rate=-0.5),
    "slow rate without end": of(SLOW, slow_learning_rate=np.inf),
    "rate that is none": of(SLOW, learning_rate=np.nan),
    "rate that is a truth value": of(SLOW, learning_rate=jnp.bool_(True)),
    "rates": of(SLOW, "array(", momentum=np.ones(3)),
    "base": of(SLOW, "GradientTransformation", base=optax.sgd(0.1)),
    "base with slow steps": of(SLOW, "slow step", base=DILOCO()),
    "inexact without a base": of(SLOW, "exact_average", "`base`", base=None, exact_average=False),
    "inexact, sharded": of(SLOW, "exact_average", "=True", exact_average=False, shard_state=True),
    "inexact with a codec": of(SLOW, codec=BFLOAT16, exact_average=False),
    "inexact with a delay": of(SLOW, "exact_average", "delay=1", exact_average=False, delay=1),
    "codec": of(SGP, codec="bfloat16"),
    "outer optimizer": of(DILOCO, "float", outer_optimizer=0.7),
    "outer exchange": of(DILOCO, "Transform", outer_optimizer=js.local_sgd("replica")),
    "fragments 0": of(DILOCO, fragments=0),
    "fragments True": of(DILOCO, fragments=True),
    "fragments, no divisor": of(DILOCO, fragments=5, sync_every=12),
    "fragments beside all": of(DILOCO, fragments=3, sync_every=ALL_BEFORE),
    "delay -1": of(LOCAL_SGD, delay=-1),
    "delay as long as a period": of(
        DILOCO, "delay=12", delay=12, sync_every=12, fragments=2
    ),
    "delay beside all": of(DILOCO, delay=1, sync_every=ALL_BEFORE),
    "merge above 1": of(LOCAL_SGD, merge=1.5),
    "inner state": of(LOCAL_SGD, inner_state="zero"),
    "inner state of outer steps": of(DILOCO, inner_state=None),
    "inner state, fragments": of(DILOCO, inner_state="reset", fragments=2),
    "inner state, inexact": of(SLOW, inner_state="average", exact_average=False),
    "inner state of a base": of(SLOW, "`inner_state`", base=LOCAL_SGD(inner_state="reset")),
    "groups": of(js.hierarchical_local_sgd, sync_every={}),
    "groups with one period": of(js.hierarchical_local_sgd, 4, sync_every={"a": 4, ("a", "b"): 4}),
    "groups not nested": of(js.hierarchical_local_sgd, "'a'", sync_every={"a": 2, ("b", "c"): 4}),
    "guard of an optimizer": of(js.only_finite, "GradientTransformation", inner=SGD),
    "anchor of none": Refusal(lambda: js.read_anchor(LOCAL, (), PARAMS, mesh=FOUR), "`sync`"),
}  # fmt: skip
RATE = SLOW(learning_rate="optimizer")
INTS, BOOLS = ({"dense": {"x": jnp.zeros((4, 2), dtype)}} for dtype in (jnp.int32, bool))
UPDATES = {
    "no parameters": Refusal(lambda: LOCAL.update(PARAMS, LOCAL.init(PARAMS)), "params"),
    "integers": Refusal(lambda: trace(LOCAL.init, INTS), "dense/x", "int32"),
    "truth values": Refusal(
        lambda: trace(lambda p: LOCAL.update(p, LOCAL.init({}), p), BOOLS), "dense/x", "bool"
    ),
    "phase of others": first(LOCAL, "`phase`", ("slow",), phase=("slow",)),
    "phase that is no tuple": first(LOCAL, "`phase`", "average", phase="average"),
    "phase of a base": first(
        SLOW(base=SGP(), exact_average=False), "`phase`", "average", phase=("average", "slow")
    ),
    "phases of a graph that is not known": Refusal(
        lambda: SGP().phase(1), "`graph`", "`transform.bound({axis: size})`"
    ),
    "phases of a base that is not known": Refusal(lambda: SLOW(base=SGP()).phase(1), "`graph`"),
    "phase of no round": first(SGP(), "`phase`", phase=("round -1",)),
    "phase of two rounds": first(SGP(), "`phase`", phase=("round 0", "round 1")),
    "weight below 0": first(LOCAL, "`weight`", -1.0, weight=-1.0),
    "weight without end": first(LOCAL, "`weight`", np.inf, weight=np.inf),
    "weights": first(LOCAL, "`weight`", [2], weight=np.ones(2, np.float32)),
    "rate that is missing": first(RATE, "learning_rate=rate"),
    "rate that is no scalar": first(RATE, "`learning_rate`", "(3,)", learning_rate=np.ones(3)),
    "rate of none": stepped(RATE, optax.sgd(0.1), "learning_rate", "got 0"),
    "rate of two": stepped(RATE, optax.chain(SGD, SGD), "learning_rate", 2),
    "rate inside of an optimizer": stepped(None, optax.chain(SGD, RATE), "`learning_rate`"),
    "fragments of few leaves": first(DILOCO(sync_every=12, fragments=6), "`fragments`", "6 for 2"),
    "fragments, a gap": first(DILOCO(fragments=lambda x: 2 * (x == "w")), "`fragments`", "0, 2"),
    "fragments not known": Refusal(lambda: DILOCO(fragments=lambda x: 0).phase(1), "`fragments`"),
    "inner state alone": first(
        js.only_finite(DILOCO(inner_state="reset")), "js.make_train_step or js.chain", "'reset'"
    ),
    "inner state in an optax.chain": stepped(
        None, optax.chain(SGD, LOCAL_SGD(inner_state="average")), "`inner_state`", "js.chain"
    ),
    "inner state in another form": stepped(
        LOCAL_SGD(sync_every=1, inner_state="average"), optax.flatten(ADAM), "`inner_state`", [5]
    ),
    "axis of several": first(
        js.local_sgd(("replica", "devise")), "'devise'", "'replica'", execution="shard_map"
    ),
    "axis at init": Refusal(lambda: DILOCO().init(PARAMS), "`axis_name`", "js.init"),
    "axis at init, or whole": Refusal(lambda: DILOCO().init(PARAMS), "shard_state=False"),
    "axis unbound": Refusal(lambda: LOCAL.update(PARAMS, RATE.init, PARAMS), "`axis_name`", "none"),
    "axis of a guard": first(js.only_finite(js.local_sgd("x")), "only_finite", "'x'"),
    "local axis": first(SGP(local_axis_name="devise"), "`local_axis_name`", "'devise'", init=SGP()),
    "local axis at init": Refusal(lambda: trace(DILOCO(local_axis_name="x").init, PARAMS), "'x'"),
    "local axis of replicas": first(LOCAL_SGD(local_axis_name="replica"), "`local_axis_name`"),
    "axis of specs": first(LOCAL.with_specs(P("x")), "`param_specs`", execution="shard_map"),
}  # fmt: skip


@each(ARGUMENTS | {f"update: {name}": refusal for name, refusal in UPDATES.items()})
def test_refused(refusal):
    refusal.check()


def test_edges_of_the_ranges_are_allowed():
    SLOW(momentum=0.0, slow_learning_rate=0.0, learning_rate=0.0)
    for overlap in (0, 1):
        SGP(graph=RING, mixing=nothing_kept, overlap=overlap)
    DILOCO(sync_every=12, fragments=2, delay=11, merge=np.float32(1))
    DILOCO(sync_every=12, merge=0.5, delay=2, shard_state=True, codec=FLOAT16)
    SLOW(base=SGP(graph=js.topology.from_phone_book([[]])))  # a single node exchanges nothing
    assert len(SGP(overlap=np.int64(3)).init({"w": jnp.ones(2)}).local.in_flight) == 2


@pytest.mark.parametrize("tx", [LOCAL, SLOW(shard_state=False), SLOW(exact_average=False)])
def test_a_state_without_shards_is_made_without_the_axis(tx):
    """nnx.Optimizer and TrainState.create make a state without the axis."""
    inside = jax.vmap(tx.init, axis_name="replica")(PARAMS)
    outside = tx.init(jax.tree.map(lambda x: x[0], PARAMS))
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert np.array_equal(a[0], b)


@pytest.mark.parametrize("tx", [LOCAL, SGP(), DILOCO()])
def test_parameters_that_are_equal_by_their_types_are_refused(tx, mesh_of):
    """Jax has summed their gradients over the replicas; equal updates alone are legal."""

    def types(vary):
        def one(params):
            own = jax.lax.pcast(params, "replica", to="varying")
            updates, _ = tx.update(params, tx.init(own), own if vary else params)
            return jax.tree.map(lambda x: x[None], updates)

        mesh = mesh_of({"replica": 4})
        mapped = jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P("replica"))
        return jax.eval_shape(mapped, {"w": jnp.ones(3)})

    with pytest.raises(ValueError, match=r"w \(over 'replica'\).*pcast"):
        types(vary=False)
    assert types(vary=True)["w"].shape == (4, 3)


def on_one(tx):
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    return [lambda: trace(one_update(tx), one, axes={"replica": 1})] * 2


WARNINGS = {
    "local_sgd: axis 'replica' has size 1": on_one(LOCAL),
    "sgp: axis 'replica' has size 1": on_one(SGP()),
    "slowmo: axis 'replica' has size 1": on_one(SLOW(base=SGP())),
    "without a `base`": [
        lambda: trace(one_update(js.slowmo("replica", shard_state=False)), PARAMS)
    ],
    "`sync_every`=4 is not a multiple of the base's 3": [lambda: SLOW(sync_every=4), SLOW],
}


@pytest.mark.parametrize("said", WARNINGS)
def test_it_is_told_once(said):
    (message,) = warning_messages(*WARNINGS[said])
    assert said in message
