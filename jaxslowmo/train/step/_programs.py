"""The compiled programs of a step, each made at its first use."""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import Phase, PyTree
from ...embedding import WithTables
from ...mesh import AnyMesh, VirtualMesh, laid_out, map_replicas
from ...precision import scale_metrics
from .._state import Layout, TrainState
from ._layouts import Layouts
from .update import GIVEN_ROLES, ROLES, Ahead, Given, GradientWindow, StepParts, TableParts

Parts = StepParts | TableParts
ReplicaFn = Callable[..., Any]
"""`(state, given)` of one replica."""
_GROWING = "append"  # to windows, which with tables have more rows then
_ARGUMENTS = ("state", *Given._fields)
_NUMBERS = Ahead()  # nothing but row numbers is asked for ahead


class Task(NamedTuple):
    """What a program does, `(state, *given)` its arguments.

    Attributes:
      name: tells it from others of the step.
      fn: of the parts, the function of one replica.
      out_roles: of its results.
      donated: which argument it may reuse, where the step does so.
      windowed: whether there is a window.
      ahead: how much is done for the next batch.
      static: what else tells it apart.
    """

    name: str
    fn: Callable[[Any], ReplicaFn]
    out_roles: Any
    donated: str | None = None
    windowed: bool = False
    ahead: Ahead = _NUMBERS
    static: Hashable = None

    @property
    def in_roles(self) -> tuple[Any, ...]:
        """Of its arguments."""
        given = GIVEN_ROLES if self.windowed else GIVEN_ROLES._replace(window="shared")
        return "stacked", *given


def _telling(fn: ReplicaFn) -> ReplicaFn:
    """`fn`, `-> (state, metrics, carry)`, whose metrics tell of the loss scale, too."""

    def told(state: TrainState, given: Given) -> tuple[TrainState, Any, Any]:
        new, metrics, carry = fn(state, given)
        return new, {**metrics, **scale_metrics(state.opt_state, new.opt_state)}, carry

    return told


def _update(name: str, fn: Callable[[Any], ReplicaFn], **told: Any) -> Task:
    roles = "stacked", "stacked", "device"
    return Task(name, lambda parts: _telling(fn(parts)), roles, "state", **told)


def update(phase: Phase | None, *, windowed: bool, ahead: Ahead = _NUMBERS) -> Task:
    """Of `batch`, after those in a window: `-> (state, metrics, carry)`."""

    def fn(parts: Parts) -> ReplicaFn:
        return partial(parts.updated, phase=phase)

    return _update("update", fn, windowed=windowed, ahead=ahead, static=phase)


def update_of_window(phase: Phase | None, like: PyTree) -> Task:
    """Of `window`: `-> (state, metrics, None)`; `like` are types of a device's part of a batch."""

    def fn(parts: Parts) -> ReplicaFn:
        return lambda state, given: parts.of_window(state, given.window, like, phase)

    leaves, structure = jax.tree.flatten(like)
    static = phase, structure, tuple((x.shape, x.dtype) for x in leaves)
    return _update("of_window", fn, windowed=True, static=static)


def open_window(num_batches: int) -> Task:
    """For batches like `batch` and `weight`, so many: `-> window`, empty."""

    def fn(parts: Parts) -> ReplicaFn:
        return partial(parts.opened, num_batches=num_batches)

    return Task("open", fn, ROLES, static=num_batches)


def add_to_window(ahead: Ahead, *, fits: bool) -> Task:
    """`batch` into the room of `window`, or behind it: `-> (window, metrics, carry)`."""

    def fn(parts: Parts) -> ReplicaFn:
        return partial(parts.collected, fits=fits)

    roles = ROLES, "stacked", "device"
    return Task("collect" if fits else _GROWING, fn, roles, "window", True, ahead)


def evaluate() -> Task:
    """Of `batch` and `weight`: `-> metrics`."""
    return Task("evaluate", lambda parts: parts.evaluated, "stacked")


def ask(ahead: Ahead) -> Task:
    """For `batch`: `-> carry`."""

    def fn(parts: TableParts) -> ReplicaFn:
        return lambda state, given: parts.asked(state, given.batch)

    return Task("ask", fn, "device", ahead=ahead)


def anew() -> Task:
    """`-> carry`, with the rows of these tables."""

    def fn(parts: TableParts) -> ReplicaFn:
        return lambda state, given: parts.asked_anew(state, given.carry)

    return Task("anew", fn, "device")


class Programs:
    """Programs by what they do and how the state lies.

    Args:
      parts: of the step.
      mesh: of the step.
      layouts: of its states.
      donate: whether programs reuse the buffers of their arguments.
      warn: issues each message once.
    """

    def __init__(
        self,
        parts: StepParts,
        mesh: AnyMesh,
        layouts: Layouts,
        donate: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._parts, self._mesh, self._layouts = parts, mesh, layouts
        self.donate, self._warn = donate, warn
        self._made: dict[Hashable, Any] = {}

    def get(
        self,
        task: Task,
        layout: Layout,
        state: TrainState,
        given: Given,
        check: Callable[[TrainState], None] = lambda _: None,
    ) -> Any:
        """The compiled program of a task, made at its first use, after `check` of the state."""
        if self._parts.before_run is not None:
            self._parts.before_run()
        # Where the compiler chooses, it might place the new state unlike the old one, and the next
        # step would compile again. Inside of another program there is no next step.
        is_pinned = bool(layout.axes) and not isinstance(state.step, Tracer)
        which = task.name, task.windowed, task.ahead, task.static
        key = *which, layout.axes, layout.key, is_pinned
        if key not in self._made:
            check(state)
            mesh = self._mesh
            if isinstance(mesh, VirtualMesh) and len(mesh.shape) > 1:
                # vmap cannot tell that inner axes disagree; the types of a device mesh can.
                jax.eval_shape(self.build(task, layout, abstract(mesh)), state, *given)
            pinned = self._pinned(task, layout, state, given) if is_pinned else None
            self._made[key] = self.build(task, layout, mesh, pinned)
        return self._made[key]

    def build(
        self,
        task: Task,
        layout: Layout,
        mesh: AnyMesh | AbstractMesh,
        out_shardings: Any = None,
    ) -> Any:
        """A program that is not kept."""
        parts = self._parts_for(layout)
        runs = parts if parts.tables is None else TableParts(parts, parts.tables, task.ahead)
        fn = task.fn(runs)

        def per_replica(state: TrainState, *given: Any) -> Any:
            if layout.specs is not None:
                state = state._replace(params=laid_out(state.params, layout.specs))
            return fn(state, Given(*given))

        mapped = map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=self._parts.axis_name,
            in_roles=self._roles(task.in_roles),
            out_roles=self._roles(task.out_roles),
            automatic=layout.axes,
        )
        donated = task.donated if self.donate else None
        if parts.tables is not None and out_shardings is None and task.name == _GROWING:
            donated = None  # there is nothing that the rows fit into, of which jax would warn
        return jax.jit(
            mapped,
            donate_argnums=() if donated is None else _ARGUMENTS.index(donated),
            out_shardings=out_shardings,
        )

    def _roles(self, roles: Any) -> Any:
        """Roles outside of the axis of the tables, inside of which a device's own part is seen."""
        if self._parts.tables is None or self._parts.tables.nested is None:
            return roles
        return jax.tree.map(lambda role: "batch" if role == "device" else role, roles)

    def _pinned(self, task: Task, layout: Layout, state: TrainState, given: Given) -> Any:
        """Where the results lie, for leaves sharded inside a replica; None where that is open."""

        def places(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.sharding, tree)

        mesh, first = self._mesh, self._layouts.data_axes(layout)
        assert not isinstance(mesh, VirtualMesh), "leaves are sharded on devices alone"
        each = NamedSharding(mesh, P(first))
        if task.name in ("ask", "anew"):
            return each
        if task.name == "evaluate":
            return None
        if task.name in ("collect", _GROWING):
            return places(given.window), None, each
        if task.name == "open":
            params, specs = state.params, layout.specs
            if self._parts.tables is not None:
                assert specs is not None, "those of the tables are known"
                params, specs = params.dense, specs.dense
            totals = jax.tree.map(
                lambda _, spec: NamedSharding(mesh, P(first, *spec)), params, specs
            )
            return GradientWindow._make((totals, None, None, None, None, each, None, None))
        return places(state), None, each

    def _parts_for(self, layout: Layout) -> StepParts:
        """The parts, for parameters of a layout: without their specs, exchanges would gather them.

        Where nobody gave specs the layout of what the transform keeps in shards stays: it is part
        of the state, and of its checkpoints.
        """
        inner_axes = self._layouts.inner_axes(layout)
        loss = dataclasses.replace(self._parts.differentiation, inner_axes=inner_axes)
        specs, sync = layout.specs, self._parts.sync
        own = specs.dense if isinstance(specs, WithTables) else specs
        parts = dataclasses.replace(self._parts, differentiation=loss, param_specs=own)
        if sync is None or specs is None:
            return parts
        if sync.shards_whole_leaves and self._layouts.has_auto(layout):
            self._warn(
                f"`sync` keeps shards of the parameters and was given no `param_specs`, and leaves "
                f"are sharded over {sorted(layout.axes)} inside a replica: slow steps gather them "
                "first. Pass `param_specs`, one PartitionSpec per leaf, or shard_state=False."
            )
        return dataclasses.replace(parts, sync=sync.with_specs(specs))


def abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Axes of the same names and sizes for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )
