"""Steps with a policy and a loss scale: in what they compute, who skips, what goes on.

`test_alike.py` has them beside windows, weights, clipping and tables.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import gossip_state

R, LOCAL = 4, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(4, 2)).astype(np.float32),
    "b": RNG.normal(size=2).astype(np.float32),
}
X = RNG.normal(size=(8, R * LOCAL, 4)).astype(np.float32)
SGD, MEAN = optax.sgd(0.5), js.all_reduce_gradients("replica")
NONE = np.zeros((5, R), bool)
ONE = NONE.copy()
ONE[1, 2] = True  # replica 2 overflows in the second update


def loss(params, batch):
    """Return a linear function: `factor` infinite is an overflow, 0 no gradient."""
    x, factor = batch
    return ((x @ params["w"] + params["b"]).sum(-1) * factor).mean()


def batches(overflow, bad=np.inf):
    """Make batches whose `factor` is `bad` where `overflow`, (steps, replicas), is True."""
    factors = np.where(np.repeat(overflow, LOCAL, axis=1), bad, 1.0).astype(np.float32)
    return [(x, factor) for x, factor in zip(X, factors, strict=False)]


def scaled(optimizer, axes=(), **options):
    return js.dynamic_loss_scale(optimizer, axes, **{"initial": 2.0**10} | options)


def make(optimizer, mesh=js.virtual_mesh, axes=None, fn=loss, **options):
    return js.make_train_step(fn, optimizer, mesh=mesh(axes or {"replica": R}), **options)


def run(step, given, weight=None):
    state, told = step.init(PARAMS), []
    for batch in given:
        state, metrics = step(state, batch, weight)
        told.append(metrics)
    return state, told


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


BASE = js.local_sgd("replica", sync_every=2)
SYNCS = {
    "slowmo": (js.slowmo("replica", base=BASE, sync_every=4, learning_rate=0.5), "traced"),
    "sgp": (js.sgp("replica"), "host"),
}


@pytest.mark.parametrize("name", SYNCS)
def test_replicas_stay_in_phase_when_one_skips(name):
    """The skipped update is one without a gradient, and what is due is exchanged in it."""
    sync, mode = SYNCS[name]
    step, plain = (
        make(scaled(SGD), sync=sync, mode=mode),
        make(SGD, sync=sync),
    )
    state, told = run(step, batches(ONE[:4]))
    want, _ = run(plain, batches(ONE[:4], bad=0.0))
    assert_same(state.params, want.params)
    assert step.next_phase(state) == plain.next_phase(want)
    if name == "sgp":
        assert_same(gossip_state(state.opt_state), gossip_state(want.opt_state))
    else:
        assert_same(state.opt_state[2], want.opt_state[2])
    np.testing.assert_array_equal(told[-1]["skipped_updates"], [0, 0, 1, 0])
    np.testing.assert_array_equal(told[-1]["loss_scale"], [1024, 1024, 512, 1024])


LATE = js.every(2, start=3)
POWERSGD = js.hooks.powersgd(1, 2, min_compression_rate=0.1)
TOP = js.all_reduce_gradients("replica", hook=js.hooks.top_k(0.5))
WHERE = {
    "axes": {"optimizer": scaled(optax.adam(0.1), "replica"), "sync": js.local_sgd("replica")},
    "optimizer": {"optimizer": scaled(optax.chain(MEAN, optax.adam(0.1)))},
    "a memory": {"optimizer": scaled(SGD), "gradients": TOP},
    "PowerSGD": {
        "optimizer": scaled(SGD),
        "gradients": js.all_reduce_gradients("replica", hook=POWERSGD),
    },
    "post-local": {
        "optimizer": scaled(SGD),
        "gradients": js.post_local_gradients(LATE, MEAN),
        "sync": js.local_sgd("replica", sync_every=LATE),
    },
}


@pytest.mark.parametrize("where", WHERE)
def test_all_skip_where_one_overflows_and_counters_count_on(where):
    state, told = run(make(mesh=js.make_mesh, **WHERE[where]), batches(ONE))
    np.testing.assert_array_equal(told[-1]["skipped_updates"], [1] * R)
    np.testing.assert_array_equal(told[-1]["loss_scale"], [512] * R)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state)))
    if where == "post-local":
        np.testing.assert_array_equal(state.opt_state[0].count, [5] * R)
        np.testing.assert_array_equal(state.opt_state[2].count, [5] * R)


def test_the_policy_holds_wherever_the_loss_is_called():
    seen = []

    def noting(params, batch, *, model_state):
        seen.append((params["w"].dtype, params["b"].dtype, batch[0].dtype, model_state["m"].dtype))
        value = loss(params, batch)
        return value, ({"twice": value * 2}, {"m": model_state["m"] + value})

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    searching = optax.chain(optax.sgd(1.0), search)
    step = make(
        scaled(searching, "replica"), fn=noting, sync=js.local_sgd("replica"), order="ready",
        policy=js.Policy("bfloat16", keep="b"),
    )  # fmt: skip
    state = step.init(PARAMS, model_state={"m": np.float32(0)})
    (batch,) = batches(NONE[:1])
    step.ready_order(state, batch)
    told = step.evaluate(state, batch)
    state, metrics = step(state, batch)
    assert len(seen) >= 3
    assert {tuple(map(str, x)) for x in seen} == {("bfloat16", "float32", "bfloat16", "float32")}
    for name in ("loss", "twice"):
        assert metrics[name].dtype == told[name].dtype == jnp.float32
    np.testing.assert_array_equal(told["loss"], metrics["loss"])
    floats = jax.tree.leaves((state.params, state.model_state))
    assert {x.dtype for x in floats} == {np.dtype("float32")}


def test_float16_without_a_scale_is_told_once():
    step = make(optax.sgd(0.1), gradients=MEAN, policy=js.Policy("float16"))
    with pytest.warns(UserWarning, match="js.dynamic_loss_scale") as told:
        state, metrics = run(step, batches(NONE[:2]))
    assert len(told) == 1
    assert state.params["w"].dtype == metrics[0]["loss"].dtype == np.float32
