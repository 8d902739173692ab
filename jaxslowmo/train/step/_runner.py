"""The runner of a step's programs: the layout of its states, its programs, its counters."""

import operator
import weakref
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..._support.checks import warn_once
from ..._support.types import CompilerOptions, Phase, PyTree
from ...embedding import Embeddings, PrefetchedRows, PrefetchOptions
from ...mesh import AnyMesh, device_mesh, inner_specs, model_axes, with_device_per_position
from ...tracing import ready_order
from ...transform import ReplicaGroup, replica_types, shardings
from ...tree import leaf_names
from .._batches import BatchPlacer, HostBatch, as_arrays, stack, type_and_sharding
from .._train_state import HyperparamsPaths, TrainState, hyperparams_paths, replace_numbers
from . import _programs as programs
from ._checks import (
    check_donation,
    check_exchange_state,
    check_is_state,
    check_num_replicas,
    check_optimizer_state,
    check_same_model,
    check_state_sharding,
    check_window,
    check_window_weight,
    checked_structure_change,
)
from ._dispatched import DispatchedGradients, WithResults
from ._first_run import program_checks
from ._gradients import GradientWindow, Metrics, StepInputs
from ._in_flight import StepsInFlight
from ._overlapped_exchanges import OverlappedExchanges
from ._programs import EVALUATE, Mode, Phases, RecentValues, ShardTypes, Task
from ._update import Layout, Update, without_optimizer


class WindowCapacity(NamedTuple):
    """The capacity of a window for the rows of further batches.

    Attributes:
      num_batches: number of further batches that fit.
      shard_types: structure and types of one device's part of each; None if nothing fits.
    """

    num_batches: int
    shard_types: ShardTypes | None


class Runner:
    """The runner of one training step's programs, shared by the step and its `AheadStep`.

    The states of a step lie as the first one that it makes or is given; later ones are moved there.

    Args:
      update: the update of the step.
      embeddings: the tables; None without.
      mesh: the step's mesh.
      mode: `"traced"` or `"host"`.
      host_batch: what batches of the host hold, as in `make_train_step`.
      donate: whether programs reuse the buffers of their arguments.
      compiler_options: options for the compiler of every program.

    Attributes:
      update: the update of the step.
      embeddings: the tables; None without.
      bound_update: the update for the layout of the states, with `sync` bound to their parameters.
      layout: the layout of the states.
      placer: the object that places batches on the devices.
    """

    def __init__(
        self,
        update: Update,
        embeddings: Embeddings | None,
        mesh: AnyMesh,
        mode: Mode,
        host_batch: HostBatch,
        donate: bool,
        compiler_options: CompilerOptions,
    ) -> None:
        self.update, self.mesh, self.mode = update, mesh, mode
        self._donates, self._options, self._warn = donate, compiler_options, warn_once()
        self.embeddings, self._ahead = embeddings, None if embeddings is None else PrefetchOptions()
        self.layout = update.layout(mesh, frozenset(), None, None)
        self.bound_update = update.with_layout(self.layout)
        self.shardings: TrainState | None = None  # of the step's states; None before the first one
        self._has_layout = False  # whether a state has said where the step's states lie
        self._names: list[str] = []  # of the parameters of that state
        self._has_moved = False  # whether a state was moved there, which is told once
        self._is_checked = False  # whether a state was checked
        self._changes = False  # whether an update gives the optimizer's state another structure
        self._programs: dict[Any, Any] = {}
        self.placer = BatchPlacer(mesh, update.axis_name, host_batch, embeddings)
        self._in_flight = StepsInFlight()
        self._program_checks = program_checks(
            *(mesh, update.axis_name, update.map_with, update.gradients, update.sync),
            check_compiled=update.loss_program.check_compiled,
        )
        self.phases, self._capacities = Phases(update.sync, mode), RecentValues()
        # The last state that a program has made: its counter, and the rest as long as that lives.
        self._last_state: tuple[Any, tuple[Any, ...]] = (lambda: None, ())
        self._known_kinds: set[Any] = set()  # kinds of states that passed the checks
        self._overlapped: OverlappedExchanges | None = None
        self._numbers: HyperparamsPaths | None = None  # None before the first state
        self._collected: ShardTypes | None = None  # of the last batch that went into a window

    # States.

    def accept_state(
        self, state: TrainState, *, needs_opt_state: bool = True, is_executed: bool = True
    ) -> TrainState:
        """Return a state where the step's states lie; raise `ValueError` for one that is none.

        Args:
          state: the state.
          needs_opt_state: whether its optimizer state is used.
          is_executed: whether a program takes it; if not, it may have been donated.
        """
        if self._is_last_state(state):
            if is_executed and state.step.is_deleted():
                check_donation(state)
            return state
        check_is_state(state)
        if is_executed:
            check_donation(state)
        leaves, structure = jax.tree.flatten(state)
        places = tuple(map(type_and_sharding, leaves))
        kind = None if None in places else (structure, places, needs_opt_state)
        if kind in self._known_kinds:
            return state
        check_num_replicas(state, self.update, self.mesh)
        if needs_opt_state:
            check_exchange_state(state, self.update, self.mesh)
        if needs_opt_state and not self._is_checked:
            check_optimizer_state(state, self.update, self.mesh)
        state = self._place_state(state, needs_opt_state=needs_opt_state)
        if needs_opt_state:
            self.check(state)
        if kind is not None and all(map(operator.is_, leaves, jax.tree.leaves(state))):
            self._known_kinds.add(kind)
        return state

    def _is_last_state(self, state: TrainState) -> bool:
        """Return whether the last program of this step, or its `init`, returned the state."""
        if not isinstance(state, TrainState):
            return False
        counter, rest = self._last_state
        return state.step is counter() and all(map(operator.is_, state[1:], rest))

    def remember_state(self, state: TrainState) -> None:
        """Remember a state that this step has made, so that the next call need not look at it."""
        if isinstance(state.step, Tracer):
            return

        def clear(counter: Any) -> None:
            if self._last_state[0] is counter:
                self._last_state = (lambda: None, ())

        self._last_state = weakref.ref(state.step, clear), state[1:]

    def check(self, state: TrainState) -> None:
        """Raise `ValueError` for errors that only a state shows."""
        is_first = not self._is_checked
        changes = checked_structure_change(
            state, self.bound_update, self.mesh, self.mode, self._warn, is_first=is_first
        )
        self._is_checked, self._changes = True, self._changes or changes

    def accept_initial_state(self, state: TrainState) -> TrainState:
        """Return a state that `init` has made, where the step's states lie."""
        state = self._place_state(state)
        self.remember_state(state)
        self.check(state)
        return state

    def _place_state(self, state: TrainState, *, needs_opt_state: bool = True) -> TrainState:
        """Return the state where the step's states lie; the first one says where that is.

        One that is only evaluated may lack, or have, what an update alone needs.
        """
        leaves = jax.tree.leaves(state)
        if any(isinstance(x, Tracer) for x in leaves):
            if not self._has_layout:
                self._set_layout(
                    self.update.layout(self.mesh, frozenset(), None, state.params), state
                )
            return state
        if not self._has_layout:
            axes = model_axes(state.params, self.mesh, self.update.axis_name)
            specs = inner_specs(state.params, axes) if axes else None
            layout = self.update.layout(self.mesh, axes, specs, state.params)
            check_state_sharding(layout.auto_axes, state, self.mesh, self.update.axis_name)
            self._set_layout(layout, state)
            self._has_layout, self._names = True, leaf_names(state.params)
        check_same_model(state.params, self._names)
        check_state_sharding(self.layout.auto_axes, state, self.mesh, self.update.axis_name)
        targets = self._state_shardings(state) if self.shardings is None else self.shardings
        if needs_opt_state:
            self.shardings = targets
        if jax.tree.structure(targets) != jax.tree.structure(state):
            return state  # without what an update alone needs, or in another container
        return jax.tree.map(self._move_leaf, state, targets)

    def _move_leaf(self, x: Any, target: NamedSharding) -> Any:
        if isinstance(x, int | float | np.generic):
            return x  # assigned to a hyperparameter; the update replaces it
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
        has_place = isinstance(x, jax.Array) and x.committed
        if has_place and x.sharding.is_equivalent_to(target, x.ndim):
            return x
        if has_place and not self._has_moved:
            self._has_moved = True
            self._warn(
                "`state` lies elsewhere than the first state of this step, and is moved there: of "
                f"one array from {x.sharding} to {target}. Make a step for each layout."
            )
        return jax.device_put(x, target)

    def _state_shardings(self, state: TrainState) -> Any:
        """Return where the leaves of a state lie, or shall lie where they have no place yet."""
        sync = self.bound_update.sync
        group = ReplicaGroup(self.update.axis_name)
        if sync is not None and sync.algorithm.groups:
            group = sync.algorithm.groups[-1]
        local = state._replace(exchange=state.exchange._replace(shared=()))
        local, shared = shardings(
            replica_types(local),
            state.exchange.shared,
            replica_types(state.params),
            group,
            param_specs=self.layout.specs,
            mesh=self.mesh,
            axis_name=self.update.axis_name,
        )
        default = local._replace(exchange=local.exchange._replace(shared=shared))

        def place(x: Any, otherwise: NamedSharding) -> NamedSharding:
            known = getattr(x, "sharding", None)
            if not isinstance(known, NamedSharding) or known.mesh != device_mesh(self.mesh):
                return otherwise
            return otherwise if known.is_fully_replicated else known

        return jax.tree.map(place, state, default)

    def _set_layout(self, layout: Layout, state: TrainState) -> None:
        update = self.update.with_layout(layout)
        if update.sync is not None and update.sync.algorithm.needs:
            sync = update.sync.bound(dict(self.mesh.shape), replica_types(state.params))
            update = replace(update, sync=sync)
        self.bound_update, self.layout, self.phases.sync = update, layout, update.sync
        overlapped = None if update.sync is None else update.sync.algorithm.overlapped
        if self.mode == "host" and overlapped is not None and self._overlapped is None:
            self._overlapped = OverlappedExchanges(overlapped, self.mesh, update.axis_name)

    # Batches.

    def place(self, batch: PyTree, weight: Any = None, *, check_ids: bool = True) -> Any:
        """Return a batch and its weight, placed on the devices; see `TrainStep.place`."""
        axes = self.layout.batch_axes
        return self.placer.check_and_place(batch, weight, axes, check_ids=check_ids)

    def checked_inputs(
        self, state: TrainState, batch: PyTree, weight: Any, window: GradientWindow | None
    ) -> tuple[TrainState, StepInputs]:
        """Return the arguments of a step, checked, compared between processes, and placed."""
        state = self.accept_state(state)
        batch, weight = self.place(batch, weight)
        self.check_window(window, state)
        check_window_weight(window, weight)
        return state, StepInputs(batch, weight, window)

    def check_window(self, window: Any, state: TrainState) -> None:
        """Raise `ValueError` unless `window` is an unused window of this state, or None."""
        if window is not None:
            dense = state._replace(params=self.update.dense(state.params))
            check_window(window, dense)

    # Tasks.

    def run_update(
        self,
        state: TrainState,
        inputs: StepInputs,
        ahead: PrefetchOptions | None = None,
        shard_types: ShardTypes | None = None,
    ) -> tuple[TrainState, Metrics, PrefetchedRows | None]:
        """Run one update; record layout and counters of the new state without reading them.

        The inputs hold a batch, a window of gradients, or both; without a batch `shard_types`
        describes the last one of the window.
        """
        self._replace_numbers(state)
        self.placer.check_counts()
        task = self._update_task(state, ahead, shard_types)
        if self._overlapped is None:
            new, metrics, carry = self.run(task, state, inputs)
        else:
            phase, t = self.phases.next(state), self.phases.update_counts(state).updates + 1
            is_known = self._is_last_state(state)
            with_result = self._overlapped.before_update(state, phase, t, is_known=is_known)
            if is_known:
                self.remember_state(with_result)
            new, metrics, carry = self.run(task, with_result, inputs)
            self._overlapped.after_update(state, new, phase)
        self.record_run(inputs, metrics)
        self.remember_state(new)
        if inputs.window is not None and self._donates:
            delete_gradients(inputs.window)
        self.phases.advance(state, new)
        return new, metrics, carry

    def scan(self, state: TrainState, batches: PyTree, weight: Any) -> tuple[TrainState, Metrics]:
        """Run an update for each of several batches; see `TrainStep.scan`."""
        state = self.accept_state(state)
        has_tables = self.embeddings is not None
        if has_tables or isinstance(self.update.differentiated_loss, DispatchedGradients):
            what = "`embeddings`" if has_tables else 'a pipeline with `executor`="host"'
            raise ValueError(
                f"scan: a step with {what} works on the host between updates: call it for each "
                "batch (js.train_loop without `steps_per_call`)."
            )
        axes = self.layout.batch_axes
        if self._overlapped is not None and self._overlapped.overlaps:
            return self._scan_one_by_one(state, batches, weight)
        batches, weight, length = self.placer.place_batches(batches, weight, axes)
        self._replace_numbers(state)

        def run(phase: Phase | None, state: TrainState, batches: PyTree) -> Any:
            task = Task.create("scan", ("state", "metrics"), "state", phase=phase)
            return self.run(task, state, StepInputs(batches, weight))

        state, metrics = self.phases.scan(state, batches, length, run)
        self.record_run(StepInputs(batches), metrics)
        self.remember_state(state)
        return state, metrics

    def _scan_one_by_one(
        self, state: TrainState, batches: PyTree, weight: Any
    ) -> tuple[TrainState, Metrics]:
        """Run the updates in a program each, beside which the exchange goes on."""
        each_metrics = []
        for i in range(len(jax.tree.leaves(batches)[0])):
            batch = jax.tree.map(lambda x, i=i: x[i], batches)
            state, inputs = self.checked_inputs(state, batch, weight, None)
            state, metrics, _ = self.run_update(state, inputs)
            each_metrics.append(metrics)
        return state, stack(each_metrics)

    def apply(self, state: TrainState, window: GradientWindow) -> tuple[TrainState, Metrics]:
        """Run one update with the gradients in a window."""
        state = self.accept_state(state)
        self.check_window(window, state)
        if self._collected is None or window is None:
            raise ValueError("`window` must be one that `step.collect` of this step has returned.")
        return self.run_update(state, StepInputs(window=window), None, self._collected)[:2]

    def collect(
        self,
        state: TrainState,
        inputs: StepInputs,
        num_batches: int,
        ahead: PrefetchOptions | None = None,
    ) -> tuple[GradientWindow, Metrics, PrefetchedRows | None]:
        """Add a batch to a window, or to a new one if there is none."""
        self.placer.check_counts()
        ahead = ahead or self._ahead
        inputs = self.dispatch_loss(_collect_task(ahead, fits_window=True), state, inputs)
        leaves, structure = jax.tree.flatten(
            self.placer.shard_types(inputs.batch, self.layout.batch_axes)
        )
        self._collected = shard_types = structure, tuple(leaves)
        if inputs.window is not None:
            capacity = self._capacities.get(inputs.window.count) or WindowCapacity(0, None)
        else:
            # For the first batch at least: jaxlib 0.11 fails on CPU devices with empty arrays.
            num_batches = 0 if self.embeddings is None else max(1, num_batches)
            capacity = WindowCapacity(num_batches, shard_types)
            first = StepInputs(inputs.batch, inputs.weight)
            opens = Task.create("open_window", "window", num_batches=num_batches)
            window = self.run(opens, state, first)
            inputs = inputs._replace(window=window)
        has_place = capacity.num_batches > 0 and capacity.shard_types == shard_types
        fits_window = self.embeddings is None or has_place
        task = _collect_task(ahead, fits_window=fits_window)
        window, metrics, carry = self.run(task, state, inputs)
        if capacity.num_batches and not isinstance(window.count, Tracer):
            left = capacity.num_batches - fits_window
            self._capacities.set(window.count, capacity._replace(num_batches=left))
        self.record_run(inputs, metrics)
        return window, metrics, carry

    def evaluate(self, state: TrainState, batch: PyTree, weight: Any) -> Metrics:
        """Return the metrics of a batch by a forward pass."""
        state = self.accept_state(state, needs_opt_state=False)
        inputs = StepInputs(*self.place(batch, weight))
        self.placer.check_counts()
        metrics = self.run(EVALUATE, without_optimizer(state), inputs)
        self.record_run(inputs, metrics)
        return metrics

    # Programs.

    def run(self, task: Task, state: TrainState, inputs: StepInputs) -> Any:
        """Run the program of a task and return its results."""
        program = self.jit_task(task, state, inputs)
        inputs = self.dispatch_loss(task, state, inputs)
        for before_run in self._program_checks:
            phase = dict(task.static).get("phase")
            before_run(program, task.method, phase, state, *inputs)
        return program(state, *inputs)

    def jit_task(self, task: Task, state: TrainState, inputs: StepInputs) -> Any:
        """Return the jitted program of a task, built at its first use."""
        if (before_run := self.update.loss_program.before_run) is not None:
            before_run()
        leaves = jax.tree.leaves((state.step, inputs.batch)) if self._options else ()
        if any(isinstance(x, Tracer) for x in leaves):
            raise ValueError(
                "A step with `compiler_options` cannot be called inside of jax.jit or lax.scan: "
                "make it without, and pass them to your own jax.jit(compiler_options=...)."
            )
        # Inside of another program there is no next step that might compile again.
        is_inside = isinstance(state.step, Tracer)
        key = task, jax.tree.structure(inputs.window), is_inside
        if key not in self._programs:
            out_shardings = None
            if self.shardings is not None and not is_inside:
                pins = self.shardings
                if self._changes:  # the compiler says where the optimizer's state lies
                    pins = pins._replace(opt_state=None)
                out_shardings = programs.result_shardings(
                    task, self.bound_update, self.layout, self.mesh, pins, inputs
                )
            self._programs[key] = self._build(task, self.mesh, out_shardings)
        return self._programs[key]

    def _build(self, task: Task, mesh: Any, out_shardings: Any = None) -> Any:
        return programs.build(
            *(task, self.bound_update, self.layout, mesh),
            donates=self._donates,
            compiler_options=self._options,
            out_shardings=out_shardings,
        )

    def lower(
        self, state: TrainState, inputs: StepInputs, ahead: PrefetchOptions | None = None
    ) -> jax.stages.Lowered:
        """Return the lowered program of an update; nothing runs."""
        state = self.accept_state(state, is_executed=False)
        return self._trace(self._update_task(state, ahead), state, inputs, self.mesh).lower()

    def trace_update(
        self, state: TrainState, batch: PyTree, phase: Phase | None
    ) -> jax.stages.Traced:
        """Return the traced program of an update in a phase; see `TrainStep.traced_by_phase`."""
        state, task = self.accept_state(state, is_executed=False), _update_task(phase, self._ahead)
        return self._trace(task, state, StepInputs(batch), with_device_per_position(self.mesh))

    def _trace(
        self, task: Task, state: TrainState, inputs: StepInputs, mesh: Any
    ) -> jax.stages.Traced:
        axes = self.layout.batch_axes
        batch, weight = self.placer.place(inputs.batch, inputs.weight, axes)
        upcoming, _ = self.placer.place(inputs.upcoming, None, axes)
        inputs = inputs._replace(batch=batch, weight=weight, upcoming=upcoming)
        self._replace_numbers(state)
        is_cached = mesh is self.mesh
        program = self.jit_task(task, state, inputs) if is_cached else self._build(task, mesh)
        inputs = self.dispatch_loss(task, state, inputs, is_executed=False)
        return program.trace(state, *inputs)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """Return the order in which gradients are ready; see `TrainStep.ready_order`."""
        if isinstance(self.update.differentiated_loss, DispatchedGradients):
            return None
        state = self.accept_state(state, needs_opt_state=False, is_executed=False)
        shard = self.placer.shard_types(as_arrays(batch), self.layout.batch_axes)
        params, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (state.params, state.model_state)
        )
        try:
            params, shard = self.update.loss_input_types(params, shard)
            loss = self.bound_update.differentiated_loss.loss
            return ready_order(loss, params, shard, model_state=model_state)
        except NameError:  # unbound axis name
            return None

    def dispatch_loss(
        self, task: Task, state: TrainState, inputs: StepInputs, *, is_executed: bool = True
    ) -> StepInputs:
        """Return the inputs with a dispatched loss function's results in place of the batch.

        Args:
          task: the task of the program that takes the inputs.
          state: the state at which the loss function is computed.
          inputs: inputs with a placed batch; returned unchanged if there is nothing to dispatch.
          is_executed: whether to compute the results; False returns their types.
        """
        loss = self.bound_update.differentiated_loss
        is_ready = inputs.batch is None or isinstance(inputs.batch, WithResults)
        if is_ready or not isinstance(loss, DispatchedGradients):
            return inputs
        state = without_optimizer(state)
        task = loss.task(task, inputs)
        program = self.jit_task(task, state, inputs)
        arguments = (program if is_executed else partial(jax.eval_shape, program))(state, *inputs)
        return loss.dispatch_loss(
            *(task, state, inputs, arguments),
            compiler_options=self._options,
            is_executed=is_executed,
        )

    def record_run(self, inputs: StepInputs, metrics: Metrics) -> None:
        """Record a program that was started with a batch."""
        self._in_flight.add(metrics["loss"])
        self.placer.record_counts(inputs.batch, metrics)

    def _update_task(
        self,
        state: TrainState,
        ahead: PrefetchOptions | None,
        shard_types: ShardTypes | None = None,
    ) -> Task:
        """Return the task of the next update; one program serves all phases in a traced step."""
        phase = self.phases.program_phase(state)
        if phase is not None and self._overlapped is not None:
            phase = self._overlapped.phase(phase)
        return _update_task(phase, ahead or self._ahead, shard_types)

    def _replace_numbers(self, state: TrainState) -> None:
        """Replace plain numbers assigned to hyperparameters by arrays over the replicas."""
        if self._numbers is None:
            self._numbers = hyperparams_paths(state.opt_state)
        if self._numbers:
            replace_numbers(state.opt_state, self._numbers)


@lru_cache(maxsize=256)
def _update_task(
    phase: Phase | None, ahead: PrefetchOptions | None, shard_types: ShardTypes | None = None
) -> Task:
    """Return the task of an update; of a window alone `shard_types` describes the last batch."""
    results = "state", "metrics", "carry"
    return Task.create("update", results, "state", phase=phase, ahead=ahead, like=shard_types)


def _collect_task(ahead: PrefetchOptions | None, *, fits_window: bool) -> Task:
    """Return the task of adding a batch to a window, which grows unless its rows have a place."""
    results = "window", "metrics", "carry"
    # jax warns of donated buffers that no result can reuse, as those of a window that grows.
    donated = "window" if fits_window else None
    return Task.create("collect", results, donated, ahead=ahead, fits_window=fits_window)


def delete_gradients(window: GradientWindow) -> None:
    """Delete the gradients of a window that an update has used.

    They cannot be donated, since no result of the update has their shapes. Their memory is freed
    when the update has run.
    """
    for x in jax.tree.leaves(window.grads.sum):
        if not isinstance(x, Tracer):
            x.delete()
