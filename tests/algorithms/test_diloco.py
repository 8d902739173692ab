"""DiLoCo: outer steps worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js


def history_of(tx):
    """Replicas start at 1 and move by 1 and 3 in each of four updates."""

    def one(move):
        w = jnp.ones(1)
        state, seen = tx.init(w), []
        for _ in range(4):
            update, state = tx.update(jnp.full(1, move), state, w)
            w = w + update
            seen.append(w)
        return jnp.concatenate(seen)

    return jax.vmap(one, axis_name="replica")(jnp.asarray([1.0, 3.0]))


@pytest.mark.parametrize("shard_state", [True, False])
def test_two_replicas_take_the_outer_steps_worked_by_hand(shard_state):
    # SGD(0.7, momentum 0.9, nesterov): D = -4, m = -4, anchor = 1 + 0.7 * (4 + 0.9 * 4) = 6.32;
    # D = -4, m = -4 - 0.9 * 4 = -7.6, anchor = 6.32 + 0.7 * (4 + 0.9 * 7.6).
    seen = history_of(js.diloco("replica", sync_every=2, shard_state=shard_state))
    wanted = [[2, 6.32, 7.32, 13.908], [4, 6.32, 9.32, 13.908]]
    np.testing.assert_allclose(seen, wanted, rtol=1e-6)
