"""Batches in microbatches, and weights over the devices that share these."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...mesh import axis_names, axis_size
from ...tree import leaf_names
from ..model import keyed_microbatch


class Shared(NamedTuple):
    """A leaf of a batch that belongs to all examples, as it is."""

    value: Any


def in_microbatches(batch: PyTree, count: int, shares: Mapping[str, int]) -> PyTree:
    """Leaves (count, examples / count, ...) of a batch, and `Shared` ones.

    Args:
      batch: leaves (examples, ...); a scalar, or a leaf whose leading dimension is 1 where others
        have several examples, is shared by all of them.
      count: of microbatches.
      shares: sizes of the axes between whose devices each microbatch is split.

    Raises:
      ValueError: no leaf with examples, unlike numbers of them, a number that the microbatches, or
        the axes then, do not divide.
    """
    named = dict(zip(leaf_names(batch), jax.tree.leaves(batch), strict=True))
    sizes = {name: jnp.shape(x)[0] for name, x in named.items() if jnp.ndim(x)}
    examples = max(sizes.values(), default=0)
    if not sizes or set(sizes.values()) - {1, examples}:
        raise ValueError(
            "`batch` must have leaves whose leading dimension counts its examples, or is 1 where "
            "all share them, got "
            f"{', '.join(f'{n}: {sizes.get(n)}' for n in named) or 'no leaves'}."
        )
    if not examples or examples % count:
        raise ValueError(
            f"`schedule` has {count} microbatches, which must divide the batch of a replica, got "
            f"{examples} examples."
        )
    parts = 1
    for name, size in shares.items():
        parts *= size
        if examples // count % parts:
            raise ValueError(
                f"`data_axes` {tuple(shares)} split each microbatch of {examples // count} "
                f"examples in parts, which axis {name!r} of size {size} does not divide."
            )

    def cut(x: Any) -> Any:
        if not jnp.ndim(x) or jnp.shape(x)[0] < examples:
            return Shared(x)
        return jnp.reshape(x, (count, examples // count, *jnp.shape(x)[1:]))

    return jax.tree.map(cut, batch)


def microbatch_specs(microbatches: PyTree, data_axes: Sequence[str]) -> PyTree:
    """How microbatches lie over the data axes: each split, and what they share whole."""

    def spec(x: Any) -> Any:
        return Shared(P()) if is_shared(x) else P(None, tuple(data_axes))

    return jax.tree.map(spec, microbatches, is_leaf=is_shared)


def is_shared(x: Any) -> bool:
    """Whether a part of a batch belongs to all examples."""
    return isinstance(x, Shared)


def microbatch_of(
    batch: PyTree, rng: Any, number: Any, shift: Any, *, key_number: Any = None
) -> PyTree:
    """Return a microbatch as the layers of a stage take it.

    Args:
      batch: leaves (microbatches, examples, ...), and `Shared` ones.
      rng: the key of the step on this device, or None.
      number: () int32, the number of the microbatch.
      shift: () int32, what is added to the index of each layer; see `Keyed`.
      key_number: () int32, the number of the microbatch among those of this key; None: `number`.
    """

    def one(x: Any) -> jax.Array:
        if is_shared(x):
            x = x.value
        else:
            x = lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
        waits = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if waits else x

    key_number = number if key_number is None else key_number
    return keyed_microbatch(jax.tree.map(one, batch, is_leaf=is_shared), rng, key_number, shift)


def share_of_microbatches(batch: PyTree, data_axes: Sequence[str]) -> PyTree:
    """Return the part of microbatches that this position along `data_axes` computes."""

    def share(x: Any) -> Any:
        if is_shared(x):
            return x
        size = x.shape[1] // math.prod(map(axis_size, data_axes))
        index = 0
        for name in data_axes:
            index = index * axis_size(name) + lax.axis_index(name)
        return lax.dynamic_slice_in_dim(x, index * size, size, 1)

    return jax.tree.map(share, batch, is_leaf=is_shared) if data_axes else batch


def laid_out(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """`tree` as `specs` say over Explicit axes, of whose layout types tell; of others as it is."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]

    def place(x: jax.Array, spec: P) -> jax.Array:
        own = only_over(spec, explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, own)) if any(own) else x

    return jax.tree.map(place, tree, specs) if explicit else tree


def only_over(spec: Iterable[Any], axes: Iterable[str]) -> P:
    """`spec` without axes but `axes`."""
    kept = [tuple(n for n in axis_names(entry or ()) if n in axes) for entry in spec]
    return P(*(names[0] if len(names) == 1 else names or None for names in kept))


def gathered(x: jax.Array, spec: P) -> jax.Array:
    """A leaf, whole, of the parts that devices hold.

    Communication: one all-gather over each axis in `spec`.
    """
    for dim, entry in enumerate(spec):
        # The parts along a later axis lie inside of those along an earlier one.
        for name in reversed(axis_names(entry or ())):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def scattered_sum(x: jax.Array, spec: P, axes: Sequence[str]) -> jax.Array:
    """A sum over `axes`, of which each device has the part that `spec` says.

    Communication: one reduce-scatter over each axis in `spec`, one all-reduce over the others.
    """
    named = set()
    for dim, entry in enumerate(spec):
        for name in axis_names(entry or ()):
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
            named.add(name)
    others = tuple(name for name in axes if name not in named)
    return lax.psum(x, others) if others else x
