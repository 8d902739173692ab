"""The runner of a training step's programs, and counters of states that need no device read."""

import weakref
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.core import Tracer

from ..._support.checks import warn_once
from ..._support.types import Phase, PyTree
from ...embedding import Ahead, Carry
from ...mesh import AnyMesh, VirtualMesh, axis_names
from ...transform import ParameterTransform
from .._batches import HostBatch, Placing
from .._hyperparams import NumberPlaces, number_places, replace_numbers
from .._train_state import StateLayout, TrainState
from ._beside_steps import BesideSteps
from ._in_flight import StepsInFlight
from ._step_programs import (
    EVALUATE,
    Programs,
    Share,
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
    of_one_replica,
    refuse_donated,
    refuse_non_state,
    refuse_state_of_another_step,
    refuse_unusable_window,
)
from .update import GradientWindow, Metrics, StepInputs, StepParts, WithResults


class UpdateCounts(NamedTuple):
    """The counters of a state.

    Attributes:
      updates: number of updates so far.
      skipped: number of these whose exchange did not take place, an argument of `sync.phase`.
    """

    updates: int
    skipped: int


def counter_of(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    """Return the counter of the parameter transform, or that of the steps if there is none."""
    return state.step if sync is None else state.opt_state[-1].count


class Room(NamedTuple):
    """The room that is left in a window for the rows of further batches.

    Attributes:
      num_batches: number of further batches that fit.
      share: structure and types of one device's part of each; None if nothing fits.
    """

    num_batches: int
    share: Share | None


# `HostCounts` looks for entries of arrays that are gone when it has this many.
_SMALLEST_ROOM = 64


class HostCounts:
    """Values of counters on the host, by the device array that holds the counter.

    Reading a counter from the device waits for the step that computes it. Here each is read at most
    once, and the counters of later states follow from it. An entry belongs to one array, so several
    states, also in several threads, do not get mixed up; entries of arrays that are gone are
    removed when there are many.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._room = _SMALLEST_ROOM

    def get(self, array: Any) -> Any:
        """Return the value of `array`; None if it was neither read nor noted."""
        entry = self._values.get(id(array))
        return entry[1] if entry is not None and entry[0]() is array else None

    def of(self, state: TrainState, sync: ParameterTransform | None) -> UpdateCounts:
        """Return the counts of a state; read them from the device if they were not noted.

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
        counts = self.get(counter)
        if counts is None:
            skipped = 0
            if sync is not None:
                skipped = int(sync.skipped(jax.tree.map(of_one_replica, state.opt_state[-1])))
            counts = UpdateCounts(int(of_one_replica(counter)), skipped)
            self.note(counter, counts)
        return counts

    def note(self, array: Any, value: UpdateCounts | Room) -> None:
        """Store the value of an array, so that it need not be read from the device."""
        if len(self._values) >= self._room:
            # Not by a callback of each reference: Python discards what is raised in one, so a
            # KeyboardInterrupt that arrived while it ran would be lost.
            alive = {k: v for k, v in list(self._values.items()) if v[0]() is not None}
            self._values, self._room = alive, max(2 * len(alive), _SMALLEST_ROOM)
        self._values[id(array)] = weakref.ref(array), value


Mode = Literal["traced", "host"]


class Runner:
    """The runner of one training step's programs, shared by the step and its `AheadStep`.

    Attributes:
      parts: the parts of the step.
      mesh: the step's mesh.
      mode: `"traced"` or `"host"`.
      embeddings: the tables; None without tables.
      layouts: the layouts of the step's states.
      placing: the object that places batches on the devices.
      programs: the compiled programs.
      in_flight: the object that bounds the number of unfinished programs.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self.parts, self.mesh, self.mode = parts, mesh, mode
        self.embeddings, self._warn = parts.lookup.embeddings, warn_once()
        self.layouts = Layouts(mesh, parts.axis_name, parts.lookup, parts.sync)
        lookup = parts.lookup if parts.lookup.embeddings is not None else None
        self.placing = Placing(mesh, parts.axis_name, host_batch, lookup)
        self.programs = Programs(parts, mesh, donate, self._warn)
        self.in_flight = StepsInFlight()
        self._counts = HostCounts()
        self._beside: BesideSteps | None = None
        if mode == "host" and parts.sync is not None and parts.sync.beside is not None:
            self._beside = BesideSteps(parts.sync.beside, mesh, parts.axis_name)
        self._is_counting = False  # True once `next_phase` was called
        self._numbers: NumberPlaces | None = None  # None before the first state
        self._is_checked = False  # whether a state was checked
        self._collected: Share | None = None  # share of the last batch that went into a window
        self._mark = weakref.ref(self)

    def next_phase(self, state: TrainState) -> Phase:
        """Return the phase of the next update, on the host; `()` without a sync."""
        self.refuse(state)
        self._is_counting = True
        sync, so_far = self.parts.sync, self._counts.of(state, self.parts.sync)
        return () if sync is None else sync.phase(so_far.updates + 1, so_far.skipped)

    def place(
        self, state: TrainState | None, batch: PyTree, weight: Any = None, *, check_ids: bool = True
    ) -> tuple[PyTree, Any]:
        """Return a batch and its weight, placed on the devices; see `TrainStep.place`."""
        layout = self.layouts.last if state is None else self.layouts.of(state)
        batch, weight = self.placing.compared(batch, weight, layout.data_axes, check_ids=check_ids)
        if isinstance(self.mesh, VirtualMesh):
            batch = self.placing.copied(batch)
        return batch, weight

    def checked_inputs(
        self, state: TrainState, batch: PyTree, weight: Any, window: GradientWindow | None
    ) -> StepInputs:
        """Check the arguments of a step, compare them between processes, and place the batch."""
        self.refuse(state)
        batch, weight = self.placing.compared(batch, weight, self.layouts.of(state).data_axes)
        if window is not None:
            self.refuse_window(window, state, weight)
        return StepInputs(batch, weight, window)

    def update(
        self, state: TrainState, inputs: StepInputs, ahead: Ahead | None = None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run one update with a batch, and with those in the window if there is one."""
        task = update(self._phase(state), windowed=inputs.window is not None, ahead=ahead)
        return self._update(task, state, inputs)

    def apply(
        self, state: TrainState, window: GradientWindow | None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run one update with the gradients in a window."""
        self.refuse(state)
        self.refuse_window(window, state)
        if self._collected is None or window is None:
            raise ValueError("`window` must be one that `step.collect` of this step has returned.")
        task = update_of_window(self._phase(state), self._collected)
        return self._update(task, state, StepInputs(window=window))

    def collect(
        self, state: TrainState, inputs: StepInputs, num_batches: int, ahead: Ahead | None = None
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window, or to a new one if there is none."""
        self.placing.refuse_counted()
        layout = self.layouts.of(state)
        inputs = self.dispatched(add_to_window(fits=True), layout, state, inputs)
        leaves, structure = jax.tree.flatten(self.placing.share(inputs.batch, layout.data_axes))
        self._collected = share = structure, tuple(leaves)
        if inputs.window is not None:
            room = self._counts.get(inputs.window.count) or Room(0, None)
        else:
            # For the first batch at least: jaxlib 0.11 fails on CPU devices with empty arrays.
            room = Room(0 if self.embeddings is None else max(1, num_batches), share)
            first = StepInputs(inputs.batch, inputs.weight)
            window = self.run(open_window(room.num_batches), layout, state, first)
            inputs = inputs._replace(window=window)
        fits = self.embeddings is None or (room.num_batches > 0 and room.share == share)
        task = add_to_window(ahead, fits=fits)
        window, metrics, carry = self.run(task, layout, state, inputs)
        if room.num_batches and not isinstance(window.count, Tracer):
            left = room._replace(num_batches=room.num_batches - 1) if fits else room
            self._counts.note(window.count, left)
        self.ran(inputs, metrics)
        return window, metrics, carry

    def run(self, task: Task, layout: StateLayout, state: TrainState, inputs: StepInputs) -> Any:
        """Run the program of a task and return its results."""
        program = self.program(task, layout, state, inputs)
        inputs = self.dispatched(task, layout, state, inputs)
        return program(state=state, **inputs._asdict())

    def dispatched(
        self,
        task: Task,
        layout: StateLayout,
        state: TrainState,
        inputs: StepInputs,
        *,
        runs: bool = True,
    ) -> StepInputs:
        """Return the inputs with a dispatched loss function's results in place of the batch.

        Args:
          task: the task of the program that takes the inputs.
          layout: layout of the state.
          state: the state at which the loss function is computed.
          inputs: inputs with a placed batch; returned unchanged if there is nothing to dispatch.
          runs: whether to compute the results; False returns their types.
        """
        loss = self.parts.differentiation.dispatched
        if loss is None or inputs.batch is None or isinstance(inputs.batch, WithResults):
            return inputs
        if isinstance(state.step, Tracer):
            raise ValueError(
                "A step whose `loss_fn` dispatches programs of its own, as a pipeline with "
                '`executor`="host" does, cannot be called inside of jax.jit, lax.scan and the '
                'like: call it outside, or make the pipeline with `executor`="one_program".'
            )
        differentiates, is_window = task is not EVALUATE, task.name in ("collect", "open")
        parts = loss.parts if differentiates else 1
        windowed = inputs.window is not None
        which = arguments(collects=is_window or windowed, windowed=windowed, parts=parts)
        state = state._replace(opt_state=())
        program = self.program(which, layout, state, inputs)
        program = program if runs else partial(jax.eval_shape, program)
        params, batch, keys, seen = program(state=state, **inputs._asdict())
        results = loss.loss_fn.dispatch(
            state.params if params is None else params,
            inputs.batch if batch is None else batch,
            rng=keys,
            model_state=seen,
            replicas=axis_names(self.parts.axis_name),
            inner_axes=layout.inner_axes,
            parts=parts,
            differentiates=differentiates,
            compiler_options=self.parts.compiler_options,
        )
        return inputs._replace(batch=WithResults(inputs.batch, results))

    def compiled(
        self, state: TrainState, inputs: StepInputs, ahead: Ahead | None = None
    ) -> jax.stages.Compiled:
        """Return the compiled program of an update, compiling it if needed; nothing runs."""
        refuse_non_state(state)
        layout = self.layouts.of(state)
        batch, weight = self.placing.placed(inputs.batch, inputs.weight, layout.data_axes)
        upcoming, _ = self.placing.placed(inputs.upcoming, None, layout.data_axes)
        inputs = inputs._replace(batch=batch, weight=weight, upcoming=upcoming)
        self._replace_numbers(state)
        task = update(self._phase(state), windowed=inputs.window is not None, ahead=ahead)
        program = self.program(task, layout, state, inputs)
        inputs = self.dispatched(task, layout, state, inputs, runs=False)
        return program.lower(state=state, **inputs._asdict()).compile()

    def program(
        self, task: Task, layout: StateLayout, state: TrainState, inputs: StepInputs
    ) -> Any:
        """Return the jitted program of a task, built at its first use."""
        return self.programs.get(task, layout, state, inputs, self.check)

    def check(self, state: TrainState) -> None:
        """Raise `ValueError` for errors that only a state shows; called once per program."""
        refuse_non_state(state)
        parts, warn, is_first = self.parts, self._warn, not self._is_checked
        check_state(state, parts, self.mesh, self.mode, warn, is_first=is_first)
        self._is_checked = True
        # Repetitive parameters have equal shards, too, so states made by this step are not checked.
        if parts.sync is not None and not self._returned(state):
            check_shards(parts.sync.shards(state.opt_state[-1]))

    def ran(self, inputs: StepInputs, metrics: Metrics) -> None:
        """Record a program that was started with a batch."""
        self.in_flight.admit(metrics["loss"])
        self.placing.ran(inputs.batch, metrics)

    def note(self, state: TrainState, layout: StateLayout) -> None:
        """Mark a state as made by this step, so that the next call checks less of it."""
        self.layouts.note(state, layout)
        state.made_by = self._mark

    def _update(
        self, task: Task, state: TrainState, inputs: StepInputs
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run an update; record layout and counters of the new state without reading them."""
        self._replace_numbers(state)
        self.placing.refuse_counted()
        layout = self.layouts.of(state)
        so_far = None
        if self._is_counting:
            so_far = self._counts.get(counter_of(state, self.parts.sync))
        if self._beside is None:
            new_state, metrics, carry = self.run(task, layout, state, inputs)
        else:
            phase, t = self.next_phase(state), self._counts.of(state, self.parts.sync).updates + 1
            is_known = self._returned(state)
            with_result = self._beside.before(state, phase, t, is_known=is_known)
            if is_known:
                self.note(with_result, layout)
            new_state, metrics, carry = self.run(task, layout, with_result, inputs)
            self._beside.after(state, new_state, phase)
        self.ran(inputs, metrics)
        self.note(new_state, layout)
        if inputs.window is not None and self.programs.donate:
            forget(inputs.window)
        if so_far is not None:  # count on the host, without reading the device
            counter = counter_of(new_state, self.parts.sync)
            self._counts.note(counter, so_far._replace(updates=so_far.updates + 1))
        return new_state, metrics, carry

    def _replace_numbers(self, state: TrainState) -> None:
        """Replace plain numbers assigned to hyperparameters by arrays over the replicas."""
        if self._numbers is None:
            # Optax finds whether there are any; most optimizers have none to keep places of.
            has_any = optax.tree.get_all_with_path(state.opt_state, "hyperparams")
            self._numbers = number_places(state.opt_state) if has_any else []
        if self._numbers:
            replace_numbers(state.opt_state, self._numbers)

    def _phase(self, state: TrainState) -> Phase | None:
        """Return the phase of the next update's program; None if one program serves all phases."""
        if self.mode != "host":
            return None
        phase = self.next_phase(state)
        return phase if self._beside is None else self._beside.phase(phase)

    def refuse(self, state: TrainState) -> None:
        """Raise `ValueError` unless `state` is a state of this step that was not donated."""
        if self._returned(state):
            refuse_donated(state)
            return
        refuse_non_state(state)
        refuse_donated(state)
        refuse_state_of_another_step(state, self.parts)

    def _returned(self, state: TrainState) -> bool:
        return getattr(state, "made_by", None) is self._mark

    def refuse_window(self, window: Any, state: TrainState, weight: Any = ...) -> None:
        """Raise `ValueError` unless `window` is an unused window of this state, or None."""
        dense = state._replace(params=self.parts.lookup.dense(state.params))
        refuse_unusable_window(window, dense, weight)
