"""Row gradients on one replica: their sums and dtypes, and that no optimizer takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_are_kept_under_x64(dtype):
    """Without implicit promotion; float64 with all of its precision."""

    @jax.jit
    def found_in(table, values):
        loss = lambda p, i: jnp.sum(p["t"][i] ** 2)  # noqa: E731
        gradient = js.sparse.RowGradient(jnp.array([1, 3, 1]), values, 4)
        looked_up = js.row_value_and_grad(loss, lambda i: {"t": i})({"t": table}, jnp.array([2, 2]))
        return {
            "to_dense": gradient.to_dense(),
            "coalesce": js.sparse.coalesce(gradient).gradient.to_dense(),
            "row_gradient": js.sparse.row_gradient(table, capacity=4).gradient.values,
            "apply_rows": js.sparse.apply_rows(table, gradient, learning_rate=0.1),
            "row_value_and_grad": looked_up[1]["t"].to_dense(),
        }

    sums = np.array([0, 0.1 + 0.3, 0, 0.2])
    wanted = {"to_dense": sums, "coalesce": sums, "row_gradient": np.ones(4)}
    wanted |= {"apply_rows": 1 - 0.1 * sums, "row_value_and_grad": np.array([0, 0, 4, 0])}
    with jax.enable_x64(True):
        found = found_in(jnp.ones((4, 1), dtype), jnp.array([[0.1], [0.2], [0.3]], dtype))
    for what, x in found.items():
        assert x.dtype == dtype, what
        rtol = 4 * float(jnp.finfo(dtype).eps)
        x = np.asarray(x).astype(np.float64)[:, 0]
        np.testing.assert_allclose(x, wanted[what], rtol=rtol, atol=1e-15, err_msg=what)
