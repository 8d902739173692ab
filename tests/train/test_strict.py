"""Steps, loops and pipelines under jax's debugging settings, and inside of `jax.set_mesh`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.strict import SETTINGS, assert_equal_bits

# Shards of the anchor are longer than what is compared of a state that is given.
PARAMS = {"w": np.linspace(-1, 1, 1200, dtype=np.float32).reshape(4, 300)}
PARAMS["b"] = np.zeros(300, np.float32)
MODEL_STATE = {"mean": np.zeros(300, np.float32), "seen": np.zeros([], np.int32)}
BATCHES = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)
CASES = [
    (
        js.slowmo("replica", base=js.sgp("replica"), sync_every=4, momentum=0.5),
        lambda: jax.make_mesh((4,), ("replica",)),  # with an Explicit axis
        "traced",
    ),
    (
        js.diloco("replica", sync_every=4, fragments=2, delay=1, codec=js.codecs.top_k(0.3)),
        lambda: js.make_mesh({"replica": 4, "device": 2}),
        "host",
    ),
]


def loss_fn(params, batch, *, rng, model_state):
    y = jnp.tanh(batch @ params["w"] + params["b"][None])
    y = y * jax.random.bernoulli(rng, 0.9, y.shape).astype(y.dtype)
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * y.mean(0), "seen": model_state["seen"] + 1}
    return jnp.mean(y**2), ({"largest": jnp.max(y)}, state)


def program(sync, mesh, mode):
    """Do with a step what programs do; return all that it computed."""
    step = js.make_train_step(
        loss_fn,
        js.chain(
            js.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
        ),
        sync=sync,
        mesh=mesh,
        mode=mode,
        accumulate=2,
    )
    state = step.init(PARAMS, model_state=MODEL_STATE)
    found = []
    for batch in BATCHES[:3]:
        state, metrics = step(state, batch)
        found.append(metrics)
    window, _ = step.collect(state, BATCHES[3])
    state, metrics = step(state, BATCHES[4], window=window)
    state = js.set_hyperparams(state, learning_rate=0.05)
    state = js.TrainState(*state)  # as another library restores it
    weight = np.float32([1, 2, 0, 1])
    state, _ = step(state, BATCHES[5], weight)
    for result in js.train_loop(step, state, BATCHES[6:]):
        state = result.state
    found += [metrics, step.evaluate(state, BATCHES[0]), step.consensus(state)]
    if sync.algorithm.has_anchor:
        found.append(js.read_anchor(sync, state.exchange, state.params, mesh=mesh))
    found.append(js.host_mean(metrics))
    js.check_in_sync(js.replicate(PARAMS, mesh=mesh), mesh=mesh)
    js.comm_report(step, state, BATCHES[0])
    return found, state


@pytest.mark.parametrize(("sync", "make_mesh", "mode"), CASES)
def test_a_run_is_the_same_under_every_setting(sync, make_mesh, mode):
    mesh = make_mesh()
    expected = program(sync, mesh, mode)
    with SETTINGS["checks"](mesh), SETTINGS["set_mesh"](mesh):
        found = program(sync, mesh, mode)
    assert_equal_bits(found, expected)
