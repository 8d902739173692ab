"""The programs of a step, one jitted function for each task, phase and layout of the state.

The phases are those of a step's updates, which the host tells by the counters of its states.
"""

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ..._support.types import CompilerOptions, Phase, PyTree
from ...mesh import (
    AnyMesh,
    MapWith,
    Roles,
    axis_names,
    batch_roles,
    constrain_layout,
    map_replicas,
    placement,
)
from ...transform import ParameterTransform, phase_name
from ...tree import WeightedSum
from .._train_state import ReplicaState, TrainState
from ._gradients import INPUT_ROLES, WINDOW_ROLES, GradientWindow, Metrics, StepInputs
from ._update import Layout, Update, without_exchange

ShardTypes = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]
"""Structure and types of one device's part of a batch: a key, which a tree of types is not."""


class Task(NamedTuple):
    """The work of a program, whose arguments are a state and the fields of `StepInputs` by name.

    Attributes:
      method: the method of `Update` that a replica runs.
      results: name of the result: "state", "metrics", "carry", "window", "arguments", or a tuple.
      donated: the argument whose buffers the program may reuse, if the step donates.
      static: keyword arguments of the method, by name, on which the program depends.
    """

    method: str
    results: Any
    donated: str | None = None
    static: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def create(cls, method: str, results: Any, donated: str | None = None, **static: Any) -> Self:
        """Return a task; a keyword argument of None is left out."""
        used = tuple((name, value) for name, value in static.items() if value is not None)
        return cls(method, results, donated, used)


EVALUATE = Task("evaluate", "metrics")
"""The task of computing the metrics of a batch."""


def build(
    task: Task,
    update: Update,
    layout: Layout,
    mesh: AnyMesh | AbstractMesh,
    *,
    donates: bool,
    compiler_options: CompilerOptions,
    out_shardings: Any = None,
) -> Any:
    """Build `program(state, *inputs)`, where `inputs` is a `StepInputs`."""
    static = dict(task.static)
    if "like" in static:
        static["like"] = jax.tree.unflatten(*static["like"])

    def map_fn(
        fn: Callable[..., Any],
        in_roles: tuple[Roles, ...],
        out_roles: Roles,
        map_with: MapWith = "shard_map",
    ) -> Callable[..., Any]:
        def per_replica(state: Any, *inputs: Any) -> Any:
            if layout.specs is not None and isinstance(state, TrainState):
                state = state._replace(params=constrain_layout(state.params, layout.specs))
            return fn(state, *inputs)

        return map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=update.axis_name,
            in_roles=in_roles,
            out_roles=out_roles,
            automatic=layout.auto_axes.difference(layout.manual_inner_axes),
            map_with=map_with,
        )

    def per_replica(state: TrainState, *inputs: Any) -> Any:
        return getattr(update, task.method)(state, StepInputs(*inputs), **static)

    def program(
        state: TrainState,
        batch: Any = None,
        weight: Any = None,
        window: Any = None,
        carry: Any = None,
        upcoming: Any = None,
    ) -> Any:
        inputs = StepInputs(batch, weight, window, carry, upcoming)
        roles_of_batch = batch_roles(batch)
        roles = INPUT_ROLES._replace(batch=roles_of_batch, upcoming=batch_roles(upcoming))
        if window is None:
            roles = roles._replace(window="shared")
        if task.method in ("update", "scan"):
            return update.update_replicas(map_fn, mesh, state, inputs, roles, **static)
        # The batch of a dispatched loss function is a result only if it is cast.
        cast_roles = roles_of_batch if update.policy is not None else "batch"
        results = {
            "metrics": "stacked",
            "carry": "device",
            "window": WINDOW_ROLES,
            "arguments": ("stacked", cast_roles, "device", "device"),
        }
        state = without_exchange(state)
        out_roles = jax.tree.map(results.__getitem__, task.results)
        in_roles = (update.state_roles(state), *roles)
        return map_fn(per_replica, in_roles, out_roles, update.map_with)(state, *inputs)

    def scan_program(state: TrainState, batch: PyTree, weight: Any = None, *_: Any) -> Any:
        def one(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            return program(state, batch, weight)[:2]

        return lax.scan(one, state, batch)

    return jax.jit(
        scan_program if task.method == "scan" else program,
        donate_argnames=task.donated if donates and task.donated else (),
        out_shardings=out_shardings,
        compiler_options=dict(compiler_options),
    )


def result_shardings(
    task: Task,
    update: Update,
    layout: Layout,
    mesh: AnyMesh,
    state: TrainState,
    inputs: StepInputs,
) -> Any:
    """Return the shardings of the results of a task, with None where the compiler may choose.

    If the compiler chose the placement of the new state, it might differ from the old one, and the
    next step would compile again. `state` has the shardings of the step's states.
    """
    first = *axis_names(update.axis_name), *layout.manual_inner_axes
    each = placement(mesh, P(first))

    def window_shardings() -> Any:
        if inputs.window is not None:
            return jax.tree.map(lambda x: x.sharding, inputs.window)
        dense = update.dense(state.params)
        specs = update.dense(layout.specs)
        if specs is None:
            specs = jax.tree.map(lambda _: P(), dense)
        totals = jax.tree.map(lambda _, spec: placement(mesh, P(first, *spec)), dense, specs)
        none: Any = GradientWindow._make([None] * len(GradientWindow._fields))
        return none._replace(grads=WeightedSum(totals, each), rows=each)

    shardings = {"state": state, "carry": each}
    return jax.tree.map(
        lambda name: window_shardings() if name == "window" else shardings.get(name), task.results
    )


# The phases of updates.

Mode = Literal["traced", "host"]

_State = TypeVar("_State", TrainState, ReplicaState)
_Result = TypeVar("_Result")

_NUM_RECENT = 16  # arrays: one a state or window, of which few are in use at a time


class UpdateCounts(NamedTuple):
    """The counters of a state.

    Attributes:
      updates: number of updates so far.
      skipped: number of these whose exchange did not take place, an argument of `sync.phase`.
    """

    updates: int
    skipped: int


class RecentValues:
    """Facts that the host knows of the last few arrays on devices, such as a counter's value.

    Reading a counter from the device waits for the step that computes it. Here each is read at most
    once, and the counters of later states follow from it. An entry belongs to its array, so several
    states, also in several threads, do not get mixed up.
    """

    def __init__(self) -> None:
        self._entries: tuple[tuple[weakref.ref[Any], Any], ...] = ()

    def get(self, array: Any) -> Any:
        """Return the value of the array; None if none was set, or those of many others since."""
        for ref, value in self._entries:
            if ref() is array:
                return value
        return None

    def set(self, array: Any, value: Any) -> None:
        """Remember the value of the array."""
        self._entries = (weakref.ref(array), value), *self._entries[: _NUM_RECENT - 1]


class Phases:
    """The phases of a step's updates, by the counters of its states.

    Args:
      sync: the step's parameter transform; None: nothing is exchanged.
      mode: `"traced"`: programs decide which exchanges are due. `"host"`: each is of one phase.

    Attributes:
      sync: that transform, which the step replaces when it knows its parameters.
    """

    def __init__(self, sync: ParameterTransform | None, mode: Mode) -> None:
        self.sync, self._mode, self._counts = sync, mode, RecentValues()

    def at_update(self, t: int) -> Phase:
        """Return the phase of update t = 1, 2, ... if no exchange is skipped."""
        return () if self.sync is None else self.sync.phase(t)

    def next(self, state: TrainState | ReplicaState, later: int = 0) -> Phase:
        """Return the phase of an update that is `later` updates after the next one."""
        counts = self.update_counts(state)
        if self.sync is None:
            return ()
        return self.sync.algorithm.phase(counts.updates + 1 + later, counts.skipped)

    def program_phase(self, state: TrainState | ReplicaState, later: int = 0) -> Phase | None:
        """Return the phase for which an update's program is made; None if it decides itself."""
        return self.next(state, later) if self._mode == "host" else None

    def trace_by_phase(self, trace: Callable[[Phase | None], _Result]) -> dict[str | None, _Result]:
        """Return what a function returns of each program's phase, by the phase's name."""
        if self._mode == "traced":
            return {None: trace(None)}
        if self.sync is None:
            return {"every": trace(())}
        return {phase_name(phase): trace(phase) for phase in self.sync.phases()}

    def scan(
        self,
        state: _State,
        batches: PyTree,
        length: int,
        run: Callable[[Phase | None, _State, PyTree], tuple[_State, PyTree]],
    ) -> tuple[_State, PyTree]:
        """Run an update for each of several batches, those of one phase in a row by one program.

        Args:
          state: the state before the first update.
          batches: arrays with a first dimension of `length`.
          length: number of updates.
          run: `run(phase, state, batches)`: runs the program of several updates.

        Returns:
          The last state, and the results of `run`, concatenated along their first dimension.
        """
        phases, first = [self.program_phase(state, i) for i in range(length)], state
        outputs, start = [], 0
        for phase, same in itertools.groupby(phases):
            stop = start + len([*same])
            some = batches
            if stop - start < length:
                rows = partial(lax.slice_in_dim, start_index=start, limit_index=stop)
                some = jax.tree.map(rows, batches)  # no index is copied to the devices
            state, results = run(phase, state, some)
            outputs.append(results)
            start = stop
        self.advance(first, state, length)
        return state, outputs[0] if len(outputs) == 1 else _concatenate(outputs)

    def update_counts(self, state: TrainState | ReplicaState) -> UpdateCounts:
        """Return the counts of a state; read them from the device if they are unknown."""
        counter = state.step
        counts = self._counts.get(counter)
        if counts is not None:
            return counts
        if isinstance(counter, Tracer | jax.ShapeDtypeStruct):
            raise ValueError(
                '`next_phase` and a step with `mode`="host" read the counter in `state`, which has '
                'no value inside of jax.jit or as a shape: call it outside, or use mode="traced".'
            )
        updates, skipped = int(scalar_counter(counter)), 0
        if self.sync is not None:
            local = jax.tree.map(scalar_counter, state.exchange.local)
            skipped = int(self.sync.algorithm.skip_count(local, updates))
        counts = UpdateCounts(updates, skipped)
        self._counts.set(counter, counts)
        return counts

    def advance(self, old: _State, new: _State, updates: int = 1) -> None:
        """Count updates between two states on the host, if those before are known."""
        counts = self._counts.get(old.step)
        if counts is not None:
            self._counts.set(new.step, counts._replace(updates=counts.updates + updates))


@jax.jit
def _concatenate(results: list[PyTree]) -> PyTree:
    """Return the results of several runs of updates as one."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *results)


def scalar_counter(x: Any) -> Any:
    """Return a counter, equal on all replicas, as a NumPy scalar; other leaves unchanged."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(jax.device_get(local))[0]
