"""Means of which codes of 8 bits travel: their errors, and several axes."""

import functools
from dataclasses import replace

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import mean_in_codec

INT8, E4M3, E5M2 = js.codecs.int8(), js.codecs.fp8(), js.codecs.fp8("e5m2")
FORMATS = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}


def draw(replicas, size, seed=0):
    """Return gradients whose magnitude differs between replicas and along the buffer."""
    rng = np.random.default_rng([seed, size])
    x = rng.normal(size=(replicas, size)) * np.exp(rng.normal(size=(replicas, 1)))
    return (x * 10.0 ** np.sin(np.arange(size) / 50)).astype(np.float32)


def mean_of(how, axis_name="replica", **options):
    return functools.partial(mean_in_codec, axis_name=axis_name, codec=how, **options)


@settings(max_examples=4)
@given(
    st.integers(2, 8),
    st.integers(1, 5000) | st.integers(1, 40),
    st.sampled_from([1, 7, 64, 256]),
    st.sampled_from([*FORMATS.values()]),
    st.booleans(),
)
def test_errors_are_bounded_and_accounted_for(replicas, size, block, how, stochastic):
    how = replace(how, block=block)
    x = draw(replicas, size)
    key = jax.random.key(1) if stochastic else None
    found = jax.jit(jax.vmap(mean_of(how, key=key), axis_name="replica"))(x)
    mean, lost = map(np.asarray, found)
    assert all(np.array_equal(row.view(np.int32), mean[0].view(np.int32)) for row in mean)
    largest = np.abs(x).max()
    np.testing.assert_allclose((x - lost).mean(axis=0), mean[0], atol=1e-5 * largest, rtol=0)
    # Twice the distance of codes next to the largest one, halved where codes are the nearest.
    spacing = 1 / how.largest if how.mantissa is None else 2.0**-how.mantissa
    bound = spacing * (2 + spacing) * largest * (1 if stochastic else 0.5)
    assert np.all(np.abs(mean[0] - x.astype(np.float64).mean(axis=0)) <= bound)


def test_several_axes_are_as_one():
    """The axes are taken in the order in which they are named, in one all-to-all."""
    sizes, names = {"a": 2, "b": 4}, ("b", "a")
    x, how, key = draw(8, 301), replace(E4M3, block=16), jax.random.key(0)
    wanted, _ = jax.jit(jax.vmap(mean_of(how, key=key), axis_name="replica"))(x)
    mapped = jax.jit(
        jax.shard_map(
            lambda v: mean_of(how, names, key=key)(v[0, 0])[0],
            mesh=js.make_mesh(sizes),
            in_specs=P("a", "b"),
            out_specs=P(),  # the mean is typed as equal on all replicas
        )
    )
    grid = x.reshape(4, 2, 301).swapaxes(0, 1)
    np.testing.assert_array_equal(mapped(grid), wanted[0])
    report = js.comm_report_of(mapped.lower(grid), compile=False)
    sent = 38 + 3 * 4  # elements and scales for each replica
    assert report.count(collective="all-to-all") == 1
    assert report.bytes(collective="all-to-all") == 8 * sent
    assert report.wire_bytes(collective="all-gather") == 7 * sent
