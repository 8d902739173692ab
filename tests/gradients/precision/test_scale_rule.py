"""The scale against a scaler in plain Python, over any pattern of overflows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.gradients.precision import ScaleRule


def expected(options, pattern):
    """(scale, growth count, hysteresis left) after each update, as ColossalAI's scaler has them."""
    scale, count, left = np.float32(options["initial"]), 0, options["hysteresis"]
    found = []
    for overflow in pattern:
        if overflow:
            count, left = 0, left - 1
            if left <= 0:
                scale = max(
                    scale * np.float32(options["backoff"]), np.float32(options["min_scale"])
                )
        else:
            count += 1
            if count == options["growth_interval"]:
                count, left = 0, options["hysteresis"]
                if scale < options["max_scale"]:
                    scale = scale * np.float32(options["growth"])
        found.append((scale, count, max(left, 0)))
    return found


@functools.cache
def compiled(**options):
    rule = ScaleRule(**options)

    def step(state, overflow):
        state = rule.next_state(state, overflow)
        return state, state

    return jax.jit(lambda pattern: jax.lax.scan(step, rule.init_state(()), pattern)[1])


# Interval, hysteresis, growth, backoff, least and largest scale.
RULES = [
    (2, 1, 3.0, 0.3, 8.0, 24.0),
    (3, 1, 1.5, 0.9, 1e-30, 1e30),
    (1, 2, 3.0, 0.3, 1.0, 64.0),
    (2, 3, 1.5, 0.9, 16.0, 16.0),
]


@given(st.lists(st.booleans(), min_size=24, max_size=24), st.sampled_from(RULES))
def test_any_pattern(pattern, rule):
    names = ("growth_interval", "hysteresis", "growth", "backoff", "min_scale", "max_scale")
    options = {"initial": 16.0, **dict(zip(names, rule, strict=True))}
    found = compiled(**options)(np.asarray(pattern, bool))
    scale, count, left = map(np.asarray, zip(*expected(options, pattern), strict=True))
    np.testing.assert_allclose(found.loss_scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(found.growth_count, count)
    np.testing.assert_array_equal(found.hysteresis_left, left)
    np.testing.assert_array_equal(found.skipped, np.cumsum(pattern))
    np.testing.assert_array_equal(found.skipped_last, pattern)
    assert found.loss_scale.dtype == np.float32
    assert np.isfinite(found.loss_scale).all()
    assert (found.loss_scale > 0).all()


def test_by_default_it_is_the_scaler_of_torch():
    """65536, halved by an overflow and doubled after 2000 updates without; to 2**24 and 1."""
    tx = js.dynamic_loss_scale(optax.identity())

    def scales(state, overflows):
        def step(state, overflow):
            grad = jnp.where(overflow, jnp.inf, 1.0)
            return (state := tx.update(grad, state)[1]), state.loss_scale

        return jax.lax.scan(step, state, overflows)[1]

    run, start = jax.jit(scales), tx.init(jnp.float32(0))
    assert start.loss_scale == 2**16
    overflows = np.zeros(4200, bool)
    overflows[100] = True
    found = np.asarray(run(start, overflows))
    assert np.flatnonzero(np.diff(found)).tolist() == [99, 2099, 4099]
    assert np.log2(found[[0, 100, 2100, 4100]]).tolist() == [16, 15, 16, 17]
    for last, overflows in ((24, np.zeros(20000, bool)), (0, np.ones(20, bool))):
        assert np.log2(run(start, overflows)[-1]) == last
