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
from ...mesh import AnyMesh, VirtualMesh, map_replicas
from ...precision import scale_metrics
from .._state import Layout, TrainState
from ._layouts import Layouts
from .update import ROLES, Ahead, Carry, GradientWindow, StepParts, TableParts

# A function of one replica, bound to what is static in it.
ReplicaFn = Callable[..., Any]


Parts = StepParts | TableParts
_GROWING = ("collect", "gather_ahead")  # windows, which with tables have more rows each time


class Task(NamedTuple):
    """What a program does.

    Attributes:
      name: tells it from others of the step.
      fn: of the parts and the inner axes, the function of one replica.
      in_roles: of its arguments.
      out_roles: of its results.
      donated: which arguments it may reuse, where the step does so.
      static: what else tells it apart.
    """

    name: str
    fn: Callable[[Parts, tuple[str, ...]], ReplicaFn]
    in_roles: tuple[Any, ...]
    out_roles: Any
    donated: tuple[int, ...] = ()
    static: Hashable = None


def _telling(fn: ReplicaFn) -> ReplicaFn:
    """`fn`, `(state, ...) -> (state, metrics, ...)`, whose metrics tell of the loss scale, too."""

    def told(state: TrainState, *rest: PyTree) -> tuple[Any, ...]:
        new, metrics, *more = fn(state, *rest)
        return new, {**metrics, **scale_metrics(state.opt_state, new.opt_state)}, *more

    return told


def update(phase: Phase | None, *, windowed: bool) -> Task:
    """`(state, batch, weight, window) -> (state, metrics)`."""

    def fn(parts: Parts, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return _telling(partial(parts.per_replica, phase=phase, inner_axes=inner_axes))

    roles = ("stacked", "batch", "stacked", ROLES if windowed else "shared")
    return Task("update", fn, roles, ("stacked", "stacked"), (0,), (phase, windowed))


def update_of_window(phase: Phase | None, like: PyTree) -> Task:
    """`(state, window) -> (state, metrics)`; `like` are types of a device's part of a batch."""

    def fn(parts: Parts, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return _telling(partial(parts.of_window, like=like, phase=phase, inner_axes=inner_axes))

    leaves, structure = jax.tree.flatten(like)
    static = phase, structure, tuple((x.shape, x.dtype) for x in leaves)
    return Task("of_window", fn, ("stacked", ROLES), ("stacked", "stacked"), (0,), static)


def open_window() -> Task:
    """`(state, batch, weight) -> window`, empty."""

    def fn(parts: Parts, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return partial(parts.opened, inner_axes=inner_axes)

    return Task("open", fn, ("stacked", "batch", "stacked"), ROLES)


def collect() -> Task:
    """`(state, batch, weight, window) -> (window, metrics)`."""

    def fn(parts: Parts, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return partial(parts.collected, inner_axes=inner_axes)

    roles = ("stacked", "batch", "stacked", ROLES)
    return Task("collect", fn, roles, (ROLES, "stacked"), (3,))


def evaluate() -> Task:
    """`(state, batch, weight) -> metrics`."""

    def fn(parts: Parts, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return partial(parts.evaluated, inner_axes=inner_axes)

    return Task("evaluate", fn, ("stacked", "batch", "stacked"), "stacked")


def update_ahead(
    phase: Phase | None, ahead: Ahead, carry: Carry, upcoming: PyTree, *, windowed: bool
) -> Task:
    """`(state, batch, weight, window, carry, upcoming) -> (state, metrics, carry)`."""

    def fn(parts: Any, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return _telling(partial(parts.updated, ahead=ahead, phase=phase, inner_axes=inner_axes))

    window = ROLES if windowed else "shared"
    roles = ("stacked", "batch", "stacked", window, "device", "batch")
    static = phase, windowed, ahead, carry.vectors is None, upcoming is None
    return Task("update_ahead", fn, roles, ("stacked", "stacked", "device"), (0,), static)


def gather_ahead(ahead: Ahead, carry: Carry, upcoming: PyTree) -> Task:
    """`(state, batch, weight, window, carry, upcoming) -> (window, metrics, carry)`."""

    def fn(parts: Any, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return partial(parts.gathered, ahead=ahead, inner_axes=inner_axes)

    roles = ("stacked", "batch", "stacked", ROLES, "device", "batch")
    static = ahead, carry.vectors is None, upcoming is None
    return Task("gather_ahead", fn, roles, (ROLES, "stacked", "device"), (3,), static)


def ask(ahead: Ahead) -> Task:
    """`(state, batch) -> carry`."""

    def fn(parts: Any, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return partial(parts.asked, ahead=ahead)

    return Task("ask", fn, ("stacked", "batch"), "device", (), ahead)


def anew() -> Task:
    """`(state, carry) -> carry`, with the rows of these tables."""

    def fn(parts: Any, inner_axes: tuple[str, ...]) -> ReplicaFn:
        return parts.asked_anew

    return Task("anew", fn, ("stacked", "device"), "device")


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
        arguments: tuple[Any, ...],
        check: Callable[[TrainState], None] = lambda _: None,
    ) -> Any:
        """The compiled program of a task, made at its first use, after `check` of the state."""
        state = arguments[0]
        # Where the compiler chooses, it might place the new state unlike the old one, and the next
        # step would compile again. Inside of another program there is no next step.
        is_pinned = bool(layout.axes) and not isinstance(state.step, Tracer)
        key = (task.name, task.static, layout.axes, layout.key, is_pinned)
        if key not in self._made:
            check(state)
            mesh = self._mesh
            if isinstance(mesh, VirtualMesh) and len(mesh.shape) > 1:
                # vmap cannot tell that inner axes disagree; the types of a device mesh can.
                jax.eval_shape(self.build(task, layout, abstract(mesh)), *arguments)
            pinned = self._pinned(task, layout, arguments) if is_pinned else None
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
        runs = parts if parts.tables is None else TableParts(parts, parts.tables)
        mapped = map_replicas(
            task.fn(runs, self._layouts.inner_axes(layout)),
            mesh=mesh,
            axis_name=self._parts.axis_name,
            in_roles=self._roles(task.in_roles),
            out_roles=self._roles(task.out_roles),
            automatic=layout.axes,
        )
        donated = task.donated if self.donate else ()
        if parts.tables is not None and out_shardings is None and task.name in _GROWING:
            donated = ()  # there is nothing that the rows fit into, of which jax would warn
        return jax.jit(
            mapped,
            donate_argnums=donated,
            out_shardings=out_shardings,
        )

    def _roles(self, roles: Any) -> Any:
        """Roles outside of the axis of the tables, inside of which a device's own part is seen."""
        if self._parts.tables is None or self._parts.tables.nested is None:
            return roles
        return jax.tree.map(lambda role: "batch" if role == "device" else role, roles)

    def _pinned(self, task: Task, layout: Layout, arguments: tuple[Any, ...]) -> Any:
        """Where the results lie, for leaves sharded inside a replica; None where that is open."""

        def places(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.sharding, tree)

        state: TrainState = arguments[0]
        mesh, first = self._mesh, self._layouts.data_axes(layout)
        assert not isinstance(mesh, VirtualMesh), "leaves are sharded on devices alone"
        each = NamedSharding(mesh, P(first))
        if task.name in ("ask", "anew"):
            return each
        if task.name == "update_ahead":
            return places(state), None, each
        if task.name == "gather_ahead":
            return places(arguments[3]), None, each
        if task.name == "evaluate":
            return None
        if task.name == "collect":
            return places(arguments[-1]), None
        if task.name == "open":
            params, specs = state.params, layout.specs
            if self._parts.tables is not None:
                assert specs is not None, "those of the tables are known"
                params, specs = params.dense, specs.dense
            totals = jax.tree.map(
                lambda _, spec: NamedSharding(mesh, P(first, *spec)), params, specs
            )
            return GradientWindow._make((totals, None, None, None, None, each))
        return places(state), None

    def _parts_for(self, layout: Layout) -> StepParts:
        """The parts, for parameters of a layout: without their specs, exchanges would gather them.

        Where nobody gave specs the layout of what the transform keeps in shards stays: it is part
        of the state, and of its checkpoints.
        """
        sync = self._parts.sync
        if sync is None or layout.specs is None:
            return self._parts
        if sync.shards_whole_leaves and self._layouts.has_auto(layout):
            self._warn(
                f"`sync` keeps shards of the parameters and was given no `param_specs`, and leaves "
                f"are sharded over {sorted(layout.axes)} inside a replica: slow steps gather them "
                "first. Pass `param_specs`, one PartitionSpec per leaf, or shard_state=False."
            )
        return dataclasses.replace(self._parts, sync=sync.with_specs(layout.specs))


def abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Axes of the same names and sizes for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )
