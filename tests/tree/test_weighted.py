"""Weighted sums and their means are those of NumPy in float64, whatever an idle term holds."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import WeightedSum

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"]
CASES = st.fixed_dictionaries(
    {
        "dtypes": st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
        "shape": st.lists(st.integers(0, 3), max_size=2),
        "weights": st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 257.0]), min_size=1, max_size=4),
        "counts": st.booleans(),  # without weights
        "seed": st.integers(0, 2**16),
    }
)


def draw(source, shape, dtype):
    """Values of the dtype as NumPy draws them, and in NumPy's widest dtype of the kind."""
    values = source.integers(0, 100, shape)
    if dtype in ("float32", "bfloat16", "float16"):
        values = source.normal(size=shape)
    if dtype == "complex64":
        values = source.normal(size=shape) + 1j * source.normal(size=shape)
    if dtype == "bool":
        values = values > 50
    array = jnp.asarray(values, dtype)
    wide = np.complex128 if dtype == "complex64" else np.float64
    return array, np.asarray(array).astype(wide)


@given(CASES)
def test_as_numpy(case):
    source = np.random.default_rng(case["seed"])
    weights = [1.0] * len(case["weights"]) if case["counts"] else case["weights"]
    terms, totals = [], [0.0] * len(case["dtypes"])
    for weight in weights:
        drawn = [draw(source, tuple(case["shape"]), dtype) for dtype in case["dtypes"]]
        arrays = [array for array, _ in drawn]
        if weight == 0:
            arrays = [x * jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays]
        else:
            values = [wide for _, wide in drawn]
            totals = [total + weight * x for total, x in zip(totals, values, strict=True)]
        terms.append(
            WeightedSum.from_value(arrays, None if case["counts"] else jnp.float32(weight))
        )
    found, whole = functools.reduce(operator.add, terms), sum(weights)
    np.testing.assert_array_equal(found.weight, whole)
    for dtype, total, mean, wanted in zip(
        case["dtypes"], found.sum, found.mean, totals, strict=True
    ):
        assert total.dtype == mean.dtype == ("complex64" if dtype == "complex64" else "float32")
        scale = 300.0 * max(1.0, whole)  # of what is added up
        np.testing.assert_allclose(total, np.full(total.shape, wanted), atol=1e-6 * scale)
        expected = wanted / whole if whole else 0.0
        np.testing.assert_allclose(mean, np.full(mean.shape, expected), rtol=1e-6, atol=3e-5)
        if not whole:
            assert not np.any(mean)
