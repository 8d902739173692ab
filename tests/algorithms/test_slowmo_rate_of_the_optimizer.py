"""`js.slowmo(learning_rate="optimizer")`: the rate is read from the optimizer's state.

`tests/train/test_hyperparams.py` changes it between steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS, STEPS = 4, 10
START = {"b": np.zeros(2, np.float32), "w": np.random.default_rng(0).normal(size=5)}
START["w"] = START["w"].astype(np.float32)
BATCHES = np.random.default_rng(1).normal(size=(STEPS, 2 * REPLICAS, 5)).astype(np.float32)
RATES = np.float32([0.05, 0.2, 0.2, 0.1, 0.1, 0.02, 0.1, 0.05, 0.05, 0.0])
WHERE = {"sharded": {}, "whole": {"shard_state": False}, "inexact": {"exact_average": False}}


def schedule(count):
    return jnp.asarray(RATES)[count]


def slow(rate, base=None, **options):
    base = base or js.local_sgd("replica", sync_every=2)
    arguments = {"sync_every": 4, "momentum": 0.7, "slow_learning_rate": 0.9, **options}
    return js.slowmo("replica", base=base, learning_rate=rate, **arguments)


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["b"] * batch[0, :2])


INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9)


def step_of(sync, optimizer=INJECTED, make_mesh=js.virtual_mesh, **options):
    mesh = make_mesh({"replica": REPLICAS})
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, donate=False, **options)


def trained(step, idle=()):
    """Train with replica 1 idle in updates `idle`; return all parameters and the last state."""
    state, history = step.init(START), []
    for t, batch in enumerate(BATCHES, start=1):
        weight = np.where((np.arange(REPLICAS) == 1) & (t in idle), 0, 1).astype(np.float32)
        state, _ = step(state, batch, weight if idle else None)
        history.append(jax.tree.map(np.asarray, state.params))
    return history, state


def assert_same(actual, expected):
    """Raise unless the trees are equal up to what two programs round differently."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "idle"), [("whole", range(2, STEPS + 1)), ("inexact", (4, 7, 8))]
)
def test_replicas_agree_after_a_slow_step_and_the_stale_rate_does_not_count(where, idle):
    """Rates fall: a stale one would carry the momentum of large steps into small ones."""
    falling = lambda t: 0.1 * 0.5 ** jnp.asarray(t, jnp.float32)  # noqa: E731
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=falling)
    history, state = trained(step_of(slow("optimizer", **WHERE[where]), optimizer), idle)
    for t in (4, 8):
        for x in history[t - 1].values():
            np.testing.assert_allclose(x, np.broadcast_to(x[0], x.shape), rtol=1e-5, atol=1e-6)
    local, shared, _ = state.exchange
    outer = (local if where == "inexact" else shared)["outer"]
    np.testing.assert_allclose(outer.last_rate, falling(7), rtol=1e-6)
    assert np.ptp(outer.made_at) == 0
    expected, _ = trained(step_of(slow(falling, **WHERE[where]), optimizer), idle)
    assert_same(history, expected)
