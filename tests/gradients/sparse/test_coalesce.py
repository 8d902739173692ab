"""Equal rows become one: sums, capacities, half precision."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js


def dense_of(rows, values, num_rows):
    """The gradient as a table, in NumPy; rows outside of it are left out."""
    out = np.zeros((num_rows, *values.shape[1:]), np.float64)
    for row, value in zip(rows, values, strict=True):
        if 0 <= row < num_rows:
            out[row] += value
    return out


# Few sizes, since each compiles programs of its own.
coalesce = jax.jit(js.sparse.coalesce, static_argnames="capacity")
to_dense = jax.jit(js.sparse.RowGradient.to_dense)


@settings(max_examples=6)
@given(
    rows=st.sampled_from([0, 1, 8]).flatmap(
        lambda size: st.lists(st.integers(-2, 9), min_size=size, max_size=size)
    ),
    capacity=st.sampled_from([None, 3]),
    tail=st.sampled_from([(), (2, 2)]),
)
def test_coalescing_keeps_the_sum(rows, capacity, tail):
    num_rows = 7
    values = np.random.default_rng(len(rows)).normal(size=(len(rows), *tail)).astype("float32")
    gradient = js.sparse.RowGradient(jnp.array(rows, jnp.int32), jnp.asarray(values), num_rows)
    whole = dense_of(rows, values, num_rows)
    np.testing.assert_allclose(to_dense(gradient), whole, atol=1e-6)
    found, distinct, overflow = coalesce(gradient, capacity=capacity)
    wanted = sorted({r for r in rows if 0 <= r < num_rows})
    assert distinct == len(wanted)
    size = found.rows.shape[0]
    assert size == (capacity or max(1, min(len(rows), num_rows)))
    assert overflow == max(0, len(wanted) - size)
    assert found.rows.tolist() == (wanted + [num_rows] * size)[:size]
    if overflow:
        assert np.isnan(found.values).all()
    else:
        np.testing.assert_allclose(to_dense(found), whole, atol=1e-6)
        assert not np.asarray(found.values)[len(wanted) :].any()


def test_half_precision_is_summed_in_float32():
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    gradient = js.sparse.RowGradient(jnp.zeros(4096, jnp.int32), ones, 2)
    for dense in (to_dense(gradient), to_dense(coalesce(gradient).gradient)):
        assert dense.dtype == jnp.bfloat16
        assert dense[0, 0] == 4096  # one after the other in bfloat16, 1s stop adding at 256


def test_rows_of_a_dense_gradient():
    dense = jnp.zeros((6, 2)).at[1, 1].set(-0.5).at[4, 0].set(jnp.nan)
    row_gradient = jax.jit(js.sparse.row_gradient, static_argnames="capacity")
    found, distinct, overflow = row_gradient(dense, capacity=3)
    assert (found.rows.tolist(), int(distinct), int(overflow)) == ([1, 4, 6], 2, 0)
    np.testing.assert_array_equal(found.to_dense(), dense)
    short = row_gradient(dense, capacity=1)
    assert short.overflow == 1
    assert np.isnan(short.gradient.values).all()
