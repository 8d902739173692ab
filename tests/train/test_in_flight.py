"""The host runs ahead of CPU devices by a bounded number of steps."""

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js
from jaxslowmo.train.step._host import MAX_STEPS, StepsInFlight


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
    assert len(step._in_flight._results) == MAX_STEPS
