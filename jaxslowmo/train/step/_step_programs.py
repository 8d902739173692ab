"""The compiled programs of a step, each built at its first use, and a bound on those in flight."""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import Phase, PyTree
from ...embedding import Ahead
from ...gradients.precision import scale_metrics
from ...mesh import AnyMesh, VirtualMesh, laid_out, map_replicas, roles_of_batch
from .._train_state import StateLayout, TrainState
from .update import INPUT_ROLES, ROLES, GradientWindow, ReplicaStep, StepInputs, StepParts, joined

Share = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]
"""Structure and types of one device's part of a batch."""
_NUMBERS = Ahead()  # for the next batch, exchange row numbers only
# Role of each result, as `map_replicas` takes it.
_ROLES: Any = {
    "state": "stacked",
    "metrics": "stacked",
    "carry": "device",
    "window": ROLES,
}


class Task(NamedTuple):
    """The work of a program, whose arguments are a state and the fields of `StepInputs` by name.

    Attributes:
      name: unique among the tasks of the step.
      fn: `fn(replica_step, state, inputs)`, the work of one replica.
      results: name of the result: "state", "metrics", "carry", "window", "arguments", or a tuple.
      donated: the argument whose buffers the program may reuse, if the step donates.
      windowed: whether there is a window in the inputs.
      ahead: how much of the next batch's lookup the program does.
      static: other values on which the program depends.
    """

    name: str
    fn: Callable[[ReplicaStep, TrainState, StepInputs], Any]
    results: str | tuple[str, ...]
    donated: str | None = None
    windowed: bool = False
    ahead: Ahead = _NUMBERS
    static: Hashable = None

    @property
    def reads_optimizer(self) -> bool:
        """True if the state argument must hold the states of the transforms."""
        return self.results not in ("metrics", "carry", "arguments")


def _with_scale_metrics(
    fn: Callable[..., Any], step: ReplicaStep, state: TrainState, inputs: StepInputs, **static: Any
) -> tuple[TrainState, Any, Any]:
    """Run an update by `fn`, and add the metrics of the loss scale."""
    new, metrics, carry = fn(step, state, inputs, **static)
    return new, joined(metrics, scale_metrics(state.opt_state, new.opt_state)), carry


_UPDATED = "state", "metrics", "carry"


def update(phase: Phase | None, *, windowed: bool, ahead: Ahead | None = None) -> Task:
    """Return the task of an update with a batch, and with those in a window if there is one."""
    fn = partial(_with_scale_metrics, ReplicaStep.updated, phase=phase)
    return Task("update", fn, _UPDATED, "state", windowed, ahead or _NUMBERS, phase)


def update_of_window(phase: Phase | None, share: Share) -> Task:
    """Return the task of an update with a window alone; `share` describes its last batch."""

    def closed(step: ReplicaStep, state: TrainState, inputs: Any) -> Any:
        return step.of_window(state, inputs.window, jax.tree.unflatten(*share), phase)

    fn = partial(_with_scale_metrics, closed)
    return Task("of_window", fn, _UPDATED, "state", windowed=True, static=(phase, share))


def open_window(num_batches: int) -> Task:
    """Return the task of making an empty window with room for `num_batches` such batches."""
    fn = partial(ReplicaStep.opened, num_batches=num_batches)
    return Task("open", fn, "window", static=num_batches)


def add_to_window(ahead: Ahead | None = None, *, fits: bool) -> Task:
    """Return the task of adding a batch to a window, in its room if it `fits`, else after it."""
    fn = partial(ReplicaStep.collected, fits=fits)
    # jax warns of donated buffers that no result can reuse, as those of a window that grows.
    donated = "window" if fits else None
    results = "window", "metrics", "carry"
    return Task("collect", fn, results, donated, True, ahead or _NUMBERS, fits)


EVALUATE = Task("evaluate", ReplicaStep.evaluated, "metrics")
"""The task of computing the metrics of a batch."""


def request_rows(ahead: Ahead) -> Task:
    """Return the task of a lookup alone; with `StepInputs.carry`, of its rows in this state."""
    return Task("request_rows", ReplicaStep.lookup_ahead, "carry", ahead=ahead)


def arguments(*, collects: bool, windowed: bool, parts: int) -> Task:
    """Return the task of a dispatched loss function's arguments: `Differentiation.arguments`."""
    fn = partial(ReplicaStep.arguments, collects=collects, parts=parts)
    return Task("arguments", fn, "arguments", windowed=windowed, static=(collects, parts))


class Programs:
    """The programs of a step, one for each task and layout of the state.

    Args:
      parts: the parts of the step.
      mesh: the step's mesh.
      donate: whether programs reuse the buffers of their arguments.
      warn: a function that issues each message once.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, donate: bool, warn: Callable[[str], None]
    ) -> None:
        self._parts, self._mesh = parts, mesh
        self.donate, self._warn = donate, warn
        self._programs: dict[Hashable, Any] = {}

    def get(
        self,
        task: Task,
        layout: StateLayout,
        state: TrainState,
        inputs: StepInputs,
        check: Callable[[TrainState], None],
    ) -> Any:
        """Return the program of a task; at its first use, `check` the state and build it."""
        self._parts.program.before_run()
        if self._parts.compiler_options and _is_traced(state, inputs):
            raise ValueError(
                "A step with `compiler_options` cannot be called inside of jax.jit, lax.scan and "
                "the like, where jax takes none: call it outside, or make the step without them "
                "and pass them to your own jax.jit(compiler_options=...)."
            )
        # If the compiler chose the placement of the new state, it might differ from the old one,
        # and the next step would compile again. Inside of another program there is no next step.
        is_pinned = bool(layout.axes) and not isinstance(state.step, Tracer)
        which = task.name, task.windowed, task.ahead, task.static
        key = *which, layout.axes, layout.key, is_pinned
        if key not in self._programs:
            if task.reads_optimizer:
                check(state)
            pinned = self._pinned(task, layout, state, inputs) if is_pinned else None
            self._programs[key] = self.build(task, layout, self._mesh, pinned)
        return self._programs[key]

    def build(
        self,
        task: Task,
        layout: StateLayout,
        mesh: AnyMesh | AbstractMesh,
        out_shardings: Any = None,
    ) -> Any:
        """Build `program(state=, batch=, ...)`, which takes the fields of `StepInputs` by name."""
        step = ReplicaStep(self._parts_for(layout), task.ahead)

        def per_replica(state: TrainState, *inputs: Any) -> Any:
            if layout.specs is not None:
                state = state._replace(params=laid_out(state.params, layout.specs))
            return task.fn(step, state, StepInputs(*inputs))

        input_roles = INPUT_ROLES if task.windowed else INPUT_ROLES._replace(window="shared")
        dispatched = self._parts.differentiation.dispatched

        def program(*, state: TrainState, **inputs: Any) -> Any:
            given = StepInputs(**inputs)
            batch, upcoming = roles_of_batch(given.batch), roles_of_batch(given.upcoming)
            roles = input_roles._replace(batch=batch, upcoming=upcoming)
            # The batch of a dispatched loss function is a result only if it is cast.
            seen = batch if dispatched is not None and dispatched.is_cast else "batch"
            results = _ROLES | {"arguments": ("stacked", seen, "device", "device")}
            mapped = map_replicas(
                per_replica,
                mesh=mesh,
                axis_name=self._parts.axis_name,
                in_roles=self._roles(("stacked", *roles)),
                out_roles=self._roles(jax.tree.map(results.__getitem__, task.results)),
                automatic=layout.axes,
            )
            return mapped(state, *given)

        donated = task.donated if self.donate and task.donated else ()
        return jax.jit(
            program,
            donate_argnames=donated,
            out_shardings=out_shardings,
            compiler_options=dict(self._parts.compiler_options),
        )

    def _roles(self, roles: Any) -> Any:
        """Return the roles for `map_replicas`, which leaves the axis of tables to a nested map."""
        if self._parts.lookup.nested is None:
            return roles
        return jax.tree.map(lambda role: "batch" if role == "device" else role, roles)

    def _pinned(
        self, task: Task, layout: StateLayout, state: TrainState, inputs: StepInputs
    ) -> Any:
        """Return the shardings of the results, with None where the compiler may choose."""

        def places(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.sharding, tree)

        mesh, first = self._mesh, layout.data_axes
        assert not isinstance(mesh, VirtualMesh), "leaves are sharded on devices alone"
        each = NamedSharding(mesh, P(first))

        def of_window() -> Any:
            if inputs.window is not None:
                return places(inputs.window)
            dense = self._parts.lookup.dense
            totals = jax.tree.map(
                lambda _, spec: NamedSharding(mesh, P(first, *spec)),
                dense(state.params),
                dense(layout.specs),
            )
            return GradientWindow._make((totals, None, None, None, None, each, None, None))

        shardings: dict[str, Callable[[], Any]] = {
            "state": lambda: places(state),
            "metrics": lambda: None,
            "carry": lambda: each,
            "arguments": lambda: None,
            "window": of_window,
        }
        return jax.tree.map(lambda result: shardings[result](), task.results)

    def _parts_for(self, layout: StateLayout) -> StepParts:
        """Return the parts with the specs of a layout, else exchanges gather sharded parameters.

        A `sync` that was made without specs keeps the layout of its own sharded state, which is
        part of checkpoints.
        """
        differentiation = self._parts.differentiation
        loss = dataclasses.replace(differentiation, inner_axes=layout.inner_axes)
        specs, sync = layout.specs, self._parts.sync
        dense_specs = self._parts.lookup.dense(specs)
        parts = dataclasses.replace(self._parts, differentiation=loss, param_specs=dense_specs)
        if sync is None or specs is None:
            return parts
        if sync.shards_whole_leaves and _has_auto(self._mesh, layout.axes):
            self._warn(
                f"`sync` keeps shards of the parameters and was given no `param_specs`, and leaves "
                f"are sharded over {sorted(layout.axes)} inside a replica: slow steps gather them "
                "first. Pass `param_specs`, one PartitionSpec per leaf, or shard_state=False."
            )
        return dataclasses.replace(parts, sync=sync.with_specs(specs))


def _is_traced(state: TrainState, inputs: StepInputs) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((state.step, inputs.batch)))


def _has_auto(mesh: AnyMesh, axes: frozenset[str]) -> bool:
    """Return whether one of the axes is Auto; shardings over Explicit axes are in the types."""
    if isinstance(mesh, VirtualMesh):
        return False
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(types[axis] == AxisType.Auto for axis in axes)


def abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Return a mesh with the same axes, for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )
