"""Rows that a step looks up, in place of the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js


def scaled_loss(params, tokens, scale):
    hidden = params["deep"]["table"][tokens] @ params["w"]
    return jnp.sum(jnp.tanh(hidden) * scale), hidden


def test_same_loss_and_gradient_as_with_the_whole_table():
    rng = np.random.default_rng(0)
    params = {"deep": {"table": rng.normal(size=(11, 3))}, "w": rng.normal(size=(3, 2))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tokens = jnp.array([[3, 10, 3], [-1, 0, 7]])  # -1 is row 10
    tables = lambda tokens, scale: {"deep/table": tokens}  # noqa: E731
    sparse = js.row_value_and_grad(scaled_loss, tables, capacity={"deep/table": 4}, has_aux=True)
    (value, aux), grads = jax.jit(sparse)(params, tokens, 2.0)
    whole = jax.jit(jax.value_and_grad(scaled_loss, has_aux=True))
    (wanted, wanted_aux), dense = whole(params, tokens, 2.0)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(aux, wanted_aux, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], dense["w"], rtol=1e-5)
    table = grads["deep"]["table"]
    assert table.rows.tolist()[:4] == [0, 3, 7, 10]
    np.testing.assert_allclose(table.to_dense(), dense["deep"]["table"], rtol=1e-5, atol=1e-6)


def test_the_table_gradient_does_not_exist_in_the_program():
    """One array of the table's size: the argument."""
    params = {"table": jax.ShapeDtypeStruct((1000, 8), jnp.float32)}
    tokens = jax.ShapeDtypeStruct((5,), jnp.int32)
    sparse = js.row_value_and_grad(lambda p, t: jnp.sum(p["table"][t] ** 2), lambda t: {"table": t})
    # As a result or between: `1000,8` occurs in the types of the argument only.
    inner = str(jax.make_jaxpr(sparse)(params, tokens))
    made = [line for line in inner.splitlines() if ":f32[1000,8] = " in line.replace(" =", " =")]
    assert made == []
    whole = str(jax.make_jaxpr(jax.grad(lambda p, t: jnp.sum(p["table"][t] ** 2)))(params, tokens))
    assert [line for line in whole.splitlines() if ":f32[1000,8] = " in line] != []


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


def test_overflow_of_gathered_rows_is_counted():
    found = js.sparse.gather_rows(jnp.ones((9, 2)), jnp.array([8, 1, 1, 5]), capacity=2)
    assert found.overflow == 1
    assert found.touched.rows.tolist() == [1, 5]
    assert found.positions.tolist() == [2, 0, 0, 1]
    assert found.touched.shape == (9, 2)
