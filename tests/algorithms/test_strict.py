"""Every public transform in a loop of one's own, under jax's debugging settings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support.strict import assert_equal_bits, checks
from support.transforms import TRANSFORMS, stacked

PARAMS = jax.tree.map(np.asarray, stacked())


def run(name):
    tx = TRANSFORMS[name]()

    @jax.jit
    def start(params):
        return jax.vmap(tx.init, axis_name="replica")(params)

    @jax.jit
    def update(params, state):
        def one(params, state):
            steps = jax.tree.map(lambda p: p / 8, params)
            updates, state = tx.update(steps, state, params)
            cast = jax.tree.map(lambda u, p: jnp.asarray(u, p.dtype), updates, params)
            return optax.apply_updates(params, cast), state

        return jax.vmap(one, axis_name="replica")(params, state)

    params = jax.device_put(PARAMS)
    state = start(params)
    for _ in range(4):
        params, state = update(params, state)
    return params, state


@pytest.mark.parametrize("name", [*TRANSFORMS][1::4])
def test_a_loop_is_the_same_under_checks(name):
    expected = run(name)
    with checks():
        assert_equal_bits(run(name), expected)
