"""Updates that land: how exactly, per dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import apply_exactly, landing, updates_to, widen_updates

finite32 = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
seeds = st.integers(0, 10_000)


@given(seeds, st.sampled_from([1.0, 1e-3, 1e3]))
def test_float32_lands_within_one_ulp_of_the_larger_operand(seed, scale):
    rng = np.random.default_rng(seed)
    params = rng.normal(size=500).astype(np.float32)
    target = (scale * rng.normal(size=500)).astype(np.float32)
    landed = np.asarray(optax.apply_updates(params, updates_to(params, target)))
    ulp = np.spacing(np.maximum(np.abs(params), np.abs(target)))
    assert np.all(np.abs(landed.astype(np.float64) - target) <= ulp)


@given(finite32)
def test_float32_that_agrees_stays(value):
    params = jnp.float32(value)
    assert optax.apply_updates(params, updates_to(params, params)) == params


# Exponents that the significands of both operands fit into float32 with: 24 bits less their own.
RANGES = {"bfloat16": 16, "float16": 13}


@pytest.mark.parametrize("dtype", RANGES)
@given(seed=seeds)
def test_half_precision_lands_exactly_in_its_range(dtype, seed):
    rng = np.random.default_rng(seed)
    largest = RANGES[dtype] - 2  # room for the significands, which reach up to 2
    small = rng.normal(size=500).astype(jnp.dtype(dtype))
    small = np.where(np.abs(small) < 0.01, jnp.dtype(dtype).type(1), small)
    factor = (2.0 ** rng.integers(0, largest, size=500)) * rng.choice([-1, 1], size=500)
    large = np.clip(small.astype(np.float32) * factor, -6e4, 6e4).astype(jnp.dtype(dtype))
    for params, target in ((small, large), (large, small)):
        updates = updates_to(params, target)
        assert updates.dtype == jnp.float32
        landed = optax.apply_updates(params, updates)
        assert landed.dtype == params.dtype
        assert np.array_equal(landed, target)


@pytest.mark.parametrize("dtype", RANGES)
@given(seed=seeds)
def test_half_precision_lands_exactly_over_the_documented_range(dtype, seed):
    """`updates_to` promises exactness where params is not over 2**12 times the target."""
    rng = np.random.default_rng(seed)
    of = jnp.dtype(dtype)
    target = (1 + rng.random(500)).astype(of)
    params = (target.astype(np.float32) * 2.0**12 * 0.99).astype(of)
    assert np.all(params.astype(np.float64) <= 2.0**12 * target.astype(np.float64))
    assert np.array_equal(optax.apply_updates(params, updates_to(params, target)), target)


@given(seeds)
def test_explicit_promotion_equals_optax(seed):
    rng = np.random.default_rng(seed)
    params = {
        "f": rng.normal(size=20).astype(np.float32),
        "b": rng.normal(size=20).astype(jnp.bfloat16),
        "h": rng.normal(size=()).astype(np.float16),
    }
    updates = widen_updates(
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    )
    ours, theirs = apply_exactly(params, updates), optax.apply_updates(params, updates)
    for key in params:
        assert ours[key].dtype == theirs[key].dtype == params[key].dtype
        assert np.array_equal(ours[key], theirs[key])


def test_nothing_is_narrowed(strict_promotion):
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2, jnp.float64), "b": jnp.ones(2, jnp.bfloat16)}
        updates = {"d": jnp.full(2, 2**-40, jnp.float64), "b": jnp.full(2, 2**-12, jnp.bfloat16)}
        y = landing(params, updates)
        assert (y["d"].dtype, y["b"].dtype) == (jnp.float64, jnp.float32)
        assert np.all(np.asarray(y["d"]) == 1 + 2**-40)
        assert np.all(np.asarray(y["b"]) == 1 + 2**-12)  # not rounded to bfloat16
        assert widen_updates(updates)["d"].dtype == jnp.float64
        assert apply_exactly(params, updates)["d"].dtype == jnp.float64
