"""Row gradients on one replica: rows that a step looks up, their sums and their dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@settings(max_examples=8)
@given(
    rows=st.sampled_from([0, 1, 8]).flatmap(
        lambda size: st.lists(st.integers(-2, 9), min_size=size, max_size=size)
    ),
    capacity=st.sampled_from([None, 3]),
    tail=st.sampled_from([(), (2, 2)]),
    kind=st.sampled_from([("int32", 7), ("int8", 128)]),  # a size that the type doesn't hold
)
def test_coalescing_keeps_the_sum(rows, capacity, tail, kind):
    dtype, num_rows = kind
    values = np.random.default_rng(len(rows)).normal(size=(len(rows), *tail)).astype("float32")
    gradient = js.sparse.RowGradient(jnp.array(rows, dtype), jnp.asarray(values), num_rows)
    whole = dense_of(rows, values, num_rows)
    np.testing.assert_allclose(to_dense(gradient), whole, atol=1e-6)
    found, distinct, overflow = coalesce(gradient, capacity=capacity)
    wanted = sorted({r for r in rows if 0 <= r < num_rows})
    assert distinct == len(wanted)
    size = found.rows.shape[0]
    assert size == (capacity or max(1, min(len(rows), num_rows)))
    assert overflow == max(0, len(wanted) - size)
    assert found.rows.dtype == jnp.int32
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


# Looking up


def scaled_loss(params, tokens, scale):
    hidden = params["deep"]["table"][tokens] @ params["w"]
    return jnp.sum(jnp.tanh(hidden) * scale), hidden


@pytest.mark.parametrize(("num_rows", "dtype"), [(11, "int32"), (128, "int8")])
def test_same_loss_and_gradient_as_with_the_whole_table(num_rows, dtype):
    rng = np.random.default_rng(0)
    params = {"deep": {"table": rng.normal(size=(num_rows, 3))}, "w": rng.normal(size=(3, 2))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tokens = jnp.array([[3, 10, 3], [-1, 0, 7]], dtype)  # -1 is the last row
    tables = lambda tokens, scale: {"deep/table": tokens}  # noqa: E731
    capacity = {"deep/table": 5}
    sparse = js.row_value_and_grad(scaled_loss, tables, capacity=capacity, has_aux=True)
    (value, aux), grads = jax.jit(sparse)(params, tokens, 2.0)
    whole = jax.jit(jax.value_and_grad(scaled_loss, has_aux=True))
    (wanted, wanted_aux), dense = whole(params, tokens.astype("int32"), 2.0)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(aux, wanted_aux, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], dense["w"], rtol=1e-5)
    table = grads["deep"]["table"]
    assert table.rows.tolist() == [*sorted({0, 3, 7, 10, num_rows - 1}), 11][:5]
    np.testing.assert_allclose(table.to_dense(), dense["deep"]["table"], rtol=1e-5, atol=1e-6)


def test_the_table_gradient_does_not_exist_in_the_program():
    params = {"table": jax.ShapeDtypeStruct((1000, 8), jnp.float32)}
    tokens = jax.ShapeDtypeStruct((5,), jnp.int32)

    def loss(params, tokens):
        return jnp.sum(params["table"][tokens] ** 2)

    sparse = js.row_value_and_grad(loss, lambda t: {"table": t})
    for grad, made in ((sparse, False), (jax.grad(loss), True)):
        lines = str(jax.make_jaxpr(grad)(params, tokens)).splitlines()
        assert any(":f32[1000,8] =" in line for line in lines) == made


@pytest.mark.parametrize(
    ("tokens", "looked_up", "capacity"),
    [([1], [2], None), ([0, 1, 2], [2], 2)],
    ids=["not named", "beyond the capacity"],
)
def test_rows_that_are_missing_are_nan(tokens, looked_up, capacity):
    sparse = js.row_value_and_grad(
        lambda p, looked_up: jnp.sum(p["t"][looked_up]),
        lambda _: {"t": jnp.array(tokens)},
        capacity=capacity,
    )
    value, grads = jax.jit(sparse)({"t": jnp.ones((4, 2))}, jnp.array(looked_up))
    assert np.isnan(value)
    assert np.isfinite(grads["t"].to_dense()).all()
