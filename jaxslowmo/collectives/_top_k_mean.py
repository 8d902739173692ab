"""Mean of a flat buffer of which each replica sends a few entries."""

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, vary_over, varying_axes
from ..tree import at_least_float32
from ._packed import gather, pack, unpack


def top_k_mean(
    flat: jax.Array, axis_name: AxisName, k: int, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Mean over replicas of the k entries of largest magnitude of each, and what was not sent.

    Args:
      flat: `(n,)`, at least float32.
      axis_name: mapped axis, or several, of R replicas.
      k: 1 to n. Entries that are not finite come first.
      dtype: of the mean, and in which values travel.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`; and
      `(n,)` in the dtype of `flat`, what each entry lacks of it.

    Communication: one all-gather over `axis_name` of R * k values and int32 positions (of parts of
      it over each of several axes).
    """
    flat = vary_over(flat, axis_names(axis_name))
    magnitude = jnp.where(jnp.isnan(flat), jnp.full_like(flat, jnp.inf), jnp.abs(flat))
    positions = lax.top_k(magnitude, k)[1].astype(jnp.int32)
    values = flat[positions].astype(dtype)
    lost = flat.at[positions].add(-values.astype(flat.dtype), unique_indices=True)

    packed = gather(pack(values[None], positions[None]), axis_name)
    all_values, all_positions = unpack(packed, (k, dtype), (k, jnp.int32))
    wide = at_least_float32(dtype)

    def add(total: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        # No position occurs twice, so the order of sums is fixed: equal bits everywhere.
        where, what = one
        return total.at[where].add(what.astype(wide), unique_indices=True), None

    # As varying as what is added: a scan keeps the type of what it carries.
    zeros = vary_over(jnp.zeros(flat.shape, wide), varying_axes(packed))
    total, _ = lax.scan(add, zeros, (all_positions, all_values))
    return (total / axis_size(axis_name)).astype(dtype), lost
