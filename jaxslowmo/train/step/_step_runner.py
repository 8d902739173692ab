"""Runs the programs of one training step, and knows of their results what needs no reading."""

import weakref
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer

from ..._support.checks import warn_once
from ..._support.types import Phase, PyTree
from ...embedding import Ahead, Carry
from ...mesh import AnyMesh, VirtualMesh, axis_names
from ...transform import ParameterTransform
from .._hyperparams import NumberPlaces, number_places, replace_numbers
from .._train_state import StateLayout, TrainState, refuse_raw_keys
from ..batches import Comparison, HostBatch, Placing, is_of_processes
from ._step_programs import (
    EVALUATE,
    Programs,
    Share,
    StepsInFlight,
    Task,
    add_to_window,
    arguments,
    open_window,
    update,
    update_of_window,
)
from ._step_states import (
    Layouts,
    check_shards,
    check_state,
    forget,
    refuse_donated,
    refuse_others,
    refuse_state_of_others,
    refuse_unusable_window,
)
from .update import Given, GradientWindow, Metrics, StepParts, WithResults


class Counted(NamedTuple):
    """What the counters of a state say.

    Attributes:
      updates: so far.
      skipped: those of them whose exchange did not take place, as `sync.phase` wants to know.
    """

    updates: int
    skipped: int


def counter_of(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    """Return the counter of the parameter transform, that of the steps without one."""
    return state.step if sync is None else state.opt_state[-1].count


def _of_one_replica(x: Any) -> Any:
    """A counter, equal on all replicas, as a NumPy scalar; other leaves as they are."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(local)[0]


class Room(NamedTuple):
    """How many batches more the rows of a window have room for.

    Attributes:
      num_batches: so many.
      share: what one device has of each of them.
    """

    num_batches: int
    share: Share | None


class HostCounts:
    """What counters hold, by the array that holds them.

    Reading one from the device waits for the step that computes it. Here each is read at most once,
    and the counters of later states follow from it. An entry belongs to one array and lives as
    long, so several states, in several threads too, do not take each other's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, array: Any) -> Any:
        """What belongs to `array`, None where it was neither read nor noted."""
        found = self._known.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def of(self, state: TrainState, sync: ParameterTransform | None) -> Counted:
        """Return the counts of a state; from the device where they are not known.

        Raises:
          ValueError: a traced state, whose counter has no value.
        """
        counter = counter_of(state, sync)
        if isinstance(counter, Tracer):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like: call it "
                'outside, or use mode="traced", whose one program decides by itself.'
            )
        known = self.get(counter)
        if known is None:
            skipped = 0
            if sync is not None and sync.skipped is not None:
                skipped = int(sync.skipped(jax.tree.map(_of_one_replica, state.opt_state[-1])))
            known = Counted(int(_of_one_replica(counter)), skipped)
            self.note(counter, known)
        return known

    def note(self, array: Any, value: Counted | Room) -> None:
        """Take note of what is known without reading it."""
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), value


Mode = Literal["traced", "host"]


class Runner:
    """Runs the programs of one training step; the step and what asks ahead of it share it.

    Attributes:
      parts: what the step is made of.
      mesh: the mesh it runs on.
      mode: `"traced"` or `"host"`.
      embeddings: the tables; None without.
      layouts: of these states.
      placing: puts batches on the devices.
      programs: what was compiled.
      in_flight: bounds the unfinished programs.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self.parts, self.mesh, self.mode = parts, mesh, mode
        self.embeddings, self._warn = parts.lookup.embeddings, warn_once()
        self.layouts = Layouts(mesh, parts.axis_name, parts.lookup, parts.sync)
        lookup = parts.lookup if parts.lookup.embeddings is not None else None
        compare = Comparison(mesh, host_batch) if is_of_processes(mesh) else None
        self.placing = Placing(mesh, parts.axis_name, host_batch, lookup, compare)
        self.programs = Programs(parts, mesh, donate, self._warn)
        self.in_flight = StepsInFlight()
        self._counts = HostCounts()
        self._is_counting = False  # nobody has asked for a phase
        self._numbers: NumberPlaces | None = None  # of its states, once there is one
        self._is_checked = False  # no state yet
        self._collected: Share | None = None  # of the last batch that went into a window
        self._mark = weakref.ref(self)

    def next_phase(self, state: TrainState) -> Phase:
        """The phase of the update that comes next, known on the host; `()` without a sync."""
        self.refuse(state)
        self._is_counting = True
        sync, so_far = self.parts.sync, self._counts.of(state, self.parts.sync)
        return () if sync is None else sync.phase(so_far.updates + 1, so_far.skipped)

    def place(
        self, state: TrainState | None, batch: PyTree, weight: Any = None, *, check_ids: bool = True
    ) -> tuple[PyTree, Any]:
        """A batch and its weight on the devices; see `TrainStep.place`."""
        layout = self.layouts.last if state is None else self.layouts.of(state)
        batch, weight = self.placing.compared(batch, weight, layout, check_ids=check_ids)
        if isinstance(self.mesh, VirtualMesh):
            batch = self.placing.copied(batch)
        return batch, weight

    def given(
        self, state: TrainState, batch: PyTree, weight: Any, window: GradientWindow | None
    ) -> Given:
        """A batch as programs take it, when it was looked at, and compared between processes."""
        self.refuse(state)
        batch, weight = self.placing.compared(batch, weight, self.layouts.of(state))
        if window is not None:
            self.refuse_window(window, state, weight)
        return Given(batch, weight, window)

    def update(
        self, state: TrainState, given: Given, ahead: Ahead | None = None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """One update of a batch, after those in a window."""
        task = update(self._phase(state), windowed=given.window is not None, ahead=ahead)
        return self._update(task, state, given)

    def apply(
        self, state: TrainState, window: GradientWindow | None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """One update of what a window holds."""
        self.refuse(state)
        self.refuse_window(window, state)
        if self._collected is None or window is None:
            raise ValueError("`window` must be one that `step.collect` of this step has returned.")
        task = update_of_window(self._phase(state), self._collected)
        return self._update(task, state, Given(window=window))

    def collect(
        self, state: TrainState, given: Given, num_batches: int, ahead: Ahead | None = None
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window, which begins here where there is none."""
        self.placing.refuse_counted()
        layout = self.layouts.of(state)
        given = self.dispatched(add_to_window(fits=True), layout, state, given)
        leaves, structure = jax.tree.flatten(self.placing.share(given.batch, layout))
        self._collected = share = structure, tuple(leaves)
        if given.window is not None:
            room = self._counts.get(given.window.count) or Room(0, None)
        else:
            room = Room(0 if self.embeddings is None else num_batches, share)
            first = Given(given.batch, given.weight)
            window = self.run(open_window(room.num_batches), layout, state, first)
            given = given._replace(window=window)
        fits = self.embeddings is None or (room.num_batches > 0 and room.share == share)
        task = add_to_window(ahead, fits=fits)
        window, metrics, carry = self.run(task, layout, state, given)
        if room.num_batches and not isinstance(window.count, Tracer):
            left = room._replace(num_batches=room.num_batches - 1) if fits else room
            self._counts.note(window.count, left)
        self.ran(given, metrics)
        return window, metrics, carry

    def run(self, task: Task, layout: StateLayout, state: TrainState, given: Given) -> Any:
        """What the program of a task returns."""
        program = self.program(task, layout, state, given)
        given = self.dispatched(task, layout, state, given)
        return program(state=state, **given._asdict())

    def dispatched(
        self, task: Task, layout: StateLayout, state: TrainState, given: Given, *, runs: bool = True
    ) -> Given:
        """What is given, with what a dispatched loss function has computed of the batch.

        Args:
          task: what the program does that is given it.
          layout: of the state.
          state: what the loss function needs of it.
          given: a batch that was placed; returned as it is where there is nothing to dispatch.
          runs: whether it is computed; False gives types.
        """
        loss = self.parts.differentiation.dispatched
        if loss is None or given.batch is None or isinstance(given.batch, WithResults):
            return given
        if isinstance(state.step, Tracer):
            raise ValueError(
                "A step whose `loss_fn` dispatches programs of its own, as a pipeline with "
                '`executor`="host" does, cannot be called inside of jax.jit, lax.scan and the '
                'like: call it outside, or make the pipeline with `executor`="one_program".'
            )
        differentiates, is_window = task is not EVALUATE, task.name in ("collect", "open")
        parts = loss.parts if differentiates else 1
        windowed = given.window is not None
        which = arguments(collects=is_window or windowed, windowed=windowed, parts=parts)
        state = state._replace(opt_state=())
        program = self.program(which, layout, state, given)
        program = program if runs else partial(jax.eval_shape, program)
        params, batch, keys, seen = program(state=state, **given._asdict())
        results = loss.loss_fn.dispatch(
            state.params if params is None else params,
            given.batch if batch is None else batch,
            rng=keys,
            model_state=seen,
            replicas=axis_names(self.parts.axis_name),
            inner_axes=layout.inner_axes,
            parts=parts,
            differentiates=differentiates,
        )
        return given._replace(batch=WithResults(given.batch, results))

    def compiled(
        self, state: TrainState, given: Given, ahead: Ahead | None = None
    ) -> jax.stages.Compiled:
        """The program of an update, compiled now if it was not; nothing runs."""
        refuse_others(state)
        layout = self.layouts.of(state)
        batch, weight = self.placing.placed(given.batch, given.weight, layout)
        upcoming, _ = self.placing.placed(given.upcoming, None, layout)
        given = given._replace(batch=batch, weight=weight, upcoming=upcoming)
        self._replace_numbers(state)
        task = update(self._phase(state), windowed=given.window is not None, ahead=ahead)
        program = self.program(task, layout, state, given)
        given = self.dispatched(task, layout, state, given, runs=False)
        return program.lower(state=state, **given._asdict()).compile()

    def program(self, task: Task, layout: StateLayout, state: TrainState, given: Given) -> Any:
        """The jitted program of a task, made at its first use."""
        if self.parts.raw_keys:
            refuse_raw_keys(state.model_state)
        return self.programs.get(task, layout, state, given, self.check)

    def check(self, state: TrainState) -> None:
        """Refuse what could not be seen before there was a state; asked once for every program."""
        refuse_others(state)
        parts, warn, is_first = self.parts, self._warn, not self._is_checked
        check_state(state, parts, self.mesh, self.mode, warn, is_first=is_first)
        self._is_checked = True
        # Parameters that repeat themselves have equal shards, too: what was made here is right.
        if parts.sync is not None and not self._made(state):
            check_shards(parts.sync.shards(state.opt_state[-1]))

    def ran(self, given: Given, metrics: Metrics) -> None:
        """Take note of a program that was started with a batch."""
        self.in_flight.admit(metrics["loss"])
        self.placing.ran(given.batch, metrics)

    def note(self, state: TrainState, layout: StateLayout) -> None:
        """Let a state that was made here know it, so that less of it is looked at again."""
        self.layouts.note(state, layout)
        state.made_by = self._mark

    def _update(
        self, task: Task, state: TrainState, given: Given
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run an update, and know of its result what is known without reading it."""
        self._replace_numbers(state)
        self.placing.refuse_counted()
        layout = self.layouts.of(state)
        so_far = None
        if self._is_counting:
            so_far = self._counts.get(counter_of(state, self.parts.sync))
        new_state, metrics, carry = self.run(task, layout, state, given)
        self.ran(given, metrics)
        self.note(new_state, layout)
        if given.window is not None and self.programs.donate:
            forget(given.window)
        if so_far is not None:  # count on, without asking the device
            counter = counter_of(new_state, self.parts.sync)
            self._counts.note(counter, so_far._replace(updates=so_far.updates + 1))
        return new_state, metrics, carry

    def _replace_numbers(self, state: TrainState) -> None:
        """Spread hyperparameters that were assigned as plain numbers over the replicas."""
        if self._numbers is None:
            has_any = optax.tree.get_all_with_path(state.opt_state, "hyperparams")
            self._numbers = number_places(state.opt_state) if has_any else []
        if self._numbers:
            replace_numbers(state.opt_state, self._numbers)

    def _phase(self, state: TrainState) -> Phase | None:
        """Of the program of the next update; None where one program does for all."""
        return self.next_phase(state) if self.mode == "host" else None

    def refuse(self, state: TrainState) -> None:
        """Raise `ValueError` for what is no state of this step, or one whose buffers are gone."""
        if self._made(state):
            refuse_donated(state)
            return
        refuse_others(state)
        refuse_donated(state)
        refuse_state_of_others(state, self.parts)

    def _made(self, state: TrainState) -> bool:
        return getattr(state, "made_by", None) is self._mark

    def refuse_window(self, window: Any, state: TrainState, weight: Any = ...) -> None:
        """Raise `ValueError` for what is no window of this state, or one that was used."""
        dense = state._replace(params=self.parts.lookup.dense(state.params))
        refuse_unusable_window(window, dense, weight)
