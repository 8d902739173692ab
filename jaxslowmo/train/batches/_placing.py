"""Which parts of a batch this process holds, and batches and weights on their devices."""

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...embedding import Lookup
from ...mesh import AnyMesh, VirtualMesh, axis_names, is_of_host
from ...tree import leaf_names
from .._train_state import StateLayout

HostBatch = Literal["local", "global"]


@functools.lru_cache(maxsize=64)
def own_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Of a dimension that is split over `axes`, the parts that devices of this process hold.

    Args:
      mesh: in several processes or in one; a `VirtualMesh` has all parts.
      axes: of the mesh, outermost first.

    Returns:
      Numbers in 0 .. parts - 1, ascending. They need not follow each other, and where devices
      differ along another axis several processes hold the same part.

    Communication: none.
    """
    count = num_parts(mesh, axes)
    if isinstance(mesh, VirtualMesh):
        return tuple(range(count))
    held = NamedSharding(mesh, P(axes)).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({index[0].indices(count)[0] for index in held if index}))


def num_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    """Into how many parts a dimension is split over `axes`."""
    return math.prod(mesh.shape[name] for name in axes)


def is_of_processes(mesh: AnyMesh) -> TypeGuard[Mesh]:
    """Whether devices of several processes form the mesh."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def parts_given(x: Any, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch) -> int:
    """Of how many parts `x` holds the rows: of all, or of those of this process."""
    if host_batch == "local" and is_of_processes(mesh) and is_of_host(x):
        return len(own_parts(mesh, axes))
    return num_parts(mesh, axes)


def from_parts(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """The array over all processes of which this one gives its own parts.

    Args:
      x: NumPy or jax array (own parts * rows, ...): the rows of `own_parts`, one part after the
        other; as many rows in every part, on every process. Processes that hold the same part
        must give the same.
      mesh: of several processes.
      axes: over which the leading dimension is split.

    Communication: none.
    """
    own = own_parts(mesh, axes)
    rows = x.shape[0] // len(own)
    whole = rows * num_parts(mesh, axes)
    begins = {part: i * rows for i, part in enumerate(own)}
    x = _cuttable(x)

    def of_device(where: Any) -> Any:
        begin = begins[where[0].indices(whole)[0] // rows]
        return x[begin : begin + rows]

    shape = (whole, *x.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(axes)), of_device)


def from_whole(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """The array over all processes of which each gives the same whole.

    Communication: none; nobody looks whether it is the same.
    """
    x = _cuttable(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(axes)), x.__getitem__)


def _cuttable(x: Any) -> Any:
    """`x` with rows that can be taken without a program over several devices."""
    if not isinstance(x, jax.Array) or len(x.devices()) == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.asarray(x)


_MAX_NAMED = 8  # leaves in a message


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
      lookup: the lookup of the step, by which ids of the host are checked before they are used;
        None where the step has no tables.
      compare: is called with every batch and its axes, where several processes give parts of it,
        and raises `ValueError` where these do not fit together; None in one process.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name: AxisName,
        host_batch: HostBatch,
        lookup: Lookup | None,
        compare: Callable[[PyTree, tuple[str, ...]], None] | None,
    ) -> None:
        self._mesh, self._axis_name = mesh, axis_name
        self._host_batch: HostBatch = host_batch
        self._compare = compare
        self._lookup = lookup
        self._looked_at: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._counts: deque[dict[str, Any]] = deque()  # by program, of ids that only devices know

    def compared(
        self, batch: PyTree, weight: Any, layout: StateLayout, *, check_ids: bool = True
    ) -> tuple[PyTree, jax.Array | None]:
        """A batch that is to run, when processes have compared what they give, and its weight."""
        if weight is None and self._lookup is None and isinstance(self._mesh, Mesh):
            leaves = jax.tree.leaves(batch)
            if all(lies_there(x, self._mesh, layout.data_axes) for x in leaves):
                return batch, None
        batch = as_arrays(batch)
        if self._compare is not None:
            self._compare(batch, layout.data_axes)
        if self._lookup is None or not check_ids:
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
        if self._lookup is None:
            return
        is_known = all(self._looked_at.get(id(x)) is x for x in jax.tree.leaves(batch))
        counts = {n: x for n, x in metrics.items() if n.startswith("embeddings/")}
        self._counts.append({} if is_known else counts)

    def refuse_counted(self, num_running: int = 1) -> None:
        """Raise `ValueError` where a program has counted ids that are in no table.

        Args:
          num_running: the last programs, which may be at work still and are not waited for.
        """
        while self._lookup is not None and len(self._counts) > num_running:
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
