"""Tests of DiLoCo: an outer optimizer worked by hand, and which outer optimizers are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js


@pytest.mark.parametrize("shard_state", [True, False])
def test_two_replicas_take_the_outer_steps_worked_by_hand(shard_state):
    """Replicas start at 1 and move by 1 and 3 in each of four updates, two per outer step."""
    tx = js.diloco("replica", sync_every=2, shard_state=shard_state)

    def one(move):
        w = jnp.ones(1)
        state, seen = tx.init(w), []
        for _ in range(4):
            update, state = tx.update(jnp.full(1, move), state, w)
            w = w + update
            seen.append(w)
        return jnp.concatenate(seen)

    seen = jax.vmap(one, axis_name="replica")(jnp.asarray([1.0, 3.0]))
    # SGD(0.7, momentum 0.9, nesterov): D = -4, m = -4, anchor = 1 + 0.7 * (4 + 0.9 * 4) = 6.32;
    # D = -4, m = -4 - 0.9 * 4 = -7.6, anchor = 6.32 + 0.7 * (4 + 0.9 * 7.6).
    wanted = [[2, 6.32, 7.32, 13.908], [4, 6.32, 9.32, 13.908]]
    np.testing.assert_allclose(seen, wanted, rtol=1e-6)


@pytest.mark.parametrize("outer", [0.7, js.local_sgd("replica")])
def test_an_outer_optimizer_that_is_no_gradient_transform_is_refused(outer):
    message = rf"`outer_optimizer` must be an optax gradient transform.*{type(outer).__name__}"
    with pytest.raises(ValueError, match=message):
        js.diloco("replica", outer_optimizer=outer)


def test_the_outer_optimizer_keeps_its_own_learning_rate():
    """`slow_momentum` and injected rates take `learning_rate`; diloco passes none."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return jax.tree.map(lambda u: -0.25 * u, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = js.diloco("replica", sync_every=1, outer_optimizer=optimizer)
    params, updates = np.full((4, 1), 4, np.float32), -np.arange(4, dtype=np.float32)[:, None]
    step = lambda p, u: tx.update(u, tx.init(p), p)[0]  # noqa: E731
    params_after = params + jax.vmap(step, axis_name="replica")(params, updates)
    assert seen
    assert not any("learning_rate" in extra for extra in seen)
    np.testing.assert_allclose(params_after, np.full((4, 1), 4 - 0.25 * 1.5))
