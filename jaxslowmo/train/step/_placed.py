"""Batches and weights on the devices that use them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh, VirtualMesh, axis_names
from ...tree import leaf_names


def placed_weight(weight: Any, mesh: AnyMesh, axis_name: AxisName) -> jax.Array | None:
    """A weight per replica, where the replicas are.

    Raises:
      ValueError: another shape; where they are known, numbers below 0 or not finite.

    Communication: none.
    """
    if weight is None:
        return None
    replicas = math.prod(mesh.shape[name] for name in axis_names(axis_name))
    if np.shape(weight) != (replicas,):
        raise ValueError(
            f"`weight` must hold one number per replica, shape ({replicas},), got shape "
            f"{np.shape(weight)}."
        )
    if not isinstance(weight, jax.Array):
        weight = np.asarray(weight, np.float32)
        if not np.all((weight >= 0) & np.isfinite(weight)):
            raise ValueError(f"`weight` must be >= 0 and finite, got {weight.tolist()}.")
    if isinstance(mesh, VirtualMesh):
        return jnp.asarray(weight)
    return jax.device_put(weight, NamedSharding(mesh, P(axis_names(axis_name))))


def placed_batch(batch: PyTree, mesh: AnyMesh, axes: tuple[str, ...]) -> PyTree:
    """A batch whose leading dimensions are split over `axes`; arrays that are so stay.

    Raises:
      ValueError: a leading dimension that does not split evenly; all are listed.

    Communication: host to device; none between replicas.
    """
    parts = math.prod(mesh.shape[name] for name in axes)
    if not all(_divides(parts, x) for x in jax.tree.leaves(batch)):
        raise ValueError(_uneven(batch, parts, axes))
    if isinstance(mesh, VirtualMesh):
        return batch
    sharding = NamedSharding(mesh, P(axes))

    def place(x: Any) -> Any:
        if _is_split(x, mesh, axes):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(place, batch)


def _is_split(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether the leading dimension of `x` is split over `axes` of `mesh`, or finer."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh or not sharding.spec:
        return False
    entry = sharding.spec[0]
    split = entry if isinstance(entry, tuple) else (entry,)
    return split[: len(axes)] == axes


def _divides(parts: int, x: Any) -> bool:
    return bool(np.shape(x)) and np.shape(x)[0] > 0 and np.shape(x)[0] % parts == 0


def _uneven(batch: PyTree, parts: int, axes: tuple[str, ...]) -> str:
    leaves = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
    wrong = [f"{name} {np.shape(x)}" for name, x in leaves if not _divides(parts, x)]
    return (
        f"`batch`: the leading dimension of every leaf must be a positive multiple of {parts}, the "
        f"size of axes {axes} together, got {', '.join(wrong)}."
    )
