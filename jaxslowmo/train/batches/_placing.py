"""Batches and weights on the devices that use them, also of several processes."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...embedding import Lookup
from ...mesh import AnyMesh, VirtualMesh, axis_names, is_of_host
from .._train_state import StateLayout
from ._processes import (
    Comparison,
    HostBatch,
    from_parts,
    from_whole,
    num_parts,
    parts_given,
    uneven,
)


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


class Placing:
    """Puts batches where they belong.

    Args:
      mesh: of the step.
      axis_name: of its replicas.
      host_batch: what leaves of the host are.
      lookup: of the step; ids of the host are looked at before they are used.
    """

    def __init__(
        self, mesh: AnyMesh, axis_name: AxisName, host_batch: HostBatch, lookup: Lookup
    ) -> None:
        self._mesh, self._axis_name = mesh, axis_name
        self._host_batch: HostBatch = host_batch
        self._compare = Comparison(mesh, host_batch)
        self._lookup, self._has_ids = lookup, lookup.embeddings is not None
        self._looked_at: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._counts: deque[dict[str, Any]] = deque()  # by program, of ids that only devices know

    def compared(
        self, batch: PyTree, weight: Any, layout: StateLayout, *, check_ids: bool = True
    ) -> tuple[PyTree, jax.Array | None]:
        """A batch that is to run, when processes have compared what they give, and its weight."""
        if weight is None and not self._has_ids and isinstance(self._mesh, Mesh):
            leaves = jax.tree.leaves(batch)
            if all(lies_there(x, self._mesh, layout.data_axes) for x in leaves):
                return batch, None
        batch = as_arrays(batch)
        self._compare(batch, layout.data_axes)
        if not self._has_ids or not check_ids:
            return self.placed(batch, weight, layout)
        # All of them, if any: of arrays of the host `inputs` may make some of a device.
        host = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)]
        is_known = bool(host) and self._lookup.check(batch, self._parts(host[0], layout))
        placed, weight = self.placed(batch, weight, layout)
        self._note_known(batch, placed, of_host=is_known)
        return placed, weight

    def copied(self, batch: PyTree) -> PyTree:
        """A batch for virtual replicas, of which placing takes no note, on their one device."""
        there = jax.device_put(batch)
        self._note_known(batch, there, of_host=False)
        return there

    def _note_known(self, batch: PyTree, placed: PyTree, *, of_host: bool) -> None:
        """Leaves whose ids were looked at stay so where they are placed, as those of the host."""
        for given, x in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
            was_known = self._looked_at.get(id(given)) is given
            if was_known or (of_host and isinstance(given, np.ndarray)):
                self._looked_at[id(x)] = x

    def ran(self, batch: PyTree, metrics: Mapping[str, Any]) -> None:
        """Take note of what a program counted in a batch; of ids that only devices have known.

        `refuse_counted` looks at that.
        """
        if not self._has_ids:
            return
        is_known = all(self._looked_at.get(id(x)) is x for x in jax.tree.leaves(batch))
        counts = {n: x for n, x in metrics.items() if n.startswith("embeddings/")}
        self._counts.append({} if is_known else counts)

    def refuse_counted(self, num_running: int = 1) -> None:
        """Raise `ValueError` where a program has counted ids that are in no table.

        Args:
          num_running: the last programs, which may be at work still and are not waited for.
        """
        while self._has_ids and len(self._counts) > num_running:
            counts = self._counts.popleft()
            self._lookup.refuse({name: count_here(x) for name, x in counts.items()})

    def placed(
        self, batch: PyTree, weight: Any, layout: StateLayout
    ) -> tuple[PyTree, jax.Array | None]:
        """A batch and its weight on the devices; shapes alone stay shapes."""
        return (
            placed_batch(batch, self._mesh, layout.data_axes, self._host_batch),
            placed_weight(weight, self._mesh, self._axis_name, self._host_batch),
        )

    def share(self, batch: PyTree, layout: StateLayout) -> PyTree:
        """Types of what one device has of a batch of arrays."""

        def share(x: Any) -> jax.ShapeDtypeStruct:
            rows = x.shape[0] // self._parts(x, layout)
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jnp.result_type(x))

        return jax.tree.map(share, batch)

    def _parts(self, x: Any, layout: StateLayout) -> int:
        """Of how many devices an array of a batch holds the rows."""
        return parts_given(x, self._mesh, layout.data_axes, self._host_batch)


def count_here(count: Any) -> int:
    """The sum of a count, (replicas,), over the replicas of this process; waits for it.

    0 while it is traced.
    """
    if isinstance(count, Tracer):
        return 0
    if not isinstance(count, jax.Array) or count.is_fully_addressable:
        return int(np.sum(count))
    # Devices of one replica hold the same part.
    parts = {str(shard.index): shard.data for shard in count.addressable_shards}
    return int(sum(np.sum(np.asarray(part)) for part in parts.values()))
