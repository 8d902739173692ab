"""Where states lie inside a replica, and where the programs of a step want batches and weights."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...embedding import Lookup
from ...mesh import (
    AnyMesh,
    VirtualMesh,
    axis_names,
    inner_specs,
    model_axes,
    specs_key,
    specs_over,
)
from ...transform import ParameterTransform
from ...tree import leaf_names
from .._state import KnownLayout, Layout, TrainState
from ..batches import (
    Comparison,
    HostBatch,
    as_arrays,
    lies_there,
    parts_given,
    placed_batch,
    placed_weight,
)
from ._state_checks import first_array


class Layouts:
    """The layout of one state after the other.

    Args:
      mesh: of the step.
      axis_name: the replica axis.
      lookup: of the step; how what is looked up lies is known.
      sync: its parameter transform.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name: AxisName,
        lookup: Lookup,
        sync: ParameterTransform | None = None,
    ) -> None:
        self._mesh, self._axis_name, self._lookup, self._sync = mesh, axis_name, lookup, sync
        self.last = self._layout(frozenset(), None, None)
        self._noted: KnownLayout | None = None  # of the last state that a program has returned

    def of(self, state: TrainState) -> Layout:
        """How parameters lie inside a replica; of a traced state, as those of the last one did.

        Raises:
          ValueError: optimizer or model state that is sharded over axes over which no parameter is.
        """
        known = getattr(state, "known_layout", None)
        if known is self._noted and known is not None:
            return known.layout
        if known is not None and known[:2] == (self._mesh, self._axis_name):
            self.last = known.layout
            return known.layout
        first = first_array(state.params)
        if isinstance(first, Tracer):  # does not tell where it will lie
            return self.last
        axes = model_axes(state.params, self._mesh, self._axis_name)
        specs = inner_specs(state.params, self._mesh, self._axis_name) if axes else None
        found = self._layout(axes, specs, state.params)
        self._refuse_beyond(found, state)
        if isinstance(first, jax.Array):
            self.last = found
        return found

    def note(self, state: TrainState, layout: Layout) -> None:
        """Let a state that a program has returned know how it lies.

        It lies where the old one did: on all mapped axes as the program says, else pinned.
        """
        if self._noted is None or self._noted.layout is not layout:
            shards = self._shards(layout)
            self._noted = KnownLayout(self._mesh, self._axis_name, layout, shards)
        state.known_layout = self._noted

    def _shards(self, layout: Layout) -> PyTree | None:
        """How `sync` cuts what it keeps in shards: by axes that the compiler handles alone."""
        if self._sync is None or not layout.axes or isinstance(self._mesh, VirtualMesh):
            return None
        if self._sync.shard_specs is not None:
            return specs_over(self._sync.shard_specs, layout.axes)
        # Of Explicit axes the types tell a transform that was given no specs.
        types = zip(self._mesh.axis_names, self._mesh.axis_types, strict=True)
        explicit = layout.axes & {name for name, kind in types if kind == AxisType.Explicit}
        return specs_over(layout.specs, explicit) if explicit else None

    def _refuse_beyond(self, layout: Layout, state: TrainState) -> None:
        """Raise `ValueError` for state that is sharded where parameters are not.

        A program holds it whole on all devices along those axes, and would return it so.
        """
        for part in ("opt_state", "model_state"):
            tree = getattr(state, part)
            beyond = sorted(model_axes(tree, self._mesh, self._axis_name) - layout.axes)
            if not beyond:
                continue
            leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
            name, leaf = next(
                (name, leaf)
                for name, leaf in leaves
                if model_axes(leaf, self._mesh, self._axis_name) - layout.axes
            )
            raise ValueError(
                f"`state`: `{part}` must not be sharded over axes inside a replica over which no "
                f"parameter is, got {name!r} as {leaf.sharding.spec} and no parameter over "
                f"{beyond}: a step would make it whole on every device. Shard parameters over "
                "these axes too (FSDP; state that mirrors them follows), or leave it whole. "
                "js.slowmo and js.diloco shard what they keep by themselves."
            )

    def _layout(self, axes: frozenset[str], specs: PyTree | None, params: PyTree) -> Layout:
        """A layout in which stored parameters lie as they are made, however their arrays do."""
        lookup, replicas = self._lookup, axis_names(self._axis_name)
        inner = tuple(
            a for a in self._mesh.axis_names if a not in {*replicas, *axes, lookup.nested}
        )
        if lookup.nested is not None:
            # The last one: parts along it are dealt out inside of those along the others.
            axes, inner = axes | {lookup.nested}, (*inner, lookup.nested)
            dense = P() if params is None else jax.tree.map(lambda _: P(), lookup.dense(params))
            dense = dense if specs is None else lookup.dense(specs)
            specs = lookup.joined(dense, lookup.specs)
        key = None if specs is None else specs_key(specs)
        return Layout(axes, specs, key, inner, (*replicas, *inner))


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
        self, batch: PyTree, weight: Any, layout: Layout, *, check_ids: bool = True
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

    def placed(self, batch: PyTree, weight: Any, layout: Layout) -> tuple[PyTree, jax.Array | None]:
        """A batch and its weight on the devices; shapes alone stay shapes."""
        return (
            placed_batch(batch, self._mesh, layout.data_axes, self._host_batch),
            placed_weight(weight, self._mesh, self._axis_name, self._host_batch),
        )

    def share(self, batch: PyTree, layout: Layout) -> PyTree:
        """Types of what one device has of a batch of arrays."""

        def share(x: Any) -> jax.ShapeDtypeStruct:
            rows = x.shape[0] // self._parts(x, layout)
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jnp.result_type(x))

        return jax.tree.map(share, batch)

    def _parts(self, x: Any, layout: Layout) -> int:
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
