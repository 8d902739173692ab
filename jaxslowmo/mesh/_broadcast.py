"""The first position's value along an axis."""

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName, PyTree
from ._axes import axis_size, settle


def from_first(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Every leaf as position 0 of `axis_name` has it; any dtype, PRNG keys included.

    Communication: one all-reduce of each leaf over `axis_name` (all others add zeros); none where
      its size is 1.
    """

    def first(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            implementation = jax.random.key_impl(x)
            return jax.random.wrap_key_data(first(jax.random.key_data(x)), impl=implementation)
        if axis_size(axis_name) == 1:
            return settle(x, axis_name)
        mine = jnp.where(lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
        return lax.psum(mine, axis_name).astype(x.dtype)

    return jax.tree.map(first, tree)
