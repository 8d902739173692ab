"""How many steps are unfinished at once on CPU devices: eight, of a step's and of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

MOST = 8


@jax.jit
def slow(x):
    return jnp.linalg.matrix_power(x, 200)


@pytest.fixture
def waits(monkeypatch):
    """What was waited for, in order; it is ready afterwards."""
    seen, block = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: seen.append(x) or block(x))
    return seen


def test_a_step_waits_for_the_ninth_last_result(waits):
    sync, mesh = js.local_sgd("replica", sync_every=2), js.make_mesh({"replica": 4})
    step = js.make_train_step(
        lambda p, b: jnp.mean((b @ p) ** 2), optax.sgd(0.1), sync=sync, mesh=mesh
    )
    state, losses = step.init(jnp.ones(3)), []
    waits.clear()
    for n in range(1, MOST + 4):
        state, metrics = step(state, jnp.ones((4, 3)))
        losses.append(metrics["loss"])
        assert len(waits) == max(0, n - MOST)
    assert all(waited is loss for waited, loss in zip(waits, losses[:3], strict=True))


def test_a_loop_whose_every_result_is_donated(mesh_of, waits):
    """Each call takes all that the last one returned, so nothing of it can be kept."""

    def one(x, n):
        return jax.lax.pmean(x, "replica") + jnp.ones_like(x), n + 1

    mesh = mesh_of({"replica": 4})
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    step = js.bounded(jax.jit(mapped, donate_argnums=(0, 1)))
    x, n = js.replicate((np.zeros(3, np.float32), np.int32(0)), mesh=mesh)
    for _ in range(5 * MOST + 1):
        x, n = step(x, n)
    assert [len(waited) for waited in waits] == [2] * 5
    np.testing.assert_array_equal(x, np.full((4, 3), 5 * MOST + 1))
    assert n.tolist() == [5 * MOST + 1] * 4


def test_what_need_not_be_waited_for(waits, monkeypatch):
    """Results that are gone, that are no arrays, or of an accelerator, whose affair that is."""

    def step(x):
        y = slow(x)
        gone = y + 1
        gone.delete()
        return {"gone": gone, "y": y, "loss": 3.0}

    class Device:
        platform = "tpu"

    step, quiet, other = js.bounded(step), js.bounded(lambda: None), js.bounded(slow)
    for _ in range(MOST):
        step(jnp.eye(8))
        quiet()
    assert [len(waited) for waited in waits] == [1]
    monkeypatch.setattr(type(jnp.ones(())), "devices", lambda x: {Device()})
    for _ in range(2 * MOST):
        other(jnp.eye(8))
    assert len(waits) == 1


def test_it_stands_for_its_step_and_may_be_a_method(mesh_of, waits):
    mesh = mesh_of({"replica": 2})

    def per_device(x):
        """Averages."""
        return jax.lax.pmean(x, "replica")

    jitted = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P("replica"), out_specs=P()))
    step, x = js.bounded(jitted), jnp.ones((2, 3))
    assert step.__name__ == jitted.__name__
    assert step.lower(x).as_text() == jitted.lower(x).as_text()
    assert js.comm_report(step, x).count(axis="replica") == 1
    # Inside of a trace it is its step.
    jax.jit(lambda x: [step(x) for _ in range(2 * MOST)]).lower(x)
    assert waits == []

    class Trainer:
        rate = 3.0

        @js.bounded
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            return self.rate * x

    assert Trainer().step(jnp.float32(2.0)) == 6.0
    assert Trainer.step(Trainer(), jnp.float32(2.0)) == 6.0
