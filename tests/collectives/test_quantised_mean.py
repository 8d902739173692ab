"""Means of which 8 bits per element travel."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import E4M3, E5M2, INT8, quantised_mean
from support.executions import EXECUTIONS, lift

FORMATS = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}


def draw(replicas, size, seed=0):
    """Gradients whose magnitude differs between replicas and along the buffer."""
    rng = np.random.default_rng([seed, size])
    x = rng.normal(size=(replicas, size)) * np.exp(rng.normal(size=(replicas, 1)))
    return (x * 10.0 ** np.sin(np.arange(size) / 50)).astype(np.float32)


def mean_of(how, axis_name="replica", **options):
    return functools.partial(
        quantised_mean, axis_name=axis_name, how=how, dtype=jnp.dtype("float32"), **options
    )


def through_int8(x, block):
    """A row rounded block by block, in the order of operations of the definition."""
    out = np.empty_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        top = np.abs(part).max()
        codes = np.round(part / top * np.float32(127)) if top > 0 else 0 * part
        out[start : start + block] = codes * np.float32(1 / 127) * top
    return out


def oracle(x, block, per):
    """`quantised_mean` in int8, in NumPy: (mean, lost)."""
    replicas, size = x.shape
    padded = np.pad(x, ((0, 0), (0, replicas * per - size))).reshape(replicas, replicas, per)
    mean, lost = np.empty((replicas, per), np.float32), np.empty_like(padded)
    for chunk in range(replicas):
        total = np.zeros(per, np.float32)
        for r in range(replicas):
            sent = padded[r, chunk] if r == chunk else through_int8(padded[r, chunk], block)
            total = total + sent
            lost[r, chunk] = padded[r, chunk] - sent
        exact = total / np.float32(replicas)
        mean[chunk] = through_int8(exact, block)
        lost[chunk, chunk] = replicas * (exact - mean[chunk])
    return mean.reshape(-1)[:size], lost.reshape(replicas, -1)[:, :size]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_against_numpy(execution):
    """Chunks of a few elements, and of whole blocks with the last chunk short; to the bit."""
    how = replace(INT8, block_size=32)
    small, large = draw(4, 150), draw(4, 5003)
    program = lift(
        lambda *xs: [mean_of(how)(x) for x in xs], {"replica": 4}, execution, (False,) * 2
    )
    for x, per, (mean, lost) in zip((small, large), (38, 1280), program(small, large), strict=True):
        assert how.chunk_size(x.shape[1], 4) == per
        wanted_mean, wanted_lost = oracle(x, 32, per)
        for found in np.asarray(mean):
            np.testing.assert_array_equal(found, wanted_mean)
        np.testing.assert_array_equal(lost, wanted_lost)


@settings(max_examples=8)
@given(
    st.integers(2, 8),
    st.integers(1, 5000) | st.integers(1, 40),
    st.sampled_from([1, 7, 64, 256]),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
def test_errors_are_bounded_and_accounted_for(replicas, size, block, name, stochastic):
    how = replace(FORMATS[name], block_size=block)
    x = draw(replicas, size)
    key = jax.random.key(1) if stochastic else None
    mean, lost = jax.jit(jax.vmap(mean_of(how, key=key), axis_name="replica"))(x)
    mean, lost = np.asarray(mean), np.asarray(lost)
    assert all(np.array_equal(row.view(np.int32), mean[0].view(np.int32)) for row in mean)

    exact = x.astype(np.float64).mean(axis=0)
    top = block_tops(np.abs(x).max(axis=0), how.chunk_size(size, replicas), block)
    np.testing.assert_allclose((x - lost).mean(axis=0), mean[0], atol=1e-5 * top.max(), rtol=0)
    # Half the distance of codes each way, or all of it at random.
    share = 1 if stochastic else 0.5
    relative = 0 if how.mantissa is None else share * 2.0**-how.mantissa
    spacing = share * 2.0 ** (how.least_exponent - (how.mantissa or 0)) / how.largest
    magnitude = np.abs(x).mean(axis=0)
    bound = relative * (2 + relative) * magnitude + spacing * (2 + spacing) * top
    assert np.all(np.abs(mean[0] - exact) <= bound + 1e-6 * top)


def block_tops(largest, per, block):
    """For each element the largest value in its block."""
    tops = np.empty_like(largest)
    for chunk in range(0, len(largest), per):
        end = min(chunk + per, len(largest))
        for start in range(chunk, end, block):
            part = slice(start, min(start + block, end))
            tops[part] = largest[part].max()
    return tops


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_several_axes_are_as_one(names):
    """In the order in which they are named; on devices in one all-to-all."""
    sizes = {"a": 2, "b": 4}
    x = draw(8, 301)
    grid = x.reshape([sizes[n] for n in names] + [301])
    if names == ("b", "a"):
        grid = grid.swapaxes(0, 1)
    fn = mean_of(replace(E4M3, block_size=16), names, key=jax.random.key(0))
    one = mean_of(replace(E4M3, block_size=16), key=jax.random.key(0))
    wanted = jax.jit(jax.vmap(one, axis_name="replica"))(x)
    nested = jax.jit(jax.vmap(jax.vmap(fn, axis_name="b"), axis_name="a"))
    per_device = lambda v: [y[None, None] for y in fn(v[0, 0])]  # noqa: E731
    spec = P("a", "b")
    mapped = jax.jit(
        jax.shard_map(per_device, mesh=js.make_mesh(sizes), in_specs=spec, out_specs=spec)
    )
    for program in (nested, mapped):
        for found, value in zip(program(grid), wanted, strict=True):
            found = np.asarray(found)
            if names == ("b", "a"):
                found = found.swapaxes(0, 1)
            np.testing.assert_array_equal(found.reshape(8, 301), value)
    report = js.comm_report_of(mapped.lower(grid), compile=False)
    assert report.count(collective="all-to-all") == 1
    assert report.count(collective="all-gather") == len(sizes)
    sent = 38 + 3 * 4  # elements and scales for each replica
    assert report.bytes(collective="all-to-all") == 8 * sent
    assert report.wire_bytes(collective="all-gather") == 7 * sent


def test_the_mean_is_typed_as_equal_on_all_replicas():
    fn = mean_of(replace(INT8, block_size=8))
    program = jax.shard_map(
        lambda v: fn(v[0])[0],
        mesh=js.make_mesh({"replica": 4}),
        in_specs=P("replica"),
        out_specs=P(),
    )
    assert jax.eval_shape(program, jnp.ones((4, 9))).shape == (9,)
