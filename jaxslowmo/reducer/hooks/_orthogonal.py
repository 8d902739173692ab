"""Orthonormal columns."""

import jax
import jax.numpy as jnp

# Up to here by Gram-Schmidt: few operations, where a QR is a library call on most backends.
_FEW_COLUMNS = 2


def orthogonal(x: jax.Array) -> jax.Array:
    """Orthonormal columns that span those of each matrix.

    Args:
      x: (matrices, n, r) float32, r <= n.

    Returns:
      The same shape. Up to 2 columns: one that depends on those before it, to the last bit, is 0;
      with more columns an orthonormal complement takes its place.

    Communication: none.
    """
    if x.shape[-1] > _FEW_COLUMNS:
        return jnp.linalg.qr(x)[0]
    columns: list[jax.Array] = []
    for i in range(x.shape[-1]):
        column = _unit(x[..., i])
        # Twice: what is left of nearly dependent columns is rounding noise, which would again
        # have a part along the earlier ones.
        for _ in range(2 if columns else 0):
            for other in columns:
                column = column - jnp.sum(column * other, axis=-1, keepdims=True) * other
            column = _unit(column)
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def _unit(x: jax.Array) -> jax.Array:
    """(matrices, n) rows of length 1, or 0 where they are 0; also of tiny and huge ones."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    x = x / jnp.where(largest == 0, 1, largest)
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(norm == 0, 1, norm)
