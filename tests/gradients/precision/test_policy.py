"""What a loss is given to compute in and what it gives back; scaled gradients; who is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.gradients.precision import apply_policy, scaled_value_and_grad
from jaxslowmo.tracing import as_full_loss

TREE = {
    "decoder": {"norm": jnp.ones(2), "dense": [jnp.ones(2), jnp.ones(2, jnp.bfloat16)]},
    "rows": jnp.arange(2),
    "key": jax.random.key(0),
    "wave": jnp.ones(1, jnp.complex64),
    "host": np.ones(2, np.float64),
    "number": 0.5,
}


def dtypes(tree):
    return [str(jnp.result_type(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("decoder", [True, True, True]),
        (("*/norm", "*/dense/0"), [True, False, True]),
        ("norm", [False, False, False]),
    ],
)
def test_all_real_floating_leaves_are_cast_but_those_that_are_kept(keep, kept):
    cast = js.gradients.Policy("float16", keep=keep).cast(TREE)
    assert jax.tree.structure(cast) == jax.tree.structure(TREE)
    both = zip(*(jax.tree.leaves(tree["decoder"]) for tree in (cast, TREE)), strict=True)
    found = [(x is y, x.dtype == jnp.float16) for x, y in both]
    assert found == [(is_kept, not is_kept) for is_kept in kept]
    assert dtypes([cast["host"], cast["number"]]) == ["float16"] * 2
    assert all(cast[same] is TREE[same] for same in ("rows", "key", "wave"))


def test_a_loss_computes_in_it_and_returns_float32():
    seen = {}

    def loss(params, batch, *, rng, model_state, embedded):
        seen.update(given=dtypes((params, batch, embedded)), state=dtypes(model_state))
        value = (params * batch["x"] * embedded).sum()
        metrics = {"value": value, "count": batch["n"].sum()}
        return value, (metrics, {"mean": value, "steps": model_state["steps"] + 1})

    cast = apply_policy(js.gradients.Policy("bfloat16", keep="n*"), as_full_loss(loss))
    x, steps = jnp.float32([1.001, 2.0]), {"mean": jnp.float32(0.5), "steps": jnp.int32(3)}
    batch = {"x": x, "n": jnp.float32([1, 2])}

    def full(params):
        return cast(params, batch, rng=jax.random.key(0), model_state=steps, embedded=x)

    (value, (metrics, after)), grads = jax.value_and_grad(full, has_aux=True)(x)
    assert seen["given"] == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    assert seen["state"] == ["float32", "int32"]
    assert dtypes((value, metrics, after)) == ["float32", "float32", "float32", "float32", "int32"]
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, [1.0, 4.0])  # 1.001 is 1 in bfloat16
    assert after["steps"] == 4


def test_gradients_of_a_scaled_loss_are_those_of_the_loss():
    """To the bit where nothing overflows; the loss is scaled in float32."""
    x = jnp.linspace(-1.0, 2.0, 5)

    def loss(params, power, *, shift):
        return ((params + shift) ** power).sum(), {"shift": shift}

    scaled = scaled_value_and_grad(loss, jnp.float32(2.0**14))
    wanted = jax.value_and_grad(loss, has_aux=True)(x, 3, shift=0.3)
    jax.tree.map(np.testing.assert_array_equal, scaled(x, 3, shift=0.3), wanted)
    (value, _), grads = scaled(jnp.asarray(x, jnp.float16), 2, shift=0.0)
    assert (value.dtype, grads.dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_allclose(value, (x**2).sum(), rtol=1e-3)
    # 2 * 2 times the scale is infinite in float16: so is the gradient, and the update is skipped.
    np.testing.assert_array_equal(np.isfinite(grads), [True, True, True, True, False])
