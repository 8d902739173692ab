"""The microbatches of a batch, and the PRNG key of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import axis_size
from ...tree import leaf_names


class KeyedMicrobatch(NamedTuple):
    """A microbatch, and the PRNG key for its layers.

    Attributes:
      batch: the microbatch.
      key: the PRNG key of this microbatch.
      shift: () int32, added to the index of each layer: programs that compute several equal stages
        of a model by one branch need it for the key of each.
    """

    batch: PyTree
    key: jax.Array
    shift: Any = 0

    def layer_key(self, layer: int) -> jax.Array:
        """Return the key of the layer with this index in the model."""
        return jax.random.fold_in(self.key, layer + self.shift)


class SharedLeaf(NamedTuple):
    """A leaf of a batch that all examples share, so that it is not divided."""

    value: Any


def split_microbatches(batch: PyTree, count: int, shares: Mapping[str, int]) -> PyTree:
    """Return the batch with leaves (count, examples / count, ...), and `SharedLeaf` ones.

    Args:
      batch: leaves (examples, ...). All examples share a scalar, and a leaf whose leading dimension
        is 1 while others have several examples.
      count: number of microbatches.
      shares: sizes of the axes between whose devices each microbatch is split.

    Raises:
      ValueError: no leaf with examples, leaves with different numbers of examples, a number that
        the microbatches and then the axes do not divide.
    """
    named = dict(zip(leaf_names(batch), jax.tree.leaves(batch), strict=True))
    sizes = {name: jnp.shape(x)[0] for name, x in named.items() if jnp.ndim(x)}
    examples = max(sizes.values(), default=0)
    if not sizes or set(sizes.values()) - {1, examples}:
        raise ValueError(
            "`batch` must have leaves of one leading dimension, its examples, or of 1, got "
            f"{', '.join(f'{n}: {sizes.get(n)}' for n in named) or 'no leaves'}."
        )
    if not examples or examples % count:
        raise ValueError(
            f"`batch` must divide into the {count} microbatches of `schedule`, got {examples} "
            "examples of a replica."
        )
    parts = 1
    for name, size in shares.items():
        parts *= size
        if examples // count % parts:
            raise ValueError(
                f"`data_axes` {tuple(shares)} must divide microbatches of {examples // count} "
                f"examples, which {name!r} of size {size} does not."
            )

    def cut(x: Any) -> Any:
        if not jnp.ndim(x) or jnp.shape(x)[0] < examples:
            return SharedLeaf(x)
        return jnp.reshape(x, (count, examples // count, *jnp.shape(x)[1:]))

    return jax.tree.map(cut, batch)


def microbatch_specs(microbatches: PyTree, data_axes: Sequence[str]) -> PyTree:
    """Return the specs of microbatches: split over the data axes, except `SharedLeaf` leaves."""

    def spec(x: Any) -> Any:
        return SharedLeaf(P()) if is_shared_leaf(x) else P(None, tuple(data_axes))

    return jax.tree.map(spec, microbatches, is_leaf=is_shared_leaf)


def is_shared_leaf(x: Any) -> bool:
    """Return whether a part of a batch is shared by all examples."""
    return isinstance(x, SharedLeaf)


def select_microbatch(
    batch: PyTree, rng: Any, number: Any, shift: Any, *, key_number: Any = None
) -> PyTree:
    """Return a microbatch in the form that the layers of a stage take.

    Args:
      batch: leaves (microbatches, examples, ...), and `SharedLeaf` ones.
      rng: the PRNG key of the step on this device, or None.
      number: () int32, the number of the microbatch.
      shift: () int32, added to the index of each layer; see `KeyedMicrobatch`.
      key_number: () int32, the number of the microbatch among those of this key; None: `number`.
    """

    def one(x: Any) -> jax.Array:
        if is_shared_leaf(x):
            x = x.value
        else:
            x = lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
        waits = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if waits else x

    microbatch = jax.tree.map(one, batch, is_leaf=is_shared_leaf)
    if rng is None:
        return microbatch
    key = jax.random.fold_in(rng, number if key_number is None else key_number)
    return KeyedMicrobatch(microbatch, key, shift)


def local_microbatches(batch: PyTree, data_axes: Sequence[str]) -> PyTree:
    """Return the part of microbatches that this position along `data_axes` computes."""

    def share(x: Any) -> Any:
        if is_shared_leaf(x):
            return x
        size = x.shape[1] // math.prod(map(axis_size, data_axes))
        return lax.dynamic_slice_in_dim(x, lax.axis_index(tuple(data_axes)) * size, size, 1)

    return jax.tree.map(share, batch, is_leaf=is_shared_leaf) if data_axes else batch
