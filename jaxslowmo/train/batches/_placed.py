"""Batches and weights on the devices that use them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh, VirtualMesh, axis_names, is_of_host
from ...tree import leaf_names
from ._parts import HostBatch, from_parts, from_whole, num_parts, own_parts, parts_given

_MAX_NAMED = 8  # leaves in a message


def placed_weight(
    weight: Any, mesh: AnyMesh, axis_name: AxisName, host_batch: HostBatch = "local"
) -> jax.Array | None:
    """A weight per replica, where the replicas are.

    Args:
      weight: one number per replica; in several processes those of the host are for the replicas of
        which this process has devices with `"local"`, for all with `"global"`.
      mesh: of the step.
      axis_name: the replica axis.
      host_batch: as said.

    Raises:
      ValueError: another shape; where they are known, numbers below 0 or not finite.

    Communication: none.
    """
    if weight is None:
        return None
    axes = axis_names(axis_name)
    given = weight if isinstance(weight, jax.Array) else np.asarray(weight, np.float32)
    wanted, replicas = parts_given(given, mesh, axes, host_batch), num_parts(mesh, axes)
    if given.shape != (wanted,):
        whose = "" if wanted == replicas else f" of this process, which has {wanted} of {replicas}"
        raise ValueError(
            f"`weight` must hold one number per replica{whose}, shape ({wanted},), got shape "
            f"{given.shape}."
        )
    if isinstance(given, np.ndarray) and not np.all((given >= 0) & np.isfinite(given)):
        raise ValueError(f"`weight` must be >= 0 and finite, got {given.tolist()}.")
    if isinstance(mesh, VirtualMesh):
        return jnp.asarray(given)
    return _placed(given, mesh, axes, host_batch)


def placed_batch(
    batch: PyTree, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch = "local"
) -> PyTree:
    """A batch whose leading dimensions are split over `axes`; arrays that are so stay.

    Args:
      batch: leaves as `TrainStep` takes them.
      mesh: of the step.
      axes: over which the batch is split.
      host_batch: whether leaves of the host are this process' parts, in several processes.

    Raises:
      ValueError: a leading dimension that does not split evenly; all are listed.

    Communication: host to device; none between replicas or processes.
    """
    batch = as_arrays(batch)
    problem = uneven(batch, mesh, axes, host_batch)
    if problem:
        raise ValueError(problem)
    if isinstance(mesh, VirtualMesh):
        return batch

    def place(x: Any) -> Any:
        if _is_split(x, mesh, axes):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(axes)))
        return _placed(x, mesh, axes, host_batch)

    return jax.tree.map(place, batch)


def as_arrays(batch: PyTree) -> PyTree:
    """The batch with arrays of other libraries, such as torch's on CPU, as NumPy's."""
    if all(map(_is_array, jax.tree.leaves(batch))):
        return batch
    return jax.tree.map(_as_array, batch)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray)


def _as_array(x: Any) -> Any:
    if _is_array(x):
        return x
    return x.__jax_array__() if hasattr(x, "__jax_array__") else np.asarray(x)


def uneven(
    batch: PyTree, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch
) -> str | None:
    """Which leading dimensions do not split evenly, in a sentence; None where all do."""
    leaves = jax.tree.leaves(batch)
    parts = [parts_given(x, mesh, axes, host_batch) for x in leaves]
    if all(map(_divides, parts, leaves)):
        return None
    named = zip(leaf_names(batch), parts, leaves, strict=True)
    wrong = [f"{name} {np.shape(x)}" for name, count, x in named if not _divides(count, x)]
    more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
    if not all(map(np.shape, leaves)):
        more += "; lists of numbers are not arrays, np.asarray makes one"
    every = num_parts(mesh, axes)
    size = f"{every}, the size of axes {axes} together"
    if any(count != every for count in parts):
        own = len(own_parts(mesh, axes))
        size = f'{own}, this process\' share of {size} (`host_batch`="local")'
    return (
        "`batch`: the leading dimension of every leaf must be a positive multiple of "
        f"{size}, got {', '.join(wrong[:_MAX_NAMED])}{more}."
    )


def _divides(parts: int, x: Any) -> bool:
    shape = np.shape(x)
    return bool(shape) and shape[0] > 0 and parts > 0 and shape[0] % parts == 0


def _placed(x: Any, mesh: Mesh, axes: tuple[str, ...], host_batch: HostBatch) -> jax.Array:
    # `device_put` of what the host holds gathers it from all processes, to see that they agree.
    if not mesh.is_multi_process or isinstance(x, Tracer) or not is_of_host(x):
        return jax.device_put(x, NamedSharding(mesh, P(axes)))
    if host_batch == "local":
        return from_parts(x, mesh, axes)
    return from_whole(x, mesh, axes)


def lies_there(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether `x` is an array that was placed before: there is nothing to ask of it.

    Communication: none.
    """
    return isinstance(x, jax.Array) and x.size > 0 and _is_split(x, mesh, axes)


def _is_split(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether the leading dimension of `x` is split over `axes` of `mesh`, or finer."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh or not sharding.spec:
        return False
    entry = sharding.spec[0]
    split = entry if isinstance(entry, tuple) else (entry,)
    return split[: len(axes)] == axes
