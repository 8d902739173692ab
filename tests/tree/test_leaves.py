"""What is finite, and where updates land."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import all_finite, updates_to
from support.promotion import apply_updates


def test_only_numbers_that_may_be_infinite_count_as_not_finite():
    fine = {"f": jnp.ones(2, jnp.bfloat16), "i": jnp.array([2**31 - 1]), "k": jax.random.key(0)}
    assert all_finite(fine)
    assert all_finite({})
    for wrong in (jnp.nan, jnp.inf, -jnp.inf):
        assert not all_finite({**fine, "g": jnp.array([0.0, wrong])})


seeds = st.integers(0, 10_000)


@given(seeds, st.sampled_from([1.0, 1e-3, 1e3]))
def test_float32_lands_within_one_ulp_of_the_larger_operand(seed, scale):
    rng = np.random.default_rng(seed)
    params = rng.normal(size=500).astype(np.float32)
    target = (scale * rng.normal(size=500)).astype(np.float32)
    landed = np.asarray(optax.apply_updates(params, updates_to(params, target)))
    ulp = np.spacing(np.maximum(np.abs(params), np.abs(target)))
    assert np.all(np.abs(landed.astype(np.float64) - target) <= ulp)
    assert np.array_equal(optax.apply_updates(params, updates_to(params, params)), params)


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
        landed = apply_updates(params, updates)
        assert landed.dtype == params.dtype
        assert np.array_equal(landed, target)
