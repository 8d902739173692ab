"""The runner of a step's programs: the layout of its states, its programs, its counters."""

import weakref
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..._support.checks import warn_once
from ..._support.types import CompilerOptions, Phase, PyTree
from ...embedding import Ahead, Carry, Lookup
from ...mesh import AnyMesh, VirtualMesh, axis_names, inner_specs, model_axes
from ...tracing import ready_order
from .._batches import HostBatch, Placing, as_arrays
from .._hyperparams import NumberPlaces, number_places, replace_numbers
from .._train_state import StateLayout, TrainState
from . import _programs as programs
from ._beside_steps import BesideSteps
from ._gradients import GradientWindow, Metrics, StepInputs, WithResults
from ._in_flight import StepsInFlight
from ._programs import EVALUATE, Share, Task
from ._states import (
    blocks_in,
    check_blocks,
    check_state,
    forget,
    of_one_replica,
    refuse_another_optimizer,
    refuse_beyond,
    refuse_donated,
    refuse_non_state,
    refuse_other_replicas,
    refuse_state_of_another_step,
    refuse_unusable_window,
    types_of_sync,
)
from ._update import Update

Mode = Literal["traced", "host"]


class UpdateCounts(NamedTuple):
    """The counters of a state.

    Attributes:
      updates: number of updates so far.
      skipped: number of these whose exchange did not take place, an argument of `sync.phase`.
    """

    updates: int
    skipped: int


class Room(NamedTuple):
    """The room that is left in a window for the rows of further batches.

    Attributes:
      num_batches: number of further batches that fit.
      share: structure and types of one device's part of each; None if nothing fits.
    """

    num_batches: int
    share: Share | None


_NUM_RECENT = 16  # arrays: one a state or window, of which few are in use at a time


class Recent:
    """Facts that the host knows of the last few arrays on devices, such as a counter's value.

    Reading a counter from the device waits for the step that computes it. Here each is read at most
    once, and the counters of later states follow from it. An entry belongs to one array, so several
    states, also in several threads, do not get mixed up.
    """

    def __init__(self) -> None:
        self._entries: tuple[tuple[weakref.ref[Any], Any], ...] = ()

    def get(self, array: Any) -> Any:
        """Return what was noted of `array`; None if nothing was, or many others since."""
        return next((value for ref, value in self._entries if ref() is array), None)

    def note(self, array: Any, value: UpdateCounts | Room) -> None:
        """Remember `value` of an array."""
        self._entries = ((weakref.ref(array), value), *self._entries[: _NUM_RECENT - 1])


class Runner:
    """The runner of one training step's programs, shared by the step and its `AheadStep`.

    A step has the layout of the first state that it makes or is given; a state of another layout
    makes it change over, with programs of their own.

    Args:
      update: the parts of the step.
      lookup: the lookup of rows in tables; None without tables.
      mesh: the step's mesh.
      mode: `"traced"` or `"host"`.
      host_batch: what batches of the host hold, as in `make_train_step`.
      donate: whether programs reuse the buffers of their arguments.
      compiler_options: options for the compiler of every program.

    Attributes:
      parts: the parts of the step.
      lookup: the lookup of rows in tables; None without tables.
      update: the parts, for the layout of the states.
      layout: the layout of the states.
      placing: the object that places batches on the devices.
    """

    def __init__(
        self,
        update: Update,
        lookup: Lookup | None,
        mesh: AnyMesh,
        mode: Mode,
        host_batch: HostBatch,
        donate: bool,
        compiler_options: CompilerOptions,
    ) -> None:
        self.parts, self.mesh, self.mode = update, mesh, mode
        self._donates, self._options, self._warn = donate, compiler_options, warn_once()
        self.lookup, self._ahead = lookup, None if lookup is None else Ahead()
        self.layout = update.layout(mesh, frozenset(), None, None)
        self.update = update.laid_out(self.layout)
        self._is_fixed = False  # whether a state has said what the layout is
        self._is_checked = False  # whether a state was checked
        self._is_given_checked = False  # whether one was that another object made
        self._programs: dict[Any, Any] = {}
        self._sync_types: dict[Any, Any] = {}  # of its state, by the structure of the parameters
        self.placing = Placing(
            mesh, update.axis_name, host_batch, None if lookup is None else lookup.embeddings
        )
        self._in_flight = StepsInFlight()
        self._counts = Recent()
        self._beside: BesideSteps | None = None
        self._numbers: NumberPlaces | None = None  # None before the first state
        self._collected: Share | None = None  # share of the last batch that went into a window

    # States.

    def take(self, state: TrainState, *, updates: bool = True, runs: bool = True) -> None:
        """Raise `ValueError` unless the step can use `state`, and take over its layout.

        Args:
          state: the state.
          updates: whether its optimizer state is used.
          runs: whether a program takes it; if not, it may have been donated.
        """
        is_own = self._made(state)
        if not is_own:
            refuse_non_state(state)
        if runs:
            refuse_donated(state)
        if is_own:
            return
        refuse_other_replicas(state, self.parts, self.mesh)
        if updates:
            refuse_state_of_another_step(state, self.parts, self._types_of_sync)
        self._lay_out(state)
        if updates and not self._is_given_checked:
            refuse_another_optimizer(state, self.parts, self.mesh)
            self.check(state)
            self._is_given_checked = True

    def _types_of_sync(self, params: PyTree) -> PyTree:
        """Return types of the state that `sync` makes of such parameters; its structure matters."""
        kind, sync = jax.tree.structure(params), self.parts.sync
        if kind not in self._sync_types:
            assert sync is not None, "its state is compared"
            self._sync_types[kind] = types_of_sync(sync, params, self.mesh)
        return self._sync_types[kind]

    def _made(self, state: TrainState) -> bool:
        """Return whether a program of this step, or its `init`, returned the state."""
        return getattr(state, "known_layout", None) is self.layout

    def check(self, state: TrainState) -> None:
        """Raise `ValueError` for errors that only a state shows."""
        parts, sync, is_first = self.update, self.parts.sync, not self._is_checked
        check_state(state, parts, self.mesh, self.mode, self._warn, is_first=is_first)
        # Repetitive parameters have equal blocks, too, so states made by this step are not checked.
        if sync is not None and sync.algorithm.is_sharded and not self._made(state):
            check_blocks(blocks_in(state.opt_state[-1].shared, state.params))
        self._is_checked = True

    def made(self, state: TrainState) -> None:
        """Take a state that `init` has made."""
        self._lay_out(state)
        self.note(state)
        self.check(state)

    def note(self, state: TrainState) -> None:
        """Mark a state as made by this step, so that the next call need not look at its leaves."""
        if self._is_fixed:
            state.known_layout = self.layout

    def _lay_out(self, state: TrainState) -> None:
        """Take over the layout of a state. Tracers and arrays of the host have none."""
        leaves = jax.tree.leaves(state.params)
        known, layout = getattr(state, "known_layout", None), self.layout
        if any(isinstance(x, Tracer) for x in leaves[:1]):
            return
        if known is not None and known[:2] == self.layout[:2]:
            layout = known
        elif any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves):
            axes = model_axes(state.params, self.mesh, self.parts.axis_name)
            specs = inner_specs(state.params, axes) if axes else None
            layout = self.parts.layout(self.mesh, axes, specs, state.params)
            refuse_beyond(layout, state)
        elif not self._is_fixed:
            layout = self.parts.layout(self.mesh, frozenset(), None, state.params)
        sync, model = self.parts.sync, None
        if sync is not None and sync.algorithm.needs:  # its events depend on the parameters
            leaves, structure = jax.tree.flatten(state.params)
            model = structure, tuple((x.shape, x.dtype) for x in leaves)
        layout, now = layout._replace(model=model), self.layout
        is_other = (layout.axes, layout.key, model) != (now.axes, now.key, now.model)
        if is_other or not self._is_fixed:
            self._use(layout, state)

    def _use(self, layout: StateLayout, state: TrainState) -> None:
        update = self.parts.laid_out(layout)
        if update.sync is not None and update.sync.algorithm.needs:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
            update = replace(update, sync=update.sync.bound(dict(self.mesh.shape), one))
        self.update, self._is_fixed, self.layout = update, True, layout
        overlapped = None if update.sync is None else update.sync.algorithm.overlapped
        self._beside = None
        if self.mode == "host" and overlapped is not None:
            self._beside = BesideSteps(overlapped, self.mesh, update.axis_name)

    # Counters.

    def next_phase(self, state: TrainState) -> Phase:
        """Return the phase of the next update, on the host; `()` without a sync."""
        self.take(state)
        sync, so_far = self.update.sync, self._so_far(state)
        if sync is None:
            return ()
        return sync.algorithm.phase(so_far.updates + 1, so_far.skipped)

    def _counter(self, state: TrainState) -> jax.Array:
        return state.step if self.parts.sync is None else state.opt_state[-1].count

    def _so_far(self, state: TrainState) -> UpdateCounts:
        """Return the counts of a state; read them from the device if they were not noted."""
        counter, sync = self._counter(state), self.update.sync
        if isinstance(counter, Tracer | jax.ShapeDtypeStruct):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like, nor as a "
                'shape: call it outside with arrays, or use mode="traced", whose one program '
                "decides by itself."
            )
        counts = self._counts.get(counter)
        if counts is None:
            updates, skipped = int(of_one_replica(counter)), 0
            if sync is not None:
                local = jax.tree.map(of_one_replica, state.opt_state[-1].local)
                skipped = int(sync.algorithm.skipped(local, updates))
            counts = UpdateCounts(updates, skipped)
            self._counts.note(counter, counts)
        return counts

    # Batches.

    def place(self, batch: PyTree, weight: Any = None, *, check_ids: bool = True) -> Any:
        """Return a batch and its weight, placed on the devices; see `TrainStep.place`."""
        axes = self.layout.data_axes
        batch, weight = self.placing.compared(batch, weight, axes, check_ids=check_ids)
        if isinstance(self.mesh, VirtualMesh):
            batch = self.placing.copied(batch)
        return batch, weight

    def checked_inputs(
        self, state: TrainState, batch: PyTree, weight: Any, window: GradientWindow | None
    ) -> StepInputs:
        """Check the arguments of a step, compare them between processes, and place the batch."""
        self.take(state)
        batch, weight = self.placing.compared(batch, weight, self.layout.data_axes)
        if window is not None:
            self.refuse_window(window, state, weight)
        return StepInputs(batch, weight, window)

    def refuse_window(self, window: Any, state: TrainState, weight: Any = ...) -> None:
        """Raise `ValueError` unless `window` is an unused window of this state, or None."""
        dense = state._replace(params=self.parts.dense(state.params))
        refuse_unusable_window(window, dense, weight)

    # Tasks.

    def run_update(
        self,
        state: TrainState,
        inputs: StepInputs,
        ahead: Ahead | None = None,
        share: Share | None = None,
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run one update; record layout and counters of the new state without reading them.

        The inputs hold a batch, a window of gradients, or both; without a batch `share` describes
        the last one of the window.
        """
        self._replace_numbers(state)
        self.placing.refuse_counted()
        task = self._update_task(state, ahead, share)
        so_far = self._counts.get(self._counter(state))
        if self._beside is None:
            new, metrics, carry = self.run(task, state, inputs)
        else:
            phase, t = self.next_phase(state), self._so_far(state).updates + 1
            is_own = self._made(state)
            with_result = self._beside.before(state, phase, t, is_known=is_own)
            if is_own:
                self.note(with_result)
            new, metrics, carry = self.run(task, with_result, inputs)
            self._beside.after(state, new, phase)
        self.ran(inputs, metrics)
        self.note(new)
        if inputs.window is not None and self._donates:
            forget(inputs.window)
        if so_far is not None:  # count on the host, without reading the device
            self._counts.note(self._counter(new), so_far._replace(updates=so_far.updates + 1))
        return new, metrics, carry

    def apply(self, state: TrainState, window: GradientWindow) -> tuple[TrainState, Metrics]:
        """Run one update with the gradients in a window."""
        self.take(state)
        self.refuse_window(window, state)
        if self._collected is None or window is None:
            raise ValueError("`window` must be one that `step.collect` of this step has returned.")
        return self.run_update(state, StepInputs(window=window), None, self._collected)[:2]

    def collect(
        self, state: TrainState, inputs: StepInputs, num_batches: int, ahead: Ahead | None = None
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window, or to a new one if there is none."""
        self.placing.refuse_counted()
        ahead = ahead or self._ahead
        inputs = self.dispatched(_collect(ahead, fits=True), state, inputs)
        leaves, structure = jax.tree.flatten(
            self.placing.share(inputs.batch, self.layout.data_axes)
        )
        self._collected = share = structure, tuple(leaves)
        if inputs.window is not None:
            room = self._counts.get(inputs.window.count) or Room(0, None)
        else:
            # For the first batch at least: jaxlib 0.11 fails on CPU devices with empty arrays.
            room = Room(0 if self.lookup is None else max(1, num_batches), share)
            first = StepInputs(inputs.batch, inputs.weight)
            opens = Task.of("opened", "window", num_batches=room.num_batches)
            window = self.run(opens, state, first)
            inputs = inputs._replace(window=window)
        fits = self.lookup is None or (room.num_batches > 0 and room.share == share)
        task = _collect(ahead, fits=fits)
        window, metrics, carry = self.run(task, state, inputs)
        if room.num_batches and not isinstance(window.count, Tracer):
            left = room._replace(num_batches=room.num_batches - 1) if fits else room
            self._counts.note(window.count, left)
        self.ran(inputs, metrics)
        return window, metrics, carry

    def evaluate(self, state: TrainState, batch: PyTree, weight: Any) -> Metrics:
        """Return the metrics of a batch by a forward pass."""
        self.take(state, updates=False)
        inputs = StepInputs(*self.place(batch, weight))
        self.placing.refuse_counted()
        metrics = self.run(EVALUATE, state._replace(opt_state=()), inputs)
        self.ran(inputs, metrics)
        return metrics

    # Programs.

    def run(self, task: Task, state: TrainState, inputs: StepInputs) -> Any:
        """Run the program of a task and return its results."""
        program = self.program(task, state, inputs)
        inputs = self.dispatched(task, state, inputs)
        return program(state=state, **inputs._asdict())

    def program(self, task: Task, state: TrainState, inputs: StepInputs) -> Any:
        """Return the jitted program of a task, built at its first use."""
        if (before_run := self.parts.program.before_run) is not None:
            before_run()
        leaves = jax.tree.leaves((state.step, inputs.batch)) if self._options else ()
        if any(isinstance(x, Tracer) for x in leaves):
            raise ValueError(
                "A step with `compiler_options` cannot be called inside of jax.jit, lax.scan and "
                "the like, where jax takes none: call it outside, or make the step without them "
                "and pass them to your own jax.jit(compiler_options=...)."
            )
        layout = self.layout
        # Inside of another program there is no next step that might compile again, and a state of
        # shapes, of host arrays or on one device does not say where its results shall be.
        is_pinned = bool(layout.axes) and not isinstance(state.step, Tracer)
        is_pinned = is_pinned and (self._made(state) or _is_placed(state))
        key = task, inputs.window is None, layout.axes, layout.key, is_pinned
        if key not in self._programs:
            where = self.update, layout, self.mesh
            shardings = programs.pinned(task, *where, state, inputs) if is_pinned else None
            self._programs[key] = self._build(task, self.mesh, shardings)
        return self._programs[key]

    def _build(self, task: Task, mesh: Any, out_shardings: Any = None) -> Any:
        return programs.build(
            *(task, self.update, self.layout, mesh),
            donates=self._donates,
            compiler_options=self._options,
            out_shardings=out_shardings,
        )

    def compiled(
        self, state: TrainState, inputs: StepInputs, ahead: Ahead | None = None
    ) -> jax.stages.Compiled:
        """Return the compiled program of an update, compiling it if needed; nothing runs."""
        self.take(state, runs=False)
        axes = self.layout.data_axes
        batch, weight = self.placing.placed(inputs.batch, inputs.weight, axes)
        upcoming, _ = self.placing.placed(inputs.upcoming, None, axes)
        inputs = inputs._replace(batch=batch, weight=weight, upcoming=upcoming)
        self._replace_numbers(state)
        task = self._update_task(state, ahead)
        program = self.program(task, state, inputs)
        inputs = self.dispatched(task, state, inputs, runs=False)
        return program.lower(state=state, **inputs._asdict()).compile()

    def traced(self, state: TrainState, batch: PyTree, phase: Phase | None) -> jax.stages.Traced:
        """Return the traced program of an update in a phase; see `TrainStep.traced_by_phase`."""
        self.take(state, runs=False)
        inputs = StepInputs(*self.placing.placed(batch, None, self.layout.data_axes))
        task = _update(phase, self._ahead)
        if isinstance(self.mesh, VirtualMesh):
            program = self._build(task, programs.abstract(self.mesh))
        else:
            program = self.program(task, state, inputs)
        ready = self.dispatched(task, state, inputs, runs=False)
        return program.trace(state=state, **ready._asdict())

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """Return the order in which gradients are ready; see `TrainStep.ready_order`."""
        if self.parts.program.dispatch is not None:
            return None
        self.take(state, updates=False, runs=False)
        share = self.placing.share(as_arrays(batch), self.layout.data_axes)
        params, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (state.params, state.model_state)
        )
        try:
            if self.lookup is not None:
                params, share = self.lookup.seen_by_loss(params, share)
            return ready_order(self.update.batches.loss, params, share, model_state=model_state)
        except NameError:  # unbound axis name
            return None

    def dispatched(
        self, task: Task, state: TrainState, inputs: StepInputs, *, runs: bool = True
    ) -> StepInputs:
        """Return the inputs with a dispatched loss function's results in place of the batch.

        Args:
          task: the task of the program that takes the inputs.
          state: the state at which the loss function is computed.
          inputs: inputs with a placed batch; returned unchanged if there is nothing to dispatch.
          runs: whether to compute the results; False returns their types.
        """
        dispatch = self.parts.program.dispatch
        if dispatch is None or inputs.batch is None or isinstance(inputs.batch, WithResults):
            return inputs
        if isinstance(state.step, Tracer):
            raise ValueError(
                "A step whose `loss_fn` dispatches programs of its own, as a pipeline with "
                '`executor`="host" does, cannot be called inside of jax.jit, lax.scan and the '
                'like: call it outside, or make the pipeline with `executor`="one_program".'
            )
        differentiates = task is not EVALUATE
        collects = inputs.window is not None or task.method in ("opened", "collected")
        parts = self.parts.cuts if differentiates else 1
        which = Task.of("arguments", "arguments", collects=collects, parts=parts)
        state = state._replace(opt_state=())
        program = self.program(which, state, inputs)
        program = program if runs else partial(jax.eval_shape, program)
        params, batch, keys, seen = program(state=state, **inputs._asdict())
        results = dispatch(
            state.params if params is None else params,
            inputs.batch if batch is None else batch,
            rng=keys,
            model_state=seen,
            replicas=axis_names(self.parts.axis_name),
            inner_axes=self.layout.inner_axes,
            parts=parts,
            differentiates=differentiates,
            compiler_options=self._options,
            runs=runs,
        )
        return inputs._replace(batch=WithResults(inputs.batch, results))

    def ran(self, inputs: StepInputs, metrics: Metrics) -> None:
        """Record a program that was started with a batch."""
        self._in_flight.admit(metrics["loss"])
        self.placing.ran(inputs.batch, metrics)

    def _update_task(
        self, state: TrainState, ahead: Ahead | None, share: Share | None = None
    ) -> Task:
        """Return the task of the next update; one program serves all phases in a traced step."""
        phase = None
        if self.mode == "host":
            phase = self.next_phase(state)
            phase = phase if self._beside is None else self._beside.phase(phase)
        return _update(phase, ahead or self._ahead, share)

    def _replace_numbers(self, state: TrainState) -> None:
        """Replace plain numbers assigned to hyperparameters by arrays over the replicas."""
        if self._numbers is None:
            # Optax finds whether there are any; most optimizers have none to keep places of.
            has_any = optax.tree.get_all_with_path(state.opt_state, "hyperparams")
            self._numbers = number_places(state.opt_state) if has_any else []
        if self._numbers:
            replace_numbers(state.opt_state, self._numbers)


@lru_cache(maxsize=256)
def _update(phase: Phase | None, ahead: Ahead | None, share: Share | None = None) -> Task:
    """Return the task of an update; of a window alone `share` describes the last batch."""
    results = "state", "metrics", "carry"
    return Task.of("updated", results, "state", phase=phase, ahead=ahead, like=share)


def _collect(ahead: Ahead | None, *, fits: bool) -> Task:
    """Return the task of adding a batch to a window, in its room if it `fits`, else after it."""
    results = "window", "metrics", "carry"
    # jax warns of donated buffers that no result can reuse, as those of a window that grows.
    return Task.of("collected", results, "window" if fits else None, ahead=ahead, fits=fits)


def _is_placed(state: TrainState) -> bool:
    """Return whether all leaves have a sharding over a mesh; a `ShapeDtypeStruct` may lack one."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(state))
    return all(isinstance(each, NamedSharding) for each in shardings)
