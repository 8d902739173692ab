"""What a codec rounds, what it leaves behind, and what it never makes infinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

CODECS = {"bfloat16": js.codecs.bfloat16, "float16": js.codecs.float16}
NAMES = list(CODECS)
LIMIT = {"bfloat16": 2.0**127, "float16": 2.0**15}
encode = jax.jit(
    lambda codec, x, divisor=1, factor=None: codec.part(x, divisor=divisor, factor=factor),
    static_argnums=(0, 2),
)


@pytest.mark.parametrize(("name", "error_feedback"), [("bfloat16", False), ("float16", True)])
def test_the_excess_of_large_numbers_stays_and_what_is_not_finite_travels(name, error_feedback):
    limit = LIMIT[name]
    x = np.float32([1.5 * limit, -1.9 * limit, limit, 3.0, np.inf, -np.inf, np.nan])
    part, residual = encode(CODECS[name](error_feedback=error_feedback), x)
    wanted = np.float32([limit, -limit, limit, 3, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(np.float32(part), wanted)
    np.testing.assert_array_equal(residual[:4], np.float32([0.5 * limit, -0.9 * limit, 0, 0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("divisor", "factor"), [(300, None), (5, 7.1)])
def test_parts_and_residual_make_the_number(name, divisor, factor):
    x = np.random.default_rng(1).normal(size=3000).astype(np.float32) * 100
    codec = CODECS[name](error_feedback=True)
    part, residual = encode(codec, x, divisor, None if factor is None else jnp.float32(factor))
    share = (1.0 if factor is None else factor) / divisor
    np.testing.assert_allclose(np.float64(part) / share + np.float64(residual), x, rtol=1e-6)
    info = jnp.finfo(name)
    # Half a unit of the format, in what was divided.
    bound = float(info.eps) / 2 * np.abs(x) + float(info.smallest_subnormal) / share
    assert np.all(np.abs(residual) <= 1.001 * bound)
    assert np.max(np.abs(residual) / bound) > 0.9
