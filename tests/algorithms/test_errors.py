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

LOCAL = js.local_sgd("replica", sync_every=3)
SLOW = functools.partial(js.slowmo, "replica", base=LOCAL, sync_every=6)
LOCAL_SGD, SGP, DILOCO, NOLOCO, SPARTA = (
    functools.partial(f, "replica") for f in (js.local_sgd, js.sgp, js.diloco, js.noloco, js.sparta)
)
FOUR = js.virtual_mesh({"replica": 4})
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


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
    "an argument of another algorithm": Refusal(
        lambda: DILOCO(learning_rate=1), "`learning_rate`", "`outer_optimizer`", TypeError
    ),
    "period 0": of(LOCAL_SGD, sync_every=0),
    "graph": of(SGP, graph="ring"),
    "graph of a step": stepped(SGP(graph=js.topology.ring(8)), optax.sgd(0.1), "`graph`", 8),
    "an outer optimizer that needs the loss": stepped(
        DILOCO(sync_every=1, outer_optimizer=optax.contrib.reduce_on_plateau()), optax.sgd(0.1),
        "`outer_optimizer`", "`value`", error=TypeError,
    ),
    "momentum 1": of(SLOW, momentum=1.0),
    "base": of(SLOW, "GradientTransformation", base=optax.sgd(0.1)),
    "base with slow steps": of(SLOW, "slow step", base=DILOCO()),
    "codec": of(SGP, codec="bfloat16"),
    "fragments, no divisor": of(DILOCO, fragments=5, sync_every=12),
    "delay as long as a period": of(
        DILOCO, "delay=12", delay=12, sync_every=12, fragments=2
    ),
    "aggregate": of(DILOCO, aggregate="median"),
    "aggregate in a codec": of(DILOCO, "`aggregate`", aggregate=js.rda(), codec=js.codecs.int8()),
    "slow steps over pairs": of(SLOW, "slow step", base=NOLOCO()),
    "weights beyond float32": Refusal(
        lambda: SGP(graph=js.topology.star(128, peers_per_step=1)).bound({"replica": 128}),
        "star(128)",
        "1e-30",
    ),
    "parameters in few bits": of(SGP, "`codec`", codec=js.codecs.top_k(0.1)),
    "anchor of none": Refusal(lambda: js.read_anchor(LOCAL, (), PARAMS, mesh=FOUR), "`sync`"),
}  # fmt: skip
RATE = SLOW(learning_rate="optimizer")
INTS = {"dense": {"x": jnp.zeros((4, 2), jnp.int32)}}
UPDATES = {
    "integers": Refusal(lambda: trace(LOCAL.init, INTS), "dense/x", "int32"),
    "phase of a base": first(
        SLOW(base=SGP(), exact_average=False), "`phase`", "average", phase=("average", "slow")
    ),
    "weight below 0": first(LOCAL, "`weight`", -1.0, weight=-1.0),
    "rate that is missing": first(RATE, "learning_rate=rate"),
    "rate of none": stepped(RATE, optax.sgd(0.1), "learning_rate", "got 0"),
    "fragments not known": Refusal(lambda: DILOCO(fragments=lambda x: 0).phase(1), "`fragments`"),
    "fragments of few leaves": first(DILOCO(sync_every=12, fragments=6), "`fragments`", "6 for 2"),
    "inner state in an optax.chain": stepped(
        None, optax.chain(SGD, LOCAL_SGD(inner_state="average")), "`inner_state`", "js.chain"
    ),
    "inner state in another form": stepped(
        LOCAL_SGD(sync_every=1, inner_state="average"),
        optax.contrib.muon(0.1),
        "`inner_state`",
        "float32[3]",
    ),
    "axis of several": first(
        js.local_sgd(("replica", "devise")), "'devise'", "'replica'", execution="shard_map"
    ),
    "axis at init": Refusal(lambda: DILOCO().init(PARAMS), "`axis_name`", "shard_state=False"),
}  # fmt: skip


@each(ARGUMENTS | {f"update: {name}": refusal for name, refusal in UPDATES.items()})
def test_refused(refusal):
    refusal.check()


@pytest.mark.parametrize("tx", [LOCAL, SLOW(shard_state=False)])
def test_a_state_without_shards_is_made_without_the_axis(tx):
    """nnx.Optimizer and TrainState.create make a state without the axis."""
    inside = jax.vmap(tx.init, axis_name="replica")(PARAMS)
    outside = tx.init(jax.tree.map(lambda x: x[0], PARAMS))
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert np.array_equal(a[0], b)


@pytest.mark.parametrize("tx", [LOCAL, DILOCO()])
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
    "without a `base`": [
        lambda: trace(one_update(js.slowmo("replica", shard_state=False)), PARAMS)
    ],
    "`sync_every`=4 is not a multiple of the base's 3": [lambda: SLOW(sync_every=4), SLOW],
}


@pytest.mark.parametrize("said", WARNINGS)
def test_it_is_told_once(said):
    (message,) = warning_messages(*WARNINGS[said])
    assert said in message
