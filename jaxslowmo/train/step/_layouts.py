"""How the states that a step is given lie inside a replica, and over which axes its batches do."""

import jax
from jax.core import Tracer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
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
from ._usable import first_array


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
        self.last = self._with_stored(Layout(), None)
        self._data_axes: dict[frozenset[str], tuple[str, ...]] = {}
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
        if not axes:
            found = Layout()
        else:
            specs = inner_specs(state.params, self._mesh, self._axis_name)
            found = Layout(axes, specs, specs_key(specs))
        found = self._with_stored(found, state.params)
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

    def inner_axes(self, layout: Layout) -> tuple[str, ...]:
        """Axes inside a replica between whose devices the batch is split."""
        skip = {*axis_names(self._axis_name), *layout.axes}
        inner = tuple(a for a in self._mesh.axis_names if a not in skip)
        # The last one: parts along it are dealt out inside of those along the others.
        own = self._lookup.nested
        return inner if own is None else (*inner, own)

    def data_axes(self, layout: Layout) -> tuple[str, ...]:
        """All axes over which the batch is split, replicas first."""
        if layout.axes not in self._data_axes:  # asked for twice in every step
            names = *axis_names(self._axis_name), *self.inner_axes(layout)
            self._data_axes[layout.axes] = names
        return self._data_axes[layout.axes]

    def has_auto(self, layout: Layout) -> bool:
        """Whether leaves lie over Auto axes: of Explicit ones the types tell how."""
        if isinstance(self._mesh, VirtualMesh):
            return False
        types = dict(zip(self._mesh.axis_names, self._mesh.axis_types, strict=True))
        return any(types[axis] == AxisType.Auto for axis in layout.axes)

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

    def _with_stored(self, found: Layout, params: PyTree) -> Layout:
        """A layout in which stored parameters lie as they are made, however their arrays do."""
        lookup = self._lookup
        if lookup.nested is None:
            return found
        dense = P()
        if found.specs is not None:
            dense = lookup.dense(found.specs)
        elif params is not None:
            dense = jax.tree.map(lambda _: P(), lookup.dense(params))
        specs = lookup.joined(dense, lookup.specs)
        return Layout(found.axes | {lookup.nested}, specs, specs_key(specs))
