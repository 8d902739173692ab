"""The compiled programs of a step, each made at its first use, and how many run at once."""

import dataclasses
import functools
import types
from collections import deque
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
from ...mesh import AnyMesh, VirtualMesh, laid_out, map_replicas
from .._train_state import StateLayout, TrainState
from .update import GIVEN_ROLES, ROLES, Given, GradientWindow, ReplicaStep, StepParts

Share = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]
"""Structure and types of what one device has of a batch."""
_NUMBERS = Ahead()  # nothing but row numbers is asked for ahead
# How results relate to the replicas, as `map_replicas` wants to know.
_ROLES: Any = {
    "state": "stacked",
    "metrics": "stacked",
    "carry": "device",
    "window": ROLES,
    "arguments": ("stacked", "batch", "device", "device"),
}


class Task(NamedTuple):
    """What a program does, given a state and, by their names, the fields of `Given`.

    Attributes:
      name: tells it from others of the step.
      fn: `fn(replica_step, state, given)` of one replica.
      results: what it returns: "state", "metrics", "carry", "window", or a tuple of these.
      donated: the argument whose buffers it may reuse, where the step does so.
      windowed: whether there is a window.
      ahead: how much is done for the next batch.
      static: what else tells it apart.
    """

    name: str
    fn: Callable[[ReplicaStep, TrainState, Given], Any]
    results: str | tuple[str, ...]
    donated: str | None = None
    windowed: bool = False
    ahead: Ahead = _NUMBERS
    static: Hashable = None

    @property
    def reads_optimizer(self) -> bool:
        """Whether it is given the states of the transforms."""
        return self.results not in ("metrics", "carry", "arguments")


def _telling(
    fn: Callable[..., Any], step: ReplicaStep, state: TrainState, given: Given, **static: Any
) -> tuple[TrainState, Any, Any]:
    """An update by `fn`, whose metrics tell of the loss scale, too."""
    new, metrics, carry = fn(step, state, given, **static)
    return new, {**metrics, **scale_metrics(state.opt_state, new.opt_state)}, carry


_UPDATED = "state", "metrics", "carry"


def update(phase: Phase | None, *, windowed: bool, ahead: Ahead | None = None) -> Task:
    """An update of a batch, after those in a window."""
    fn = partial(_telling, ReplicaStep.updated, phase=phase)
    return Task("update", fn, _UPDATED, "state", windowed, ahead or _NUMBERS, phase)


def update_of_window(phase: Phase | None, share: Share) -> Task:
    """An update of a window alone; `share` is what a device had of each batch."""

    def closed(step: ReplicaStep, state: TrainState, given: Any) -> Any:
        return step.of_window(state, given.window, jax.tree.unflatten(*share), phase)

    fn = partial(_telling, closed)
    return Task("of_window", fn, _UPDATED, "state", windowed=True, static=(phase, share))


def open_window(num_batches: int) -> Task:
    """An empty window for so many batches like the one that is given."""
    fn = partial(ReplicaStep.opened, num_batches=num_batches)
    return Task("open", fn, "window", static=num_batches)


def add_to_window(ahead: Ahead | None = None, *, fits: bool) -> Task:
    """A batch more in a window, in the room that it has or behind it."""
    fn = partial(ReplicaStep.collected, fits=fits)
    # Nothing of a window that grows has the size of the new one, of which jax would warn.
    donated = "window" if fits else None
    results = "window", "metrics", "carry"
    return Task("collect", fn, results, donated, True, ahead or _NUMBERS, fits)


EVALUATE = Task("evaluate", ReplicaStep.evaluated, "metrics")
"""The metrics of a batch."""


def ask(ahead: Ahead) -> Task:
    """What a batch asks for; with `Given.carry` rows alone, as this state has them."""
    return Task("ask", ReplicaStep.asked, "carry", ahead=ahead)


def arguments(*, collects: bool, windowed: bool, parts: int) -> Task:
    """What a dispatched loss function is given; see `Differentiation.arguments`."""
    fn = partial(ReplicaStep.arguments, collects=collects, parts=parts)
    return Task("arguments", fn, "arguments", windowed=windowed, static=(collects, parts))


class Programs:
    """Programs by what they do and how the state lies.

    Args:
      parts: of the step.
      mesh: of the step.
      donate: whether programs reuse the buffers of their arguments.
      warn: issues each message once.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, donate: bool, warn: Callable[[str], None]
    ) -> None:
        self._parts, self._mesh = parts, mesh
        self.donate, self._warn = donate, warn
        self._made: dict[Hashable, Any] = {}

    def get(
        self,
        task: Task,
        layout: StateLayout,
        state: TrainState,
        given: Given,
        check: Callable[[TrainState], None],
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
            if task.reads_optimizer:
                check(state)
            mesh = self._mesh
            if isinstance(mesh, VirtualMesh) and len(mesh.shape) > 1:
                # vmap cannot tell that inner axes disagree; the types of a device mesh can.
                program = self.build(task, layout, abstract(mesh))
                jax.eval_shape(program, state=state, **given._asdict())
            pinned = self._pinned(task, layout, state, given) if is_pinned else None
            self._made[key] = self.build(task, layout, mesh, pinned)
        return self._made[key]

    def build(
        self,
        task: Task,
        layout: StateLayout,
        mesh: AnyMesh | AbstractMesh,
        out_shardings: Any = None,
    ) -> Any:
        """A program that is not kept: `program(state=, batch=, ...)`, of the fields of `Given`."""
        step = ReplicaStep(self._parts_for(layout), task.ahead)

        def per_replica(state: TrainState, *given: Any) -> Any:
            if layout.specs is not None:
                state = state._replace(params=laid_out(state.params, layout.specs))
            return task.fn(step, state, Given(*given))

        given_roles = GIVEN_ROLES if task.windowed else GIVEN_ROLES._replace(window="shared")
        mapped = map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=self._parts.axis_name,
            in_roles=self._roles(("stacked", *given_roles)),
            out_roles=self._roles(jax.tree.map(_ROLES.__getitem__, task.results)),
            automatic=layout.axes,
        )

        def program(*, state: TrainState, **given: Any) -> Any:
            return mapped(state, *Given(**given))

        donated = task.donated if self.donate and task.donated else ()
        return jax.jit(program, donate_argnames=donated, out_shardings=out_shardings)

    def _roles(self, roles: Any) -> Any:
        """Roles outside of the axis that is bound around what is looked up."""
        if self._parts.lookup.nested is None:
            return roles
        return jax.tree.map(lambda role: "batch" if role == "device" else role, roles)

    def _pinned(self, task: Task, layout: StateLayout, state: TrainState, given: Given) -> Any:
        """Where the results lie, for leaves sharded inside a replica; None where that is open."""

        def places(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.sharding, tree)

        mesh, first = self._mesh, layout.data_axes
        assert not isinstance(mesh, VirtualMesh), "leaves are sharded on devices alone"
        each = NamedSharding(mesh, P(first))

        def of_window() -> Any:
            if given.window is not None:
                return places(given.window)
            dense = self._parts.lookup.dense
            totals = jax.tree.map(
                lambda _, spec: NamedSharding(mesh, P(first, *spec)),
                dense(state.params),
                dense(layout.specs),
            )
            return GradientWindow._make((totals, None, None, None, None, each, None, None))

        lies: dict[str, Callable[[], Any]] = {
            "state": lambda: places(state),
            "metrics": lambda: None,
            "carry": lambda: each,
            "arguments": lambda: None,
            "window": of_window,
        }
        return jax.tree.map(lambda result: lies[result](), task.results)

    def _parts_for(self, layout: StateLayout) -> StepParts:
        """The parts, for parameters of a layout: without their specs, exchanges would gather them.

        Where nobody gave specs the layout of what the transform keeps in shards stays: it is part
        of the state, and of its checkpoints.
        """
        differentiation = self._parts.differentiation
        loss = dataclasses.replace(differentiation, inner_axes=layout.inner_axes)
        specs, sync = layout.specs, self._parts.sync
        own = self._parts.lookup.dense(specs)
        parts = dataclasses.replace(self._parts, differentiation=loss, param_specs=own)
        if sync is None or specs is None:
            return parts
        if sync.shards_whole_leaves and _has_auto(self._mesh, layout.axes):
            self._warn(
                f"`sync` keeps shards of the parameters and was given no `param_specs`, and leaves "
                f"are sharded over {sorted(layout.axes)} inside a replica: slow steps gather them "
                "first. Pass `param_specs`, one PartitionSpec per leaf, or shard_state=False."
            )
        return dataclasses.replace(parts, sync=sync.with_specs(specs))


def _has_auto(mesh: AnyMesh, axes: frozenset[str]) -> bool:
    """Whether leaves lie over Auto axes: of Explicit ones the types tell how."""
    if isinstance(mesh, VirtualMesh):
        return False
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(types[axis] == AxisType.Auto for axis in axes)


def abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Axes of the same names and sizes for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )


# The CPU client admits 32 unfinished programs per device and makes the launch of one more wait in
# the pool of threads that must run the others. With several devices in a process a program that
# exchanges something then lacks a thread for one of them, and all wait for ever (jax 0.10.2, 4
# devices on 2 cores: one run of 200 small steps in about 30; in a loop of one's own, which gives
# the host less to do, most runs of 400).
MAX_STEPS = 8


class StepsInFlight:
    """Results of steps that were started and may not have ended, oldest first."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()
        self._is_on_cpu: bool | None = None  # not known before the first

    def admit(self, result: jax.Array) -> None:
        """Take note of a started step; on CPU, wait until at most `MAX_STEPS` are unfinished.

        Args:
          result: an array of the step that nothing will donate.

        Communication: none.
        """
        if self._is_on_cpu is False or isinstance(result, Tracer):
            return
        if self._is_on_cpu is None:
            self._is_on_cpu = bool(_on_cpu(result))
            self.admit(result)
            return
        self._results.append(result)
        if len(self._results) > MAX_STEPS:
            jax.block_until_ready(self._results.popleft())


def bounded(step: Callable[..., Any]) -> "BoundedStep":
    """A step for a loop of your own, of which few are unfinished at once on CPU devices.

    jax starts a step and returns before it has ended, so a loop that reads no result runs ahead of
    its devices. On TPU and GPU that keeps them busy. Several CPU devices of one process share its
    threads: where too many unfinished steps wait for one, none is left for an exchange between the
    devices, and the process hangs until XLA aborts it after 40 s. Here every eighth call on CPU
    waits for its own results, which no later call can have donated yet:

        step = js.bounded(jax.jit(device_step, donate_argnums=0))
        for batch in batches:
            state = step(state, batch)

    A step of `js.make_train_step` bounds itself.

    Args:
      step: a function that returns at least one array, made by `jax.jit`, `jax.pmap` or the like.

    Returns:
      A function that is called as `step` is and has its attributes (`lower`, `trace`, ...), so
      `js.comm_report` and `js.measured` take it. On other devices, and inside of a trace, it only
      calls `step`.

    Raises:
      ValueError: `step` cannot be called.

    Communication: the step's.
    """
    return BoundedStep(step)


class BoundedStep:
    """A step that waits for every eighth of its results on CPU; made by `bounded`."""

    def __init__(self, step: Callable[..., Any]) -> None:
        if not callable(step):
            raise ValueError(f"bounded: `step` must be a function, got {type(step).__name__}.")
        self._step: Any = step
        self._unfinished = 0
        functools.update_wrapper(self, step, updated=())

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """As a method: functions that are decorated in a class are given the object."""
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step; on CPU at most `MAX_STEPS` are unfinished when it returns."""
        results = self._step(*args, **kwargs)
        arrays = _on_cpu(results)
        if arrays:
            self._unfinished += 1
            if self._unfinished == MAX_STEPS:
                jax.block_until_ready(arrays)
                self._unfinished = 0
        return results


def _on_cpu(results: PyTree) -> list[jax.Array]:
    """Arrays that a step left on CPU devices; none while it is traced.

    The first array tells for all: a program runs on devices of one kind.
    """
    found = []
    for x in jax.tree.leaves(results):
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_deleted():
            continue
        if not found and next(iter(x.devices())).platform != "cpu":
            return []
        found.append(x)
    return found
