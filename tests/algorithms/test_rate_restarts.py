"""Slow momentum where the learning rate falls to a floor and starts again."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js

PEAK, PERIOD, OPTIMUM = 0.1, 8, 1.5


def trajectory(floor, curvature, momentum):
    """300 steps on a quadratic; the slow step comes twice in a period of the rate."""

    def rate(count):
        through = (count % PERIOD) / (PERIOD - 1)
        return PEAK * (1 - through) + PEAK * floor * through

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="slowmo without a `base`")
        tx = js.slowmo("replica", sync_every=4, momentum=momentum, learning_rate=rate)

    def one(w):
        def step(carry, _):
            w, state = carry
            update = -rate(state.count) * curvature * (w - OPTIMUM)
            update, state = tx.update(update, state, w)
            return (w + update, state), w + update

        return jax.lax.scan(step, (w, tx.init(w)), length=300)[1]

    return jax.vmap(one, axis_name="replica")(jnp.zeros((2, 1)))


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_it_converges_for_every_floor(momentum):
    """Without the bound: 2.6e7 and more for a floor of a hundredth, and NaN below that."""
    floors, curvatures = np.meshgrid([1, 0.1, 1e-2, 1e-4, 1e-6, 1e-8, 0], [1.0, 5.0, 9.0])
    run = jax.jit(jax.vmap(lambda f, c: trajectory(f, c, momentum)))
    seen = np.asarray(run(floors.ravel().astype(np.float32), curvatures.ravel()))
    assert np.abs(seen).max() < 2 * OPTIMUM
    np.testing.assert_allclose(seen[:, :, -1], OPTIMUM, atol=0.05)


def test_steps_by_hand():
    """Displacements of 1; rates as they fall, stay, return and grow beyond."""
    rates = [0.1, 0.1, 0.001, 0.001, 0.1, 0.2]
    carried = [0.0, 0.5, 0.005, 0.5, 0.1 / 0.025, 1.0]
    # Made at: 0.1, 0.1, then half of it and half of that; 0.1 again.
    carried[4] = min(0.5 * 0.1 / 0.001, max(0.5, 0.1 / 0.025))
    carried[5] = min(0.5 * 0.2 / 0.1, max(0.5, 0.2 / 0.1))
    tx, velocity = js.slow_momentum(0.5), 0.0
    state = tx.init(jnp.zeros(1))
    for rate, factor in zip(rates, carried, strict=True):
        step, state = tx.update(jnp.ones(1), state, learning_rate=rate)
        velocity = factor * velocity + 1
        np.testing.assert_allclose(-step, velocity, rtol=1e-5)


def paper(rates, momentum, displacements):
    """m <- momentum * m + D / gamma, in float64; what is added to the anchor."""
    m, steps = 0.0, []
    for gamma, d in zip(rates, displacements, strict=True):
        m = momentum * m + d / gamma
        steps.append(-gamma * m)
    return steps


@given(
    rates=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8),
    momentum=st.floats(0, 0.99),
    growing=st.booleans(),
)
def test_rates_that_only_fall_or_only_grow_give_the_formula(rates, momentum, growing):
    ordered = sorted(rates, reverse=not growing)
    displacements = np.random.default_rng(0).normal(size=len(ordered))
    tx = js.slow_momentum(momentum)
    state, found = tx.init(jnp.zeros(())), []
    for rate, d in zip(ordered, displacements, strict=True):
        step, state = tx.update(jnp.float32(d), state, learning_rate=jnp.float32(rate))
        found.append(float(step))
    np.testing.assert_allclose(found, paper(ordered, momentum, displacements), rtol=1e-3, atol=1e-4)


@given(exponents=st.lists(st.floats(-8, 0), min_size=2, max_size=30), momentum=st.floats(0, 0.99))
def test_no_displacement_comes_back_larger_than_the_rate_allows(exponents, momentum):
    """One displacement at the first rate, none later: never above rate now / rate then, or 1."""
    rates = [10**e for e in exponents]
    tx = js.slow_momentum(momentum)
    state = tx.init(jnp.zeros(()))
    for i, rate in enumerate(rates):
        step, state = tx.update(jnp.float32(i == 0), state, learning_rate=rate)
        assert -float(step) <= max(1.0, rate / rates[0]) * (1 + 1e-4)


def test_rates_between_slow_steps_count():
    """The first slow step falls on the floor: what it holds was made at the peak."""
    rates = jnp.asarray([0.1, 0.1, 0.1, 1e-6, 0.1, 0.1, 0.1, 0.1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="slowmo without a `base`")
        tx = js.slowmo("replica", sync_every=4, momentum=0.5, learning_rate=lambda t: rates[t])

    def one(w):
        state = tx.init(w)
        for t in range(8):
            update, state = tx.update(jnp.full_like(w, -1.0 if t < 3 else 0.0), state, w)
            w = w + update
        return w

    moved = jax.vmap(one, axis_name="replica")(jnp.zeros((2, 1)))
    np.testing.assert_allclose(moved, np.full((2, 1), -3 - 3.0), rtol=1e-5)


def test_a_rate_that_misses_zero_by_rounding():
    tx = js.slow_momentum(0.5)
    state = tx.init(jnp.zeros(1))
    for rate in (0.1, -1e-9, 0.1, 0.1):
        step, state = tx.update(jnp.ones(1), state, learning_rate=rate)
    assert np.isfinite(step).all()
    assert abs(float(step[0])) <= 2
