"""Row gradients on one replica: their dtypes, sums and use, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep


@pytest.mark.parametrize(
    "dtype", sweep(["bfloat16", "float32", "float64"], lambda dtype: dtype != "float32")
)
def test_dtypes_are_kept_under_x64(dtype, strict_promotion):
    """Without implicit promotion; float64 with all of its precision."""
    loss = lambda p, i: jnp.sum(p["t"][i] ** 2)  # noqa: E731
    tx = js.all_reduce_rows("replica", path="rows")

    def reduced(gradient, weight):
        state = tx.init({"t": None})
        alone = tx.update({"t": gradient}, state)[0]["t"]
        return alone, tx.update({"t": gradient}, state, weight=weight)[0]["t"]

    @jax.jit
    def found_in(table, values, weights):
        gradient = js.RowGradient(jnp.array([1, 3, 1]), values, 4)
        looked_up = js.row_value_and_grad(loss, lambda i: {"t": i})({"t": table}, jnp.array([2, 2]))
        means = jax.vmap(reduced, (None, 0), axis_name="replica")(gradient, weights)
        return {
            "to_dense": gradient.to_dense(),
            "coalesce": js.coalesce(gradient).gradient.to_dense(),
            "row_gradient": js.row_gradient(table, capacity=4).gradient.values,
            "apply_rows": js.apply_rows(table, gradient, learning_rate=0.1),
            "row_value_and_grad": looked_up[1]["t"].to_dense(),
            "mean": means[0][1],
            "weighted mean": means[1][2],
        }

    sums = np.array([0, 0.1 + 0.3, 0, 0.2])
    wanted = {
        "row_gradient": np.ones(4),
        "apply_rows": 1 - 0.1 * sums,
        "row_value_and_grad": [0, 0, 4, 0],
    }
    with jax.enable_x64(True):
        values = jnp.array([[0.1], [0.2], [0.3]], dtype)
        results = found_in(jnp.ones((4, 1), dtype), values, jnp.array([1, 2, 4], jnp.float32))
    for what, found in results.items():
        assert found.dtype == dtype, what
        found = np.asarray(found).astype(np.float64)
        rtol = 4 * float(jnp.finfo(dtype).eps)
        expected = wanted.get(what, sums)
        np.testing.assert_allclose(found[:, 0], expected, rtol=rtol, atol=1e-15, err_msg=what)


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


def test_an_optimizer_does_not_take_rows_for_gradients():
    params = {"t": jnp.ones((4, 2))}
    grads = {"t": js.RowGradient(jnp.array([1]), jnp.ones((1, 2)), 4)}
    updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
    with pytest.raises((ValueError, TypeError)):
        optax.apply_updates(params, updates)
