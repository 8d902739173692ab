"""Codes of 8 bits: the nearest, or one of the two neighbours with the right mean."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.collectives import E4M3, E5M2, INT8, pack, unpack

FLOATING = {"e4m3": E4M3, "e5m2": E5M2}
FORMATS = {"int8": INT8, **FLOATING}
KINDS = ("float32", "bfloat16", "int32", "int8", "float8_e5m2")


def all_codes(kind):
    """Every finite value of a format, in order."""
    if kind is INT8:
        return np.arange(-127, 128).astype(np.float32)
    values = np.arange(256, dtype=np.uint8).view(kind.dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def between(kind):
    """Values between codes, in the middle (ties), and far below the least one."""
    codes = all_codes(kind)
    rng = np.random.default_rng(0)
    shares = np.concatenate([[0, 0.5, 0.25, 2**-12], rng.uniform(size=8)]).astype(np.float32)
    spread = codes[:-1, None] + shares * (codes[1:] - codes[:-1])[:, None]
    tiny = np.float32([1e-30, -1e-20, 2**-40, 0.0, -0.0])
    return np.concatenate([spread.ravel(), codes, tiny]).astype(np.float32)


@pytest.mark.parametrize("name", FLOATING)
def test_nearest_codes_are_those_of_a_correct_cast(name):
    kind = FLOATING[name]
    x = between(kind)
    assert x.max() == kind.largest
    found = np.asarray(jax.jit(lambda v: kind.codes(v, None))(x))
    assert np.array_equal(found.astype(np.float32), x.astype(kind.dtype).astype(np.float32))


def test_nearest_integers_of_two_take_the_even_one():
    x = between(INT8)
    assert np.array_equal(np.asarray(INT8.codes(jnp.asarray(x), None)), np.round(x))


@pytest.mark.parametrize("name", FORMATS)
def test_random_codes_are_neighbours_with_the_right_mean(name):
    """Over evenly spaced noise the mean is off by at most one part of the noise."""
    kind, parts = FORMATS[name], 1024
    x = between(kind)
    noise = (np.arange(parts, dtype=np.float32) + 0.5) / parts
    draw = jax.jit(jax.vmap(lambda u: kind.codes(x, jnp.full(x.shape, u)).astype(jnp.float32)))
    drawn = np.asarray(draw(noise)).astype(np.float64)
    codes = all_codes(kind).astype(np.float64)
    above = codes[np.searchsorted(codes, x, side="left").clip(0, len(codes) - 1)]
    below = codes[np.searchsorted(codes, x, side="right").clip(1) - 1]
    assert np.all((drawn == below) | (drawn == above))
    assert np.all(np.abs(drawn.mean(axis=0) - x) <= (above - below) / parts)


@pytest.mark.parametrize("name", FORMATS)
def test_extremes(name):
    """By block of 4: zeros, the largest float, the least one, NaN, inf, and one of 3."""
    kind = FORMATS[name]
    big, least = np.finfo(np.float32).max, np.float32(2.0**-126)
    blocks = np.float32(
        [
            *([0, 0, -0.0, 0], [big, -big, big / 2, 0], [least, 0, -least, 0]),
            *([1, np.nan, 0, 2], [np.inf, 1, 2, -np.inf]),
        ]
    )
    x = np.append(blocks.ravel(), np.float32([-2, 1, 0.5]))[None]
    blocks_of_4 = replace(kind, block_size=4)
    through = jax.jit(lambda v: blocks_of_4.decode(blocks_of_4.encode(v, None), v.shape[1]))
    found = np.asarray(through(x))[0]
    assert not found[:4].any()
    np.testing.assert_allclose(found[4:12], x[0, 4:12], rtol=0.01)
    assert np.isnan(found[12:20]).all()
    np.testing.assert_allclose(found[20:], x[0, 20:], rtol=0.01)


def test_packing_is_undone():
    rng = np.random.default_rng(0)
    for rows, sizes in ((1, (3, 0, 5, 1, 2)), (2, (300, 7, 260, 600, 0)), (2, (0,) * 5)):
        parts = []
        for size, name in zip(sizes, KINDS, strict=True):
            dtype = np.dtype(getattr(jnp, name))
            raw = rng.integers(0, 256, (rows, size * dtype.itemsize), dtype=np.uint8)
            parts.append(np.frombuffer(raw.tobytes(), dtype).reshape(rows, size))
        kinds = [(part.shape[1], part.dtype) for part in parts]
        there_and_back = jax.jit(lambda *xs, kinds=kinds: (y := pack(*xs), unpack(y, *kinds)))
        packed, found = there_and_back(*parts)
        num_bytes = sum(part.nbytes for part in parts) // rows
        assert packed.shape == ((rows, 1, num_bytes) if num_bytes < 1024 else (rows, 23, 128))
        for part, same in zip(parts, found, strict=True):
            assert same.dtype == part.dtype
            assert np.asarray(same).tobytes() == part.tobytes()
