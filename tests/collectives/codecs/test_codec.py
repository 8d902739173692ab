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


def numbers(name: str) -> np.ndarray:
    """Of all magnitudes that the format holds, ties and signed zeros among them."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(name)
    least = -24 if name == "float16" else -100
    spread = rng.normal(size=4000) * 2.0 ** rng.uniform(least, np.log2(LIMIT[name]) - 2, 4000)
    grid = np.float32(spread[:500].astype(dtype))
    neighbours = np.float32(np.nextafter(grid.astype(dtype), dtype.type(np.inf)))
    ties = grid.astype(np.float64) / 2 + neighbours.astype(np.float64) / 2
    return np.float32([*spread, *ties, 0.0, -0.0, 1.0, 6e-8, 3e-8, 6.1e-5])


@pytest.mark.parametrize("name", NAMES)
def test_rounds_as_a_cast_does_and_keeps_to_the_bit_what_did_not_travel(name):
    x = numbers(name)
    part, residual = encode(CODECS[name](error_feedback=True), x)
    assert (part.dtype, residual.dtype) == (name, jnp.float32)
    np.testing.assert_array_equal(np.float32(part), np.float32(x.astype(jnp.dtype(name))))
    np.testing.assert_array_equal(residual, x - np.float32(part))
    assert np.any(np.asarray(residual) != 0)
    assert not np.any(encode(CODECS[name](), x)[1])  # without error feedback it is dropped


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


def test_factor_zero_sends_and_keeps_nothing():
    part, residual = encode(
        js.codecs.float16(error_feedback=True), np.float32([np.nan, 2e5, 1.1]), 3, jnp.float32(0)
    )
    assert not np.any(part)
    assert not np.any(residual)
