"""Batches as processes give them and as the devices need them: checked, placed and compared.

A batch is a tree of arrays. Over the devices of a mesh its leading dimensions are split, and leaves
that all examples share are whole. Each process may give its part of a batch or all of it, so a
`BatchPlacer` also compares what they give.
"""

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..embedding import Embeddings
from ..mesh import (
    AnyMesh,
    Description,
    array_from_host,
    axis_names,
    describe,
    device_mesh,
    differences,
    digest,
    is_host_local,
    is_shared_leaf,
    name_processes,
    placement,
)
from ..tree import leaf_names
from ._process_comparison import Comparisons, Verdict, is_multi_process

HostBatch = Literal["local", "global"]

_MAX_DIFFERENCES = 3
_MAX_NAMED = 8  # leaves that an error message lists


# Shards of a dimension.


@functools.lru_cache(maxsize=64)
def addressable_shard_numbers(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shards of a dimension split over `axes` that devices of this process hold.

    Args:
      mesh: mesh of one process or of several.
      axes: names of mesh axes, outermost first.

    Returns:
      Shard numbers in 0 .. number of shards - 1, ascending. They need not be consecutive. Where
      devices differ along another axis, several processes hold the same shard.

    Communication: none.
    """
    count = _num_shards(mesh, axes)
    indices = placement(mesh, P(axes)).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({shard for index in indices if index for shard in range(count)[index[0]]}))


def _num_shards(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


# Arrays.


def as_arrays(batch: PyTree) -> PyTree:
    """Return the batch with arrays of other libraries, such as torch on CPU, as NumPy arrays."""

    def as_array(x: Any) -> Any:
        if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
            return x
        if isinstance(x, bool | int | float | complex):
            return jnp.asarray(x)  # as weakly typed as in a program of one device
        return x.__jax_array__() if hasattr(x, "__jax_array__") else np.asarray(x)

    return jax.tree.map(as_array, batch)


def array_from_shards(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """Return an array over all processes, built from the shards that each process holds.

    Args:
      x: NumPy or jax array (local shards * rows, ...): the rows of the shards that
        `addressable_shard_numbers` names, one after the other. Every shard has the same number of
        rows on every process. Processes that hold the same shard must pass the same values.
      mesh: mesh whose devices belong to several processes.
      axes: mesh axes over which the leading dimension is split.

    Communication: none.
    """
    local_shards = addressable_shard_numbers(mesh, axes)
    rows = x.shape[0] // len(local_shards)
    whole = rows * _num_shards(mesh, axes)
    x = _sliceable(x)

    def local_rows(index: Any) -> Any:
        begin = rows * local_shards.index(index[0].indices(whole)[0] // rows)
        return x[begin : begin + rows]

    shape = (whole, *x.shape[1:])
    return array_from_host(shape, NamedSharding(mesh, P(axes)), local_rows)


def _sliceable(x: Any) -> Any:
    """Return `x` such that slicing its rows runs no program over several devices."""
    if not isinstance(x, jax.Array) or len(x.devices()) == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.asarray(x)


@jax.jit
def stack(trees: list[PyTree]) -> PyTree:
    """Return trees of arrays on devices along a new first dimension."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def local_sum(count: Any) -> int:
    """Return the sum of a count, (replicas,), over the replicas of this process; wait for it.

    A traced count gives 0.
    """
    if isinstance(count, Tracer):
        return 0
    # Devices of one replica hold the same shard.
    shards = {str(shard.index): shard.data for shard in count.addressable_shards}
    return sum(int(np.sum(jax.device_get(shard))) for shard in shards.values())


# What is wrong with a batch.


def array_problem(batch: PyTree) -> str | None:
    """Return an error text if jax does not take a NumPy leaf of a batch; else None."""
    wrong = [_is_other_array(x) for x in jax.tree.leaves(batch)]
    if not any(wrong):  # names cost more than the rest
        return None
    at = wrong.index(True)
    name, dtype = leaf_names(batch)[at], jax.tree.leaves(batch)[at].dtype
    order = ": give it in the byte order of this machine" if dtype.kind in "iufc" else ""
    return f"`batch` must have leaves of numbers or bools, got {name!r} of dtype {dtype}{order}."


def _is_other_array(x: Any) -> bool:
    """Return whether `x` is an array of NumPy that jax does not take."""
    if not isinstance(x, np.ndarray):
        return False
    # bfloat16 and the like are of kind V, and numbers to jax alone.
    is_number = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_
    return not (is_number and x.dtype.isnative)


def container_problem(batch: PyTree) -> str | None:
    """Return an error text if a container's leaves cannot be split one by one; else None.

    A class of containers that is registered with jax may mean more by its leaves than that each
    counts examples: those of a sparse matrix count its elements, and its shape, which is no leaf,
    stays whole. Tuples, lists and mappings are taken by their leaves.
    """
    containers = list(_containers(batch))
    if not containers:
        return None
    outside = _sizes(
        jax.tree.map(lambda x: None if _is_container(x) else x, batch, is_leaf=_is_container)
    )
    for name, node in containers:
        what = f"`batch`: {name!r} is a {type(node).__name__}, "
        shapes = {np.shape(x) for x in jax.tree.leaves(node) if not is_shared_leaf(x)}
        if isinstance(shape := getattr(node, "shape", None), tuple):
            shapes.add(shape)
        if named := shapes & {*_static_tuples(jax.tree.structure(node))}:
            return f"{what}which keeps the shape {min(named)} beside its leaves. {_INSTEAD}"
        sizes = _sizes(node)
        if len(sizes) > 1 or (outside and not sizes <= outside):
            beside = f", beside leaves of {_format_sizes(outside)} in the batch" if outside else ""
            have = f"whose leaves have leading dimensions of {_format_sizes(sizes)}"
            return f"{what}{have}{beside}. {_INSTEAD}"
    return None


def _sizes(tree: PyTree) -> set[int]:
    """Return the leading dimensions of the leaves that are split."""
    return {np.shape(x)[0] for x in jax.tree.leaves(tree) if not is_shared_leaf(x)}


def _format_sizes(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


_INSTEAD = "Give arrays whose leading dimension counts examples, or `js.embedding.bags`."


def _is_container(x: Any) -> bool:
    is_plain = x is None or isinstance(x, dict | tuple | list | np.ndarray | jax.Array | Mapping)
    return not is_plain and not jax.tree_util.all_leaves([x])


def _containers(batch: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield name and container for each outermost container of a registered class."""
    if any(map(_is_container, jax.tree.leaves(batch, is_leaf=_is_container))):
        for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_container):
            if _is_container(x):
                yield jax.tree_util.keystr(path, simple=True, separator="/") or "(root)", x


def _static_tuples(structure: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of integers in the static parts of a tree."""
    data = structure.node_data()
    pending = [] if data is None else [data[1]]
    while pending:
        x = pending.pop()
        if isinstance(x, dict):
            pending.extend(x.values())
        elif isinstance(x, tuple | list):
            if x and all(isinstance(n, int | np.integer) for n in x):
                yield tuple(map(int, x))
            pending.extend(x)
    for child in structure.children():
        yield from _static_tuples(child)


def _in_lists_of_numbers(batch: PyTree) -> list[bool]:
    """Return for each leaf whether a list holds it in which all elements are numbers."""

    def is_list_of_numbers(x: Any) -> bool:
        is_flat = isinstance(x, list) and len(x) > 1 and jax.tree_util.all_leaves(x)
        return is_flat and not any(map(np.ndim, x))

    nodes = jax.tree.leaves(batch, is_leaf=is_list_of_numbers)
    return [is_list_of_numbers(x) for x in nodes for _ in jax.tree.leaves(x)]


# Placing.


def type_and_sharding(x: Any) -> Any:
    """Return type and placement of an array on devices; None for other values."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return (x.aval, x.sharding) if is_array else None


def _is_sharded_like(x: Any, target: NamedSharding) -> bool:
    """Return whether the leading dimension of `x` is split over at least the axes of `target`."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != target.mesh:
        return False
    axes, split = (axis_names((*s.spec, None)[0] or ()) for s in (target, sharding))
    return split[: len(axes)] == axes


def _ensure_sharding(x: Any, target: NamedSharding) -> Any:
    """Return `x` at its place; what lies there already stays the same array.

    For one device a traced value is left to its program, which may run on another.
    """
    if isinstance(x, Tracer) and target.mesh.size == 1:
        return x
    known = type_and_sharding(x)
    return x if known and known[1].is_equivalent_to(target, x.ndim) else jax.device_put(x, target)


class BatchPlacer:
    """The placement of a step's batches: checks them and puts them on the devices of the mesh.

    Methods take `axes`, the mesh axes over which a batch is split, outermost first.

    Args:
      mesh: mesh of the step.
      axis_name: name of the replica axis or axes.
      host_batch: whether host arrays hold this process' parts ("local") or the whole ("global").
      tables: the embedding tables, which check the ids of a batch; None for a step without tables.
    """

    def __init__(
        self, mesh: AnyMesh, axis_name: AxisName, host_batch: HostBatch, tables: Embeddings | None
    ) -> None:
        self._mesh, self._axis_name = mesh, axis_name
        self._host_batch: HostBatch = host_batch
        self._tables = tables
        self._checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # For each program that ran, its counts of ids that were not checked on the host.
        self._counts: deque[dict[str, Any]] = deque()
        # Batches that were compared between processes: their shapes and how many there were.
        self._seen: set[Any] = set()
        # For kinds of batches that were found to be right, where leaves that must move go, by
        # their number.
        self._known_kinds: dict[Any, dict[int, Any]] = {}
        self._is_multi_process = is_multi_process(mesh)
        self._num_calls = 0
        self._comparisons = Comparisons("batch")

    def check_and_place(
        self, batch: PyTree, weight: Any, axes: tuple[str, ...], *, check_ids: bool = True
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the placed batch and weight, after the processes have compared their batches.

        Raises:
          ValueError: what `place` raises; wrong ids in host arrays, unless `check_ids` is False;
            on every process: parts whose shapes do not fit together, or values that differ where
            they must be equal.

        Communication: none in one process, and for shapes that were compared before; else one
          message of each process to the coordinator, and one back.
        """
        if weight is not None or self._tables is not None:
            return self._check_and_place(batch, weight, axes, check_ids=check_ids)
        kind = self._batch_kind(batch, axes)
        if kind in self._known_kinds:
            return self._move_leaves(batch, self._known_kinds[kind]), None
        placed, _ = self._check_and_place(batch, None, axes, check_ids=check_ids)
        self._remember_kind(kind, batch, placed)
        return placed, None

    def _batch_kind(self, batch: PyTree, how: Any) -> Any:
        """Return the kind of a batch that is placed like `how`; each kind is checked once.

        None is no kind: with several processes each host array is looked at.
        """
        leaves, treedef = jax.tree.flatten(batch)
        types = tuple(map(self._leaf_type, leaves))
        return None if None in types else (how, treedef, types)

    def _move_leaves(self, batch: PyTree, targets: dict[int, Any]) -> PyTree:
        """Return the batch with those leaves moved whose numbers have a target."""
        if not targets:
            return batch
        leaves, treedef = jax.tree.flatten(batch)
        moved = jax.device_put([leaves[i] for i in targets], [*targets.values()])
        for i, x in zip(targets, moved, strict=True):
            leaves[i] = x
        return treedef.unflatten(leaves)

    def _remember_kind(self, kind: Any, batch: PyTree, placed: PyTree) -> None:
        """Remember which leaves of a right kind of batches move, and where to."""
        if kind is None:
            return
        pairs = enumerate(zip(*map(jax.tree.leaves, (batch, placed)), strict=True))
        self._known_kinds[kind] = {i: new.sharding for i, (old, new) in pairs if new is not old}

    def _leaf_type(self, x: Any) -> Any:
        """Return type and placement of a leaf; None if each batch with it must be looked at."""
        if self._is_multi_process and is_host_local(x):
            return None
        return (x.shape, x.dtype) if type(x) is np.ndarray else type_and_sharding(x)

    def _check_and_place(
        self, batch: PyTree, weight: Any, axes: tuple[str, ...], *, check_ids: bool
    ) -> tuple[PyTree, jax.Array | None]:
        batch = as_arrays(batch)
        if is_multi_process(self._mesh):
            self._compare(batch, axes, self._mesh)
        if self._tables is None or not check_ids:
            return self.place(batch, weight, axes)
        host, is_checked = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)], False
        if host:
            bags = self._tables.bags_of(batch)
            self._tables.check(bags, num_parts=self._num_local_shards(host[0], axes))
            # `inputs` may make some ids on devices, from arrays of the host.
            is_checked = all(isinstance(x.ids, np.ndarray) for x in bags.values())
        placed, weight = self.place(batch, weight, axes)
        self._record_checks(batch, placed, of_host=is_checked)
        return placed, weight

    def place(
        self, batch: PyTree, weight: Any, axes: tuple[str, ...]
    ) -> tuple[PyTree, jax.Array | None]:
        """Return a batch and its weight on the devices; keep arrays that are split there already.

        A `jax.ShapeDtypeStruct` stays one.

        Args:
          batch: tree of arrays, as `TrainStep` takes it.
          weight: one number per replica. In several processes a host array holds the weights of the
            replicas that have devices in this process with "local", those of all with "global".
          axes: mesh axes over which the batch is split.

        Raises:
          ValueError: a leading dimension that does not split evenly, all are listed; a weight of
            another shape, and in a host array one below 0 or not finite.

        Communication: host to device; none between replicas or processes.
        """
        batch = as_arrays(batch)
        if problem := self._problem(batch, axes):
            raise ValueError(problem)
        place = lambda x: self._place_leaf(x, axes if self._is_split(x, axes) else ())  # noqa: E731
        return jax.tree.map(place, batch), self._place_weight(weight)

    def place_batches(
        self, batches: PyTree, weight: Any, axes: tuple[str, ...]
    ) -> tuple[PyTree, jax.Array | None, int]:
        """Return several batches, stacked along a first dimension, and a weight, on the devices.

        Returns:
          The batches, the weight, and the number of batches.

        Raises:
          ValueError: leaves of different numbers of batches, or of none; an error of
            `check_and_place`.

        Communication: as of `check_and_place` for each batch of the host with several processes.
        """
        kind = self._batch_kind(batches, ("several", axes))
        if kind in self._known_kinds:
            placed = self._move_leaves(batches, self._known_kinds[kind])
            length = jax.tree.leaves(placed)[0].shape[0]
            return placed, self._place_weight(weight), length
        unplaced, batches = batches, as_arrays(batches)
        counts = {x.shape[:1] for x in jax.tree.leaves(batches)}
        if len(counts) != 1 or counts & {(), (0,)}:
            raise ValueError(
                "`batches` must have the same first dimension on every leaf, the number of "
                f"updates, got {sorted(counts) or 'no leaf'}."
            )
        ((length,),) = counts
        if is_multi_process(self._mesh) and any(map(is_host_local, jax.tree.leaves(batches))):
            each_placed = [
                self.check_and_place(jax.tree.map(lambda x, i=i: x[i], batches), None, axes)[0]
                for i in range(length)
            ]
            return stack(each_placed), self._place_weight(weight), length
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        if problem := self._problem(one, axes):
            shapes = ", ".join(str(x.shape) for x in jax.tree.leaves(batches)[:_MAX_NAMED])
            raise ValueError(
                "`batches` must have a first dimension, the number of updates, got shapes "
                f"{shapes}, of which each of {length} updates would take one row: {problem}"
            )

        def place(x: Any, one: Any) -> Any:
            spec = P(None, axes) if self._is_split(one, axes) else P()
            return _ensure_sharding(x, placement(self._mesh, spec))

        placed = jax.tree.map(place, batches, one)
        self._remember_kind(kind, unplaced, placed)
        return placed, self._place_weight(weight), length

    def shard_types(self, batch: PyTree, axes: tuple[str, ...], num_shards: int = 1) -> PyTree:
        """Return the shapes and dtypes of one device's part of a batch of arrays, or of more."""

        def shard_type(x: Any) -> jax.ShapeDtypeStruct:
            shape = x.shape
            if self._is_split(x, axes):
                shape = (shape[0] // self._num_local_shards(x, axes) * num_shards, *shape[1:])
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        return jax.tree.map(shard_type, batch)

    def record_counts(self, batch: PyTree, metrics: Mapping[str, Any]) -> None:
        """Keep a program's counts of wrong ids, unless all ids of its batch were checked before.

        `check_counts` reads the counts.
        """
        if self._tables is None:
            return
        is_checked = all(self._checked.get(id(x)) is x for x in jax.tree.leaves(batch))
        counts = {n: x for n, x in metrics.items() if n.startswith("embeddings/")}
        self._counts.append({} if is_checked else counts)

    def check_counts(self, num_running: int = 1) -> None:
        """Raise `ValueError` if a program counted ids that are in no table.

        Args:
          num_running: number of last programs to leave out, since they may still be running.
        """
        while self._tables is not None and len(self._counts) > num_running:
            counts = self._counts.popleft()
            self._tables.refuse({name: local_sum(x) for name, x in counts.items()})

    def _record_checks(self, batch: PyTree, placed: PyTree, *, of_host: bool) -> None:
        """Mark placed leaves as checked if their source was, or if it is NumPy and `of_host`."""
        for leaf, placed_leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
            was_checked = self._checked.get(id(leaf)) is leaf
            if was_checked or (of_host and isinstance(leaf, np.ndarray)):
                self._checked[id(placed_leaf)] = placed_leaf

    def _num_local_shards(self, x: Any, axes: tuple[str, ...]) -> int:
        """Return of how many shards `x` holds the rows: of all, or those of this process."""
        if self._host_batch == "local" and is_multi_process(self._mesh) and is_host_local(x):
            return len(addressable_shard_numbers(self._mesh, axes))
        return _num_shards(self._mesh, axes)

    def _is_split(self, x: Any, axes: tuple[str, ...]) -> bool:
        """Return whether a leaf can be split over `axes`; in an even batch others are shared."""
        shape, count = np.shape(x), self._num_local_shards(x, axes)
        return bool(shape) and shape[0] > 0 and count > 0 and shape[0] % count == 0

    def _problem(self, batch: PyTree, axes: tuple[str, ...]) -> str | None:
        """Return why a batch of arrays cannot be split over `axes`; None if it can."""
        problem = array_problem(batch) or container_problem(batch)
        return problem or self._split_problem(batch, axes)

    def _split_problem(self, batch: PyTree, axes: tuple[str, ...]) -> str | None:
        """Return a message that lists leaves that are neither split evenly nor shared, if any.

        One leaf at least must be split: a batch of one example is none for several devices.
        """
        leaves = jax.tree.leaves(batch)
        divides = [self._is_split(x, axes) for x in leaves]
        in_lists = _in_lists_of_numbers(batch)
        is_right = [
            splits or (is_shared_leaf(x) and not in_list)
            for splits, x, in_list in zip(divides, leaves, in_lists, strict=True)
        ]
        if all(is_right) and (any(divides) or not leaves):
            return None
        named = zip(leaf_names(batch), is_right, leaves, strict=True)
        wrong = [f"{name} {np.shape(x)}" for name, right, x in named if not right or all(is_right)]
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        if any(in_lists):
            more += "; lists of numbers are not arrays, np.asarray makes one"
        num_shards = _num_shards(self._mesh, axes)
        size = f"{num_shards}, the size of axes {axes} together"
        if any(self._num_local_shards(x, axes) != num_shards for x in leaves):
            num_local = len(addressable_shard_numbers(self._mesh, axes))
            size = f'{num_local}, this process\' share of {size} (`host_batch`="local")'
        return (
            f"`batch`: the leading dimension of every leaf must be a positive multiple of {size}, "
            f"or 1 where all examples share it, got {', '.join(wrong[:_MAX_NAMED])}{more}."
        )

    def _place_weight(self, weight: Any) -> jax.Array | None:
        if weight is None:
            return None
        axes = axis_names(self._axis_name)
        array = weight if isinstance(weight, jax.Array) else np.asarray(weight)
        if array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`weight` must hold one number per replica, got {weight!r}.")
        if isinstance(array, np.ndarray):
            array = array.astype(np.float32)
        count, replicas = self._num_local_shards(array, axes), _num_shards(self._mesh, axes)
        if array.shape != (count,):
            whose = "" if count == replicas else f" of this process, {count} of {replicas}"
            raise ValueError(
                f"`weight` must have shape ({count},), one number per replica{whose}, got "
                f"{array.shape}."
            )
        if isinstance(array, np.ndarray) and not np.all((array >= 0) & np.isfinite(array)):
            raise ValueError(f"`weight` must be >= 0 and finite, got {array.tolist()}.")
        return self._place_leaf(array, axes)

    def _place_leaf(self, x: Any, axes: tuple[str, ...]) -> Any:
        """Return `x` with its leading dimension split over `axes`, or whole if there are none."""
        target = placement(self._mesh, P(axes) if axes else P())
        if axes and _is_sharded_like(x, target):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
        # In several processes, `device_put` of a host array with such a sharding gathers it from
        # all processes to check that they agree: communication, and an error for different parts.
        mesh = device_mesh(self._mesh)
        if not mesh.is_multi_process or not is_host_local(x):
            return _ensure_sharding(x, target)
        if self._host_batch == "local" and axes:
            return array_from_shards(x, mesh, axes)
        x = _sliceable(x)
        return array_from_host(x.shape, target, x.__getitem__)

    # Comparison between processes.

    def _compare(self, batch: PyTree, axes: tuple[str, ...], mesh: Mesh) -> None:
        """Compare a batch of arrays with those of the other processes where its shapes are new."""
        leaves, treedef = jax.tree.flatten(batch)
        types = [(x.shape, x.dtype) for x in leaves if is_host_local(x)]
        self._num_calls += bool(types)  # arrays on devices were compared when placed
        if not types or (treedef, *types) in self._seen:
            return
        is_first = not self._seen
        self._seen.add((treedef, *types))
        self._comparisons.compare(
            self._make_note(batch, axes, with_values=is_first),
            mesh,
            judge=lambda notes: compare_notes({i: Note(*x) for i, x in notes.items()}),
            timeout_message=f"`batch`: in step {self._num_calls} {{who}} what it gives, so batches "
            "were not compared. If its shape is another one, this step's exchange hangs or fails: "
            "pad or drop the last batch, or see js.train.uneven_batches.",
        )

    def _make_note(self, batch: PyTree, axes: tuple[str, ...], *, with_values: bool) -> "Note":
        problem = self._problem(batch, axes)
        if problem:
            return Note(self._num_calls, problem, {}, {})
        whole = self.shard_types(batch, axes, _num_shards(self._mesh, axes))
        digests = self._digests(batch, axes) if with_values else {}
        return Note(self._num_calls, None, describe(whole), digests)

    def _digests(self, batch: PyTree, axes: tuple[str, ...]) -> dict[str, str]:
        arrays = [x for x in jax.tree.leaves(batch) if is_host_local(x)]
        is_whole = self._host_batch == "global"
        shards = ("whole",) if is_whole else addressable_shard_numbers(self._mesh, axes)
        split = [x for x in arrays if self._is_split(x, axes)]
        shared = [x for x in arrays if not self._is_split(x, axes)]

        def rows(x: Any, i: int) -> Any:
            size = x.shape[0] // len(shards)
            return x[i * size : (i + 1) * size]

        digests = {
            str(shard): digest([rows(x, i) for x in split]) for i, shard in enumerate(shards)
        }
        return digests | ({"shared": digest(shared)} if shared else {})


# What processes compare.


class Note(NamedTuple):
    """A description of one process' batch that it sends to the others.

    Attributes:
      call: number of the call with a batch in host arrays, from 1.
      problem: error message if the batch of this process is wrong by itself, else None.
      leaves: names, shapes and dtypes of the whole batch, as this process infers it.
      digests: at the first step only, checksums of the data: of each shard, by its number, and of
        what all examples share, "shared"; or "whole" if each process gives the whole batch.
    """

    call: int
    problem: str | None
    leaves: Description
    digests: dict[str, str]


# What processes must give alike, by the name of its digest; all others are shards.
_ALIKE = {
    "shared": "a leaf that all examples share, without a dimension or with a leading one of 1",
    "whole": 'the whole batch, which `host_batch`="global" takes from every process',
}
_SAME_SHARD = "the same part of the batch, over whose axes their devices do not differ"


def compare_notes(notes: Mapping[int, Note]) -> Verdict:
    """Return what is wrong with the batches that the notes of the processes describe."""
    for process, note in notes.items():
        if note.problem:
            return Verdict(f"process {process}: {note.problem}")
    calls = {process: note.call for process, note in notes.items()}
    if len(set(calls.values())) > 1:
        return Verdict(
            "`batch`: processes give a batch of another shape in different steps: "
            + ", ".join(f"process {process} in step {call}" for process, call in calls.items())
            + "."
        )
    differs = differences([note.leaves for note in notes.values()], list(notes))
    if differs:
        more = len(differs) - _MAX_DIFFERENCES
        return Verdict(
            "`batch`: what processes give does not make one batch; its shape would be "
            f"{'; '.join(differs[:_MAX_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}. "
            "Pad or drop the last batch, or see js.train.uneven_batches."
        )
    givers: dict[str, dict[str, list[int]]] = {}  # processes, by the shard and its digest
    by_data: dict[tuple[str, ...], list[int]] = {}
    for process, note in notes.items():
        for shard, value in note.digests.items():
            givers.setdefault(shard, {}).setdefault(value, []).append(process)
        by_data.setdefault(tuple(note.digests.values()), []).append(process)
    for shard, by_value in givers.items():
        if len(by_value) > 1:
            one, other, *_ = (processes[0] for processes in by_value.values())
            return Verdict(
                f"`batch`: processes {one} and {other} give different data for "
                f"{_ALIKE.get(shard, _SAME_SHARD)}."
            )
    for values, which in by_data.items():
        if values and len({tuple(notes[process].digests) for process in which}) > 1:
            return Verdict(
                warning=f"`batch`: {name_processes(which)} give the same data as different parts "
                'of the first batch: pass `host_batch`="global" where each loads the whole batch, '
                "or shard the data by jax.process_index(). Equal data of a test are no fault."
            )
    return Verdict()
