"""Batches in microbatches, and weights over the devices that share these."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...mesh import axis_names
from ...tree import leaf_names


def in_microbatches(batch: PyTree, count: int, shares: Mapping[str, int]) -> PyTree:
    """Leaves (count, examples / count, ...) of a batch.

    Args:
      batch: leaves (examples, ...).
      count: of microbatches.
      shares: sizes of the axes between whose devices each microbatch is split.

    Raises:
      ValueError: leaves without examples or with unlike numbers of them, a number that the
        microbatches, or the axes then, do not divide.
    """
    leaves = jax.tree.leaves(batch)
    sizes = {
        name: jnp.shape(x)[0] if jnp.ndim(x) else None
        for name, x in zip(leaf_names(batch), leaves, strict=True)
    }
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(
            "`batch` must have leaves whose leading dimension counts its examples, got "
            f"{', '.join(f'{name}: {n}' for name, n in sizes.items()) or 'no leaves'}."
        )
    examples = jnp.shape(leaves[0])[0]
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
    return jax.tree.map(
        lambda x: jnp.reshape(x, (count, examples // count, *jnp.shape(x)[1:])), batch
    )


def laid_out(tree: PyTree, spec: P, mesh: Mesh | AbstractMesh) -> PyTree:
    """`tree` as `spec` says over Explicit axes, of whose layout types tell; of others as it is."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]
    own = only_over(spec, explicit)
    if not any(own):
        return tree
    return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, own)), tree)


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
