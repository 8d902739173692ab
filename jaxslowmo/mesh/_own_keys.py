"""PRNG keys that differ along a mapped axis."""

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName, PyTree
from ._axes import axis_names


def own_keys(tree: PyTree, axis_name: AxisName) -> PyTree:
    """`tree` with keys of its own at every position of `axis_name`; position 0 keeps those given.

    Typed keys alone (`jax.random.key`): of others nothing tells that they are keys.

    Communication: none.
    """

    def own(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        for name in axis_names(axis_name):
            x = numbered_key(x, lax.axis_index(name))
        return x

    return jax.tree.map(own, tree)


def numbered_key(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Keys of any shape with a number folded in; as they are for number 0."""
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    data = jnp.where(
        number == 0, jax.random.key_data(keys), jax.random.key_data(folded.reshape(keys.shape))
    )
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
