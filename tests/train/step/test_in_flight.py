"""Eight steps are unfinished at once on CPU, a step's own or a loop's, and their counters equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

MOST = 8


@pytest.fixture
def waits(monkeypatch):
    """What was waited for, in order; it is ready afterwards."""
    seen, block = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: seen.append(x) or block(x))
    return seen


def test_a_step_waits_so_that_eight_are_unfinished_at_most(waits):
    sync, mesh = js.local_sgd("replica", sync_every=2), js.make_mesh({"replica": 4})
    step = js.make_train_step(
        lambda p, b: jnp.mean((b @ p) ** 2), optax.sgd(0.1), sync=sync, mesh=mesh
    )
    state, losses = step.init(jnp.ones(3)), []
    waits.clear()
    for n in range(1, 2 * MOST + 2):
        state, metrics = step(state, jnp.ones((4, 3)))
        losses.append(metrics["loss"])
        assert len(waits) == max(0, (n - MOST + 3) // 4)
    assert all(waited is loss for waited, loss in zip(waits, losses[3::4][:3], strict=True))


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


def test_inside_of_a_trace_it_is_its_step_and_it_may_be_a_method(waits):
    class Trainer:
        rate = 3.0

        @js.bounded
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            """Scales."""
            return self.rate * x

    trainer = Trainer()
    jax.jit(lambda x: [trainer.step(x) for _ in range(2 * MOST)]).lower(jnp.float32(2))
    assert waits == []
    assert trainer.step(jnp.float32(2.0)) == 6.0
    assert Trainer.step.__doc__ == "Scales."


def test_a_counter_that_falls_behind_is_told_before_an_exchange_waits_for_it():
    """In a loop in which a replica whose batch is not finite keeps its old optimizer state."""
    tx = js.chain(optax.adam(0.1), js.slowmo("replica", base=js.sgp("replica"), sync_every=20))

    def update(params, state, x):
        updates, new = tx.update(x, state, params)
        ok = jnp.isfinite(x).all()
        new = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)
        return optax.apply_updates(params, updates), new

    step = js.bounded(jax.jit(jax.vmap(update, axis_name="replica")))
    params = jnp.ones((4, 3))
    first = jax.vmap(tx.init, axis_name="replica")(params)
    for bad, last in ((None, 3 * MOST + 1), (MOST + 3, 2 * MOST)):
        now, state = params, first
        for t in range(1, last):
            batch = np.ones((4, 3), np.float32)
            if t == bad:
                batch[2] = np.nan
            now, state = step(now, state, batch)
        if bad:
            with pytest.raises(ValueError, match=rf"{last - 1} updates on replica 2 .*{last} on"):
                step(now, state, batch)
