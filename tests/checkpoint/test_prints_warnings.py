"""Fingerprints of arrays on the host wrap around without a warning, and are those of the device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.checkpoint import _arrays
from jaxslowmo.checkpoint._arrays import host_print, prints_of

SHAPES = [(), (1,), (3, 5), (0, 3)]
DTYPES = [
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *("complex64", "bool", "int8", "uint8", "int16", "int32", "uint32", "int4", "uint4"),
]


def drawn(shape, dtype):
    random = np.random.default_rng(0)
    x = random.normal(size=shape)
    if dtype == "complex64":
        return jnp.asarray(x + 1j * random.normal(size=shape), dtype)
    whole = np.abs(7 * x) % 7 if "int" in dtype else x  # within the range of each
    return jnp.asarray(whole, jnp.float32).astype(dtype)


@pytest.mark.parametrize("chunk", [_arrays._CHUNK, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_says_what_the_device_says_and_does_not_warn(dtype, chunk, monkeypatch):
    monkeypatch.setattr(_arrays, "_CHUNK", chunk)
    arrays = [drawn(shape, dtype) for shape in SHAPES]
    expected = prints_of(arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [host_print(np.asarray(x)) for x in arrays] == expected


def test_float64_and_int64(monkeypatch):
    monkeypatch.setattr(_arrays, "_CHUNK", 4)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (np.arange(15.0).reshape(3, 5) / 3, np.arange(-7, 8)):
            assert host_print(x) == prints_of([jnp.asarray(x)])[0]


def test_the_numbers_are_those_that_older_checkpoints_hold():
    x = np.random.default_rng(0).normal(size=3 << 20).astype(np.float32)
    assert host_print(x) == [2149482881, 3123539245]
