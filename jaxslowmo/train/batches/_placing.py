"""Placement of batches and weights on devices, and which parts of a batch a process holds."""

import functools
import math
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...embedding import Lookup
from ...mesh import AnyMesh, VirtualMesh, axis_names, is_of_host, is_shared
from ...tree import leaf_names

HostBatch = Literal["local", "global"]


@functools.lru_cache(maxsize=64)
def own_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the parts of a dimension split over `axes` that devices of this process hold.

    Args:
      mesh: mesh of one process or of several; a `VirtualMesh` holds all parts.
      axes: names of mesh axes, outermost first.

    Returns:
      Part numbers in 0 .. number of parts - 1, ascending. They need not be consecutive. Where
      devices differ along another axis, several processes hold the same part.

    Communication: none.
    """
    count = num_parts(mesh, axes)
    if isinstance(mesh, VirtualMesh):
        return tuple(range(count))
    held = NamedSharding(mesh, P(axes)).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({index[0].indices(count)[0] for index in held if index}))


def num_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    """Return the number of parts of a dimension that is split over `axes`."""
    return math.prod(mesh.shape[name] for name in axes)


def is_of_processes(mesh: AnyMesh) -> TypeGuard[Mesh]:
    """Return whether devices of several processes form the mesh."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def num_parts_in(x: Any, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch) -> int:
    """Return how many parts `x` holds the rows of: all parts, or those of this process."""
    if host_batch == "local" and is_of_processes(mesh) and is_of_host(x):
        return len(own_parts(mesh, axes))
    return num_parts(mesh, axes)


def from_parts(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """Return an array over all processes, built from the parts that each process holds.

    Args:
      x: NumPy or jax array (local parts * rows, ...): the rows of `own_parts`, one part after the
        other. Every part has the same number of rows on every process. Processes that hold the
        same part must pass the same values.
      mesh: mesh whose devices belong to several processes.
      axes: mesh axes over which the leading dimension is split.

    Communication: none.
    """
    local_parts = own_parts(mesh, axes)
    rows = x.shape[0] // len(local_parts)
    whole = rows * num_parts(mesh, axes)
    first_rows = {part: i * rows for i, part in enumerate(local_parts)}
    x = _cuttable(x)

    def of_device(index: Any) -> Any:
        begin = first_rows[index[0].indices(whole)[0] // rows]
        return x[begin : begin + rows]

    shape = (whole, *x.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(axes)), of_device)


def from_whole(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """Return an array over all processes from the same whole array on each of them.

    Communication: none; nothing checks that the arrays are the same.
    """
    x = _cuttable(x)
    return jax.make_array_from_callback(x.shape, _split_over(axes, mesh), x.__getitem__)


def _split_over(axes: tuple[str, ...], mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array whose leading dimension is split; () if it is whole."""
    return NamedSharding(mesh, P(axes) if axes else P())


def _cuttable(x: Any) -> Any:
    """Return `x` such that slicing its rows runs no program over several devices."""
    if not isinstance(x, jax.Array) or len(x.devices()) == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.asarray(x)


_MAX_NAMED = 8  # leaves that an error message lists


def uneven(
    batch: PyTree, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch
) -> str | None:
    """Return a message that lists leaves that are neither split evenly nor shared; None for none.

    One leaf at least must be split: a batch of one example is none for several devices.
    """
    leaves = jax.tree.leaves(batch)
    parts = [num_parts_in(x, mesh, axes, host_batch) for x in leaves]
    divides = list(map(_divides, parts, leaves))
    in_lists = _in_lists_of_numbers(batch)
    is_right = [
        splits or (is_shared(x) and not in_list)
        for splits, x, in_list in zip(divides, leaves, in_lists, strict=True)
    ]
    if all(is_right) and (any(divides) or not leaves):
        return None
    named = zip(leaf_names(batch), is_right, leaves, strict=True)
    wrong = [f"{name} {np.shape(x)}" for name, right, x in named if not right or all(is_right)]
    more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
    if any(in_lists):
        more += "; lists of numbers are not arrays, np.asarray makes one"
    every = num_parts(mesh, axes)
    size = f"{every}, the size of axes {axes} together"
    if any(count != every for count in parts):
        num_local = len(own_parts(mesh, axes))
        size = f'{num_local}, this process\' share of {size} (`host_batch`="local")'
    return (
        "`batch`: the leading dimension of every leaf must be a positive multiple of "
        f"{size}, or 1 (or none at all) for a leaf that all examples share, got "
        f"{', '.join(wrong[:_MAX_NAMED])}{more}."
    )


def _in_lists_of_numbers(batch: PyTree) -> list[bool]:
    """Return for each leaf whether a list holds it in which all elements are numbers."""

    def is_list_of_numbers(x: Any) -> bool:
        is_flat = isinstance(x, list) and len(x) > 1 and jax.tree_util.all_leaves(x)
        return is_flat and not any(map(np.ndim, x))

    nodes = jax.tree.leaves(batch, is_leaf=is_list_of_numbers)
    return [is_list_of_numbers(x) for x in nodes for _ in jax.tree.leaves(x)]


def is_split(x: Any, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch) -> bool:
    """Return whether a leaf of a batch that is not `uneven` is split over `axes`, not shared."""
    return _divides(num_parts_in(x, mesh, axes, host_batch), x)


def _divides(parts: int, x: Any) -> bool:
    shape = np.shape(x)
    return bool(shape) and shape[0] > 0 and parts > 0 and shape[0] % parts == 0


def placed_weight(
    weight: Any, mesh: AnyMesh, axis_name: AxisName, host_batch: HostBatch = "local"
) -> jax.Array | None:
    """Return one weight per replica, placed on the devices of the replicas.

    Args:
      weight: one number per replica. In several processes a host array holds the weights of the
        replicas that have devices in this process with `"local"`, those of all with `"global"`.
      mesh: mesh of the step.
      axis_name: name of the replica axis or axes.
      host_batch: whether host arrays hold this process' part or the whole, see `weight`.

    Raises:
      ValueError: another shape; for host arrays also numbers below 0 or not finite.

    Communication: none.
    """
    if weight is None:
        return None
    axes = axis_names(axis_name)
    array = weight if isinstance(weight, jax.Array) else np.asarray(weight, np.float32)
    held, replicas = num_parts_in(array, mesh, axes, host_batch), num_parts(mesh, axes)
    if array.shape != (held,):
        whose = "" if held == replicas else f" of this process, which has {held} of {replicas}"
        raise ValueError(
            f"`weight` must hold one number per replica{whose}, shape ({held},), got shape "
            f"{array.shape}."
        )
    if isinstance(array, np.ndarray) and not np.all((array >= 0) & np.isfinite(array)):
        raise ValueError(f"`weight` must be >= 0 and finite, got {array.tolist()}.")
    if isinstance(mesh, VirtualMesh):
        return jnp.asarray(array)
    return _placed(array, mesh, axes, host_batch)


def placed_batch(
    batch: PyTree, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch = "local"
) -> PyTree:
    """Return the batch with leading dimensions split over `axes`; keep arrays that already are.

    Leaves that all examples share are whole on every device.

    Args:
      batch: tree of arrays, as `TrainStep` takes it.
      mesh: mesh of the step.
      axes: mesh axes over which the batch is split.
      host_batch: whether host arrays hold this process' parts ("local") or the whole ("global").

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
        if _lies_split(x, mesh, axes):
            return x
        over = axes if is_split(x, mesh, axes, host_batch) else ()
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_split_over(over, mesh))
        return _placed(x, mesh, over, host_batch)

    return jax.tree.map(place, batch)


def as_arrays(batch: PyTree) -> PyTree:
    """Return the batch with arrays of other libraries, such as torch on CPU, as NumPy arrays."""
    if all(map(_is_array, jax.tree.leaves(batch))):
        return batch
    return jax.tree.map(_as_array, batch)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray)


def _as_array(x: Any) -> Any:
    if _is_array(x):
        return x
    if isinstance(x, bool | int | float | complex):
        return jnp.asarray(x)  # as weakly typed as in a program of one device
    return x.__jax_array__() if hasattr(x, "__jax_array__") else np.asarray(x)


def _placed(x: Any, mesh: Mesh, axes: tuple[str, ...], host_batch: HostBatch) -> jax.Array:
    # In several processes, `device_put` of a host array with such a sharding gathers it from all
    # processes to check that they agree: communication, and an error for different parts.
    if not mesh.is_multi_process or isinstance(x, Tracer) or not is_of_host(x):
        return jax.device_put(x, _split_over(axes, mesh))
    if host_batch == "local" and axes:
        return from_parts(x, mesh, axes)
    return from_whole(x, mesh, axes)


def is_placed(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Return whether `x` is a non-empty jax array that is on `mesh` as a step needs it.

    It is split over `axes`, or it is shared by all examples and whole on every device.

    Communication: none.
    """
    if not isinstance(x, jax.Array) or x.size == 0:
        return False
    return _lies_split(x, mesh, axes) or (is_shared(x) and x.sharding == _split_over((), mesh))


def _lies_split(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Return whether the leading dimension of `x` is split over at least `axes` of `mesh`."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh or not sharding.spec:
        return False
    entry = sharding.spec[0]
    split = entry if isinstance(entry, tuple) else (entry,)
    return split[: len(axes)] == axes


def _comparison(mesh, host_batch):
    from ._processes import Comparison

    return Comparison(mesh, host_batch) if is_of_processes(mesh) else None


class Placing:
    """The placement of a step's batches: checks them and puts them on the devices of the mesh.

    Args:
      mesh: mesh of the step.
      axis_name: name of the replica axis or axes.
      host_batch: whether host arrays hold this process' parts ("local") or the whole ("global").
      lookup: lookup of the step, which checks ids in host arrays before they are used; None for a
        step without embedding tables.
      compare: function that is called with every batch and its axes, and raises `ValueError` where
        the parts from several processes do not fit together; None in one process.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name: AxisName,
        host_batch: HostBatch,
        lookup: Lookup | None,
    ) -> None:
        self._mesh, self._axis_name = mesh, axis_name
        self._host_batch: HostBatch = host_batch
        self._compare = _comparison(mesh, host_batch)
        self._lookup = lookup
        self._checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # For each program that ran, its counts of ids that were not checked on the host.
        self._counts: deque[dict[str, Any]] = deque()

    def compared(
        self, batch: PyTree, weight: Any, axes: tuple[str, ...], *, check_ids: bool = True
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the placed batch and weight, after the processes have compared their batches."""
        if weight is None and self._lookup is None and isinstance(self._mesh, Mesh):
            leaves = jax.tree.leaves(batch)
            if all(is_placed(x, self._mesh, axes) for x in leaves):
                return batch, None
        batch = as_arrays(batch)
        if self._compare is not None:
            self._compare(batch, axes)
        if self._lookup is None or not check_ids:
            return self.placed(batch, weight, axes)
        # `check` reports whether it saw the ids of all tables: `inputs` may make some
        # on devices, from arrays of the host.
        host = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)]
        is_checked = bool(host) and self._lookup.check(batch, self._num_parts(host[0], axes))
        placed, weight = self.placed(batch, weight, axes)
        self._note_checked(batch, placed, of_host=is_checked)
        return placed, weight

    def copied(self, batch: PyTree) -> PyTree:
        """Return a copy of a batch for virtual replicas on their one device."""
        on_device = jax.device_put(batch)
        self._note_checked(batch, on_device, of_host=False)
        return on_device

    def _note_checked(self, batch: PyTree, placed: PyTree, *, of_host: bool) -> None:
        """Mark placed leaves as checked if their source was, or if it is NumPy and `of_host`."""
        for leaf, placed_leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
            was_checked = self._checked.get(id(leaf)) is leaf
            if was_checked or (of_host and isinstance(leaf, np.ndarray)):
                self._checked[id(placed_leaf)] = placed_leaf

    def ran(self, batch: PyTree, metrics: Mapping[str, Any]) -> None:
        """Keep a program's counts of wrong ids, unless all ids of its batch were checked before.

        `refuse_counted` reads the counts.
        """
        if self._lookup is None:
            return
        is_checked = all(self._checked.get(id(x)) is x for x in jax.tree.leaves(batch))
        counts = {n: x for n, x in metrics.items() if n.startswith("embeddings/")}
        self._counts.append({} if is_checked else counts)

    def refuse_counted(self, num_running: int = 1) -> None:
        """Raise `ValueError` if a program counted ids that are in no table.

        Args:
          num_running: number of last programs to leave out, since they may still be running.
        """
        while self._lookup is not None and len(self._counts) > num_running:
            counts = self._counts.popleft()
            self._lookup.refuse({name: count_here(x) for name, x in counts.items()})

    def placed(
        self, batch: PyTree, weight: Any, axes: tuple[str, ...]
    ) -> tuple[PyTree, jax.Array | None]:
        """Return a batch and its weight on the devices; a `jax.ShapeDtypeStruct` stays one."""
        return (
            placed_batch(batch, self._mesh, axes, self._host_batch),
            placed_weight(weight, self._mesh, self._axis_name, self._host_batch),
        )

    def share(self, batch: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Return the shapes and dtypes of one device's part of a batch of arrays."""

        def share(x: Any) -> jax.ShapeDtypeStruct:
            shape = x.shape
            if is_split(x, self._mesh, axes, self._host_batch):
                shape = (shape[0] // self._num_parts(x, axes), *shape[1:])
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        return jax.tree.map(share, batch)

    def _num_parts(self, x: Any, axes: tuple[str, ...]) -> int:
        """Return how many devices an array of a batch holds the rows of."""
        return num_parts_in(x, self._mesh, axes, self._host_batch)


def count_here(count: Any) -> int:
    """Return the sum of a count, (replicas,), over the replicas of this process; wait for it.

    A traced count gives 0.
    """
    if isinstance(count, Tracer):
        return 0
    if not isinstance(count, jax.Array) or count.is_fully_addressable:
        return int(np.sum(count))
    # Devices of one replica hold the same part.
    parts = {str(shard.index): shard.data for shard in count.addressable_shards}
    return int(sum(np.sum(np.asarray(part)) for part in parts.values()))
