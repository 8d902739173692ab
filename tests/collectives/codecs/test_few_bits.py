"""What each codec makes of a row of numbers, in NumPy; and the bytes that it takes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.few_bits import CODECS, decoded

SIZES = (1, 2, 63, 64, 65, 1000, 4097)


def rows(size: int) -> np.ndarray:
    """Return rows whose magnitude differs between them and along them, with zeros."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=(3, size)) * 10.0 ** rng.uniform(-6, 2, (3, 1))
    x *= 10.0 ** np.sin(np.arange(size) / 50)
    x[:, size // 3 : size // 2] = 0
    return np.float32(x)


@pytest.mark.parametrize("name", CODECS)
def test_against_numpy(name):
    codec = CODECS[name]()
    for size in SIZES:
        x = rows(size)
        sent = jax.jit(codec.encode)(x)
        found = np.asarray(jax.jit(codec.decode, static_argnums=1)(sent, size))
        assert sent.dtype == jnp.uint8
        on_host = codec.decode(np.asarray(sent), size)
        assert isinstance(on_host, np.ndarray)
        for values in (found, on_host):
            np.testing.assert_allclose(values, [decoded(name, row) for row in x], rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", CODECS)
def test_bytes(name):
    """Of a long row, beside 4 of each float32; padding is less than 1 KiB."""
    size, codec = 1_000_000, CODECS[name]()
    share = {
        "bfloat16": 0.5, "float16": 0.5, "int8": 0.2540, "fp8": 0.2540, "e5m2": 0.26,
        "int4": 0.1329, "top_k": 0.02 * 3 / 4 + 0.5 / 4096, "bits2": 0.1 * 2.25 / 4 + 1 / 4096,
    }[name]  # fmt: skip
    assert codec.num_bytes(size) == jax.eval_shape(codec.encode, np.zeros((1, size), "f4")).size
    assert share * 0.99 <= codec.num_bytes(size) / (4 * size) <= share * 1.02 + 1024 / (4 * size)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_does_not_pass_for_a_number(name):
    """It is where it was, or the numbers that share its scale are not finite either.

    Also in large rows, of which a CPU's maximum leaves out NaN.
    """
    codec = CODECS[name]()
    both = jax.jit(lambda x: codec.decode(codec.encode(x), x.shape[1]))
    for size, value in itertools.product((300, 40_000), (np.nan, np.inf, -np.inf)):
        x = rows(size)[:1]
        x[0, 7] = value
        assert not np.isfinite(both(x)[0, 7])
    huge = np.float32([[3e38, -3e38, 1e38]])
    assert np.all(np.isfinite(codec.decode(codec.encode(huge), 3)))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "top_k"])
def test_the_largest_numbers_do_not_become_zeros(name):
    """A compiled division by a scale may be a product with its inverse, which may be 0."""
    codec = CODECS[name]()
    for encode in (codec.encode, jax.jit(codec.encode)):
        for largest in (1e-37, 2.0**119, 2.0**121, 2.0**126, 3e38):
            found = np.max(codec.decode(encode(np.full((1, 2), largest, np.float32)), 2))
            assert abs(found / largest - 1) < 0.01, largest
