"""How many steps are unfinished at once on CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.train.step import _step_programs
from jaxslowmo.train.step._step_programs import MAX_STEPS, StepsInFlight

# Of the training step


def test_the_oldest_steps_are_waited_for():
    slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 200).sum())
    given = [slow(jnp.eye(64) * i) for i in range(3 * MAX_STEPS)]
    steps = StepsInFlight()
    for n, result in enumerate(given, start=1):
        steps.admit({"loss": result})
        assert all(x.is_ready() for x in given[: max(0, n - MAX_STEPS)])
    assert len(steps._results) == MAX_STEPS


def test_a_step_admits_its_own_results():
    mesh = js.make_mesh({"replica": 4})
    step = js.make_train_step(
        lambda p, b: jnp.mean((b @ p) ** 2),
        optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=mesh,
    )
    state = step.init(jnp.ones(3))
    for _ in range(MAX_STEPS + 3):
        state, _ = step(state, jnp.ones((4, 3)))
    assert len(step._runner.in_flight._results) == MAX_STEPS


# In loops of one's own


@jax.jit
def slow(x):
    return jnp.linalg.matrix_power(x, 200)


@pytest.fixture
def waits(monkeypatch):
    """How often results were waited for; they are ready afterwards."""
    seen = []
    block = jax.block_until_ready

    def counting(arrays):
        seen.append(len(arrays))
        return block(arrays)

    monkeypatch.setattr(_step_programs.jax, "block_until_ready", counting)
    return seen


def test_at_most_eight_of_my_own_are_unfinished(waits):
    step = js.bounded(slow)
    results = []
    for n in range(1, 3 * MAX_STEPS + 1):
        results.append(step(jnp.eye(64) * n))
        finished = n - n % MAX_STEPS
        assert all(x.is_ready() for x in results[:finished])
        assert len(waits) == finished // MAX_STEPS


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_a_loop_whose_every_result_is_donated(mesh_of, waits, donate):
    """Each call takes all that the last one returned, so nothing of it can be kept."""

    def one(x, n):
        return jax.lax.pmean(x, "replica") + jnp.ones_like(x), n + 1

    mesh = mesh_of({"replica": 4})
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    step = js.bounded(jax.jit(mapped, donate_argnums=donate))
    x, n = js.replicate((np.zeros(3, np.float32), np.int32(0)), mesh=mesh)
    for _ in range(5 * MAX_STEPS + 1):
        x, n = step(x, n)
    assert waits == [2] * 5
    np.testing.assert_array_equal(x, np.full((4, 3), 5 * MAX_STEPS + 1))
    assert n.tolist() == [5 * MAX_STEPS + 1] * 4


def test_results_that_are_gone_or_no_arrays_do_not_matter(waits):
    def step(x):
        y = slow(x)
        gone = y + 1
        gone.delete()
        return {"gone": gone, "y": y, "loss": 3.0}

    step = js.bounded(step)
    for _ in range(MAX_STEPS):
        step(jnp.eye(8))
    assert waits == [1]
    quiet = js.bounded(lambda: None)
    for _ in range(MAX_STEPS):
        quiet()
    assert waits == [1]


def test_other_devices_are_not_waited_for(waits, monkeypatch):
    """What an accelerator does with many steps is its own affair."""

    class Device:
        platform = "tpu"

    monkeypatch.setattr(type(jnp.ones(())), "devices", lambda x: {Device()})
    step = js.bounded(slow)
    for _ in range(2 * MAX_STEPS):
        step(jnp.eye(8))
    assert waits == []


def test_it_stands_for_its_step(mesh_of, waits):
    mesh = mesh_of({"replica": 2})

    def per_device(x):
        """Averages."""
        return jax.lax.pmean(x, "replica")

    jitted = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P("replica"), out_specs=P()))
    step = js.bounded(jitted)
    x = jnp.ones((2, 3))
    assert step.__name__ == jitted.__name__
    assert step.lower(x).as_text() == jitted.lower(x).as_text()
    assert js.comm_report(step, x).count(axis="replica") == 1
    # Inside of a trace it is its step.
    jax.jit(lambda x: [step(x) for _ in range(2 * MAX_STEPS)]).lower(x)
    assert waits == []
    np.testing.assert_array_equal(js.measured(step)(x), np.ones((1, 3)))


def test_a_method():
    class Trainer:
        rate = 3.0

        @js.bounded
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            return self.rate * x

    assert Trainer().step(jnp.float32(2.0)) == 6.0
    assert Trainer.step(Trainer(), jnp.float32(2.0)) == 6.0


def test_something_that_cannot_be_called():
    with pytest.raises(ValueError, match="bounded: `step` must be a function, got int"):
        js.bounded(3)
