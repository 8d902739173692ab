"""Gradients by way of a scaled loss are those of the loss."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxslowmo.gradients.precision import scaled_value_and_grad

X = jnp.linspace(-1.0, 2.0, 5)


def loss(params, power, *, shift):
    return ((params + shift) ** power).sum(), {"shift": shift}


def test_a_power_of_two_changes_no_bit():
    want = jax.value_and_grad(loss, has_aux=True)(X, 3, shift=0.3)
    for scale in (jnp.float32(2.0**15), jnp.float32(0.5)):
        found = scaled_value_and_grad(loss, scale)(X, 3, shift=0.3)
        jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_loss_in_half_precision_is_scaled_in_float32():
    half = jnp.asarray(X, jnp.float16)
    (value, _), grads = scaled_value_and_grad(loss, jnp.float32(2.0**15))(half, 2, shift=300.0)
    assert value.dtype == jnp.float32
    assert not np.isfinite(value)  # 5 * 300 ** 2 is beyond float16 before it is scaled
    (value, _), grads = scaled_value_and_grad(loss, jnp.float32(2.0**14))(half, 2, shift=0.0)
    assert (value.dtype, grads.dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_allclose(value, (X**2).sum(), rtol=1e-3)
    # 2 * 2 times the scale is infinite in float16: so is the gradient, and the update is skipped.
    np.testing.assert_array_equal(np.isfinite(grads), [True, True, True, True, False])
