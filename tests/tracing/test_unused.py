"""Parameters that cannot reach the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)


def unused(uses, **shapes):
    """Names that `uses(params, x)` leaves unused, of a, b and c."""
    params = {name: shapes.get(name, VECTOR) for name in "abc"}
    return js.unused_parameters(lambda p, x: jnp.sum(uses(p, x)), params, VECTOR)


@jax.custom_vjp
def swallow(x):
    return x


swallow.defvjp(lambda x: (x, None), lambda _, ct: (np.zeros(ct.shape, ct.dtype),))


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        (lambda p, x: p["a"] * p["b"] + p["c"], []),
        (lambda p, x: p["a"] * x, ["b", "c"]),
        (lambda p, x: p["a"] * jax.lax.stop_gradient(p["b"]) + p["b"] * p["c"], []),
        (lambda p, x: p["a"] * jax.lax.stop_gradient(p["b"] + p["c"]), ["b", "c"]),
        (lambda p, x: p["a"] * jnp.round(p["b"]) + jnp.where(p["c"] > 0, x, 0), ["b", "c"]),
        (lambda p, x: p["a"] * (0 * p["b"] + 1) + 0.0 * jnp.sin(p["c"] @ x), ["b", "c"]),
        (lambda p, x: p["a"] * swallow(p["b"]) + jax.jit(swallow)(p["c"]), ["b", "c"]),
        (lambda p, x: jax.jit(lambda p: p["b"] * 2)(p), ["a", "c"]),
        (lambda p, x: jax.checkpoint(lambda p: jnp.sin(p["b"]))(p), ["a", "c"]),
        (lambda p, x: jnp.zeros(4).at[jnp.arange(3)].set(p["b"]), ["a", "c"]),
        (lambda p, x: jnp.where(x > 0, p["b"], p["c"]), ["a"]),
        # Entries of an array are not told apart, here the row of b and c from that of a.
        (lambda p, x: jnp.stack([p["a"], p["b"] * p["c"]])[0], []),
        (lambda p, x: jax.vmap(lambda row: row * p["c"])(jnp.eye(3)), ["a", "b"]),
    ],
)
def test_unused(uses, expected):
    assert unused(uses) == expected


def test_a_single_branch_is_a_use():
    def uses(p, x):
        return jax.lax.cond(x[0] > 0, lambda: p["a"], lambda: x) + jax.lax.switch(
            jnp.int32(x[1]), [lambda: x, lambda: x * jax.lax.stop_gradient(p["b"])]
        )

    assert unused(uses) == ["b", "c"]


def test_loops():
    """Used is what reaches the loss after any number of iterations, here three."""

    def uses(p, x):
        def body(carry, row):
            one, two, three, lost = carry
            return (one + two * row, two + three, three + p["c"], lost + p["b"]), lost

        zeros = jnp.zeros(3)
        (one, _, _, _), _ = jax.lax.scan(body, (zeros,) * 4, p["a"])
        return one

    rows = jax.ShapeDtypeStruct((5, 3), jnp.float32)
    assert unused(uses, a=rows) == ["b"]
    assert unused(jax.checkpoint(uses), a=rows) == ["b"]
    frozen = lambda p, x: uses({**p, "a": jax.lax.stop_gradient(p["a"])}, x)  # noqa: E731
    assert unused(frozen, a=rows) == ["a", "b"]


def test_check_all_used_names_them():
    params = {"head": {"bias": VECTOR, "kernel": VECTOR}, "tail": VECTOR}
    loss = lambda p, x: jnp.sum(p["head"]["kernel"] * x)  # noqa: E731
    with pytest.raises(ValueError, match="head/bias, tail"):
        js.check_all_used(loss, params, VECTOR)
    js.check_all_used(loss, {"head": {"kernel": VECTOR}}, VECTOR)


def test_gradients_are_zero_where_unused_says_so():
    """And nowhere else, on values that do not cancel."""
    params = {name: jnp.arange(1.0, 4.0) + i for i, name in enumerate("abcd")}

    def loss(p, x):
        y = jax.lax.stop_gradient(p["a"]) * p["b"]
        return jnp.sum(y * x) + jnp.sum(jnp.floor(p["c"]) * p["d"])

    grads = jax.grad(loss)(params, jnp.ones(3))
    zero = [name for name, g in grads.items() if not np.any(g)]
    assert js.unused_parameters(loss, params, jnp.ones(3)) == zero == ["a", "c"]


@pytest.mark.parametrize("fn", [js.ready_order, js.unused_parameters, js.check_all_used])
def test_errors(fn):
    good = lambda p, x: jnp.sum(p * x)  # noqa: E731
    with pytest.raises(ValueError, match="`loss_fn` must be callable, got int"):
        fn(3, VECTOR, VECTOR)
    with pytest.raises(ValueError, match="`loss_fn` must return a scalar loss"):
        fn(lambda p, x: p * x, VECTOR, VECTOR)
    with pytest.raises(ValueError, match="`params` must have leaves"):
        fn(good, {}, VECTOR)
    with pytest.raises(ValueError, match=r"floating-point `params` only, got n \(int32\)"):
        fn(good, {"n": jnp.ones(3, jnp.int32), "w": VECTOR}, VECTOR)
    with pytest.raises(ValueError, match="must take `model_state`"):
        fn(good, VECTOR, VECTOR, model_state={"mean": VECTOR})
