"""Row gradients on one replica: coalescing, looking rows up, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


# Few sizes, since each compiles its own operations.
@settings(max_examples=10)
@given(
    rows=st.sampled_from([0, 1, 8]).flatmap(
        lambda size: st.lists(st.integers(-2, 9), min_size=size, max_size=size)
    ),
    capacity=st.sampled_from([None, 3, 12]),
    tail=st.sampled_from([(), (2, 2)]),
)
def test_coalescing_keeps_the_sum(rows, capacity, tail):
    num_rows = 7
    values = np.random.default_rng(len(rows)).normal(size=(len(rows), *tail)).astype("float32")
    gradient = js.RowGradient(jnp.array(rows, jnp.int32), jnp.asarray(values), num_rows)
    whole = dense_of(rows, values, num_rows)
    np.testing.assert_allclose(gradient.to_dense(), whole, atol=1e-6)
    found, distinct, overflow = js.coalesce(gradient, capacity=capacity)
    wanted = sorted({r for r in rows if 0 <= r < num_rows})
    assert distinct == len(wanted)
    size = found.rows.shape[0]
    assert size == (capacity or max(1, min(len(rows), num_rows)))
    assert overflow == max(0, len(wanted) - size)
    assert found.rows.tolist() == (wanted + [num_rows] * size)[:size]
    if overflow:
        assert np.isnan(found.values).all()
    else:
        np.testing.assert_allclose(found.to_dense(), whole, atol=1e-6)
        assert not np.asarray(found.values)[len(wanted) :].any()


def test_half_precision_is_summed_in_float32():
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    gradient = js.RowGradient(jnp.zeros(4096, jnp.int32), ones, 2)
    for dense in (gradient.to_dense(), js.coalesce(gradient).gradient.to_dense()):
        assert dense.dtype == jnp.bfloat16
        assert dense[0, 0] == 4096  # one after the other in bfloat16, 1s stop adding at 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes_are_kept_under_x64(dtype, strict_promotion):
    """Without implicit promotion; float64 with all of its precision."""
    with jax.enable_x64(True):
        values = jnp.array([[0.1], [0.2], [0.3]], dtype)
        gradient = js.RowGradient(jnp.array([1, 3, 1]), values, 4)
        table = jnp.ones((4, 1), dtype)
        loss = lambda p, i: jnp.sum(p["t"][i] ** 2)  # noqa: E731
        looked_up = js.row_value_and_grad(loss, lambda i: {"t": i})({"t": table}, jnp.array([2, 2]))
        tx = js.all_reduce_rows("replica", path="rows")

        def reduced(weight):
            state = tx.init({"t": None})
            alone = tx.update({"t": gradient}, state)[0]["t"]
            return alone, tx.update({"t": gradient}, state, weight=weight)[0]["t"]

        means = jax.vmap(reduced, axis_name="replica")(jnp.array([1, 2, 4], jnp.float32))
        sums = np.array([0, 0.1 + 0.3, 0, 0.2])
        wanted = {
            "to_dense": (gradient.to_dense(), sums),
            "coalesce": (js.coalesce(gradient).gradient.to_dense(), sums),
            "row_gradient": (js.row_gradient(table, capacity=4).gradient.values, np.ones(4)),
            "apply_rows": (js.apply_rows(table, gradient, learning_rate=0.1), 1 - 0.1 * sums),
            "row_value_and_grad": (looked_up[1]["t"].to_dense(), [0, 0, 4, 0]),
            "mean": (means[0][1], sums),
            "weighted mean": (means[1][2], sums),
        }
    for what, (found, expected) in wanted.items():
        assert found.dtype == dtype, what
        found = np.asarray(found).astype(np.float64)
        rtol = 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found[:, 0], expected, rtol=rtol, atol=1e-15, err_msg=what)


def test_rows_of_a_dense_gradient():
    dense = jnp.zeros((6, 2)).at[1, 1].set(-0.5).at[4, 0].set(jnp.nan)
    found, distinct, overflow = js.row_gradient(dense, capacity=3)
    assert (found.rows.tolist(), int(distinct), int(overflow)) == ([1, 4, 6], 2, 0)
    np.testing.assert_array_equal(found.to_dense(), dense)
    short = js.row_gradient(dense, capacity=1)
    assert short.overflow == 1
    assert np.isnan(short.gradient.values).all()


def test_gradients_of_one_table_add_up():
    a = js.RowGradient(jnp.array([1, 3]), jnp.ones((2, 2)), 4)
    b = js.RowGradient(jnp.array([3]), jnp.ones((1, 2)), 4)
    np.testing.assert_array_equal((a + b).to_dense(), a.to_dense() + b.to_dense())
    with pytest.raises(ValueError, match="only gradients of one table"):
        a + js.RowGradient(jnp.array([3]), jnp.ones((1, 2)), 5)


def test_rows_outside_of_the_table_change_no_other():
    rows = jnp.array([-1, 5, 4, -7, 0])
    gradient = js.RowGradient(rows, jnp.ones((5, 2)), 4)
    only_first = np.zeros((4, 2))
    only_first[0] = 1
    np.testing.assert_array_equal(gradient.to_dense(), only_first)
    moved = js.apply_rows(jnp.zeros((4, 2)), gradient, learning_rate=0.5)
    np.testing.assert_array_equal(moved, -0.5 * only_first)


def scaled_loss(params, tokens, scale):
    hidden = params["deep"]["table"][tokens] @ params["w"]
    return jnp.sum(jnp.tanh(hidden) * scale), hidden


@pytest.mark.parametrize("capacity", [None, 9, {"deep/table": 5}])
def test_same_loss_and_gradient_as_with_the_whole_table(capacity):
    rng = np.random.default_rng(0)
    params = {"deep": {"table": rng.normal(size=(11, 3))}, "w": rng.normal(size=(3, 2))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tokens = jnp.array([[3, 10, 3], [-1, 0, 7]])  # -1 is row 10
    tables = lambda tokens, scale: {"deep/table": tokens}  # noqa: E731
    sparse = js.row_value_and_grad(scaled_loss, tables, capacity=capacity, has_aux=True)
    (value, aux), grads = jax.jit(sparse)(params, tokens, 2.0)
    (wanted, wanted_aux), dense = jax.value_and_grad(scaled_loss, has_aux=True)(params, tokens, 2.0)
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
    [([9], [9], None), ([1], [2], None), ([0, 1, 2], [2], 2)],
    ids=["outside of the table", "not named", "beyond the capacity"],
)
def test_rows_that_are_missing_are_nan(tokens, looked_up, capacity):
    sparse = js.row_value_and_grad(
        lambda p, looked_up: jnp.sum(p["t"][looked_up]),
        lambda _: {"t": jnp.array(tokens)},
        capacity=capacity,
    )
    value, grads = sparse({"t": jnp.ones((4, 2))}, jnp.array(looked_up))
    assert np.isnan(value)
    assert np.isfinite(grads["t"].to_dense()).all()


def test_overflow_of_gathered_rows_is_counted():
    found = js.gather_rows(jnp.ones((9, 2)), jnp.array([8, 1, 1, 5]), capacity=2)
    assert found.overflow == 1
    assert found.touched.rows.tolist() == [1, 5]
    assert found.positions.tolist() == [2, 0, 0, 1]
    assert found.touched.shape == (9, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: js.coalesce(g, capacity=0), "`capacity` counts rows and must be an int >= 1"),
        (lambda g: js.row_gradient(jnp.ones((3, 2)), capacity=0), "`capacity` counts rows"),
        (lambda g: js.row_gradient(jnp.ones((3, 2), int), capacity=1), "int32.3, 2."),
        (lambda g: js.gather_rows(jnp.ones((3, 2)), jnp.ones(2)), "must be integers, got float32"),
        (lambda g: js.gather_rows(jnp.ones(()), jnp.ones(2, int)), "`table` needs a shape"),
        (lambda g: js.gather_rows(g.values, g.rows, capacity=True), "`capacity` counts rows"),
        (
            lambda g: js.coalesce(jax.tree.map(lambda x: 0.5 * x, g)),
            "rows of `gradient` must be in",
        ),
        (
            lambda g: jax.tree.map(lambda x: 0.5 * x, g).to_dense(),
            "to_dense: the rows of the gradient must be integers, got float32",
        ),
        (
            lambda g: js.coalesce(js.RowGradient(g.rows[:1], g.values, 4)),
            r"got \(1,\) and \(2, 3\)",
        ),
        (lambda g: js.coalesce(js.RowGradient(g.rows, g.rows, 4)), "values of `gradient` must be"),
        (lambda g: js.coalesce(js.RowGradient(g.rows, g.values, 0)), "`num_rows` of `gradient`"),
        (lambda g: js.apply_rows(jnp.ones((5, 3)), g, learning_rate=1.0), r"`table` has \(5, 3\)"),
        (
            lambda g: js.row_value_and_grad(jnp.sum, lambda x: {"emb": x})({"e": g.values}, g.rows),
            "`tables` names 'emb', but the leaves are 'e'",
        ),
        (
            lambda g: js.row_value_and_grad(jnp.sum, lambda x: {}, capacity={"e": 0}),
            "`capacity` counts rows",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    gradient = js.RowGradient(jnp.array([1, 2]), jnp.ones((2, 3)), 4)
    with pytest.raises(ValueError, match=message):
        call(gradient)


def test_touched_rows_are_no_array():
    touched = js.gather_rows(jnp.ones((4, 2)), jnp.array([1])).touched
    with pytest.raises(TypeError, match="only the rows that a step looks up"):
        jnp.dot(touched, jnp.ones(2))


def test_an_optimizer_does_not_take_rows_for_gradients():
    params = {"t": jnp.ones((4, 2))}
    grads = {"t": js.RowGradient(jnp.array([1]), jnp.ones((1, 2)), 4)}
    updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
    with pytest.raises((ValueError, TypeError)):
        optax.apply_updates(params, updates)
