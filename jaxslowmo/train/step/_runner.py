"""The programs of a step, run, and what is known of their results without reading them."""

import weakref
from collections.abc import Hashable
from typing import Any, Literal

import jax
from jax.core import Tracer

from ..._typing import Phase, PyTree
from ..._warn import warn_once
from ...embedding import Ahead, Carry
from ...mesh import AnyMesh, VirtualMesh
from .._hyperparams import Numbers
from .._raw_keys import refuse_raw_keys
from .._state import Layout, TrainState
from ..batches import HostBatch
from ._host import HostCounts, Room, counter_of
from ._in_flight import StepsInFlight
from ._layouts import Layouts
from ._placing import Placing
from ._programs import Programs, Task, add_to_window, open_window, update, update_of_window
from ._state_checks import StateChecks
from ._usable import (
    forget,
    refuse_donated,
    refuse_state_of_others,
    refuse_unusable,
    refuse_unusable_window,
)
from .update import Given, GradientWindow, Metrics, StepParts

Mode = Literal["traced", "host"]


class Runner:
    """Runs the programs of one training step; the step and what asks ahead of it share it.

    Attributes:
      parts: what the step is made of.
      mesh: the mesh it runs on.
      mode: `"traced"` or `"host"`.
      embeddings: the tables; None without.
      checks: of the states that it is given.
      layouts: of these states.
      placing: puts batches on the devices.
      programs: what was compiled.
      in_flight: bounds the unfinished programs.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self.parts, self.mesh, self.mode = parts, mesh, mode
        self.embeddings = parts.lookup.embeddings
        warn = warn_once()
        self.checks = StateChecks(parts, mesh, mode, warn)
        self.layouts = Layouts(mesh, parts.axis_name, parts.lookup, parts.sync)
        self.placing = Placing(mesh, parts.axis_name, host_batch, self.layouts, parts.lookup)
        self.programs = Programs(parts, mesh, self.layouts, donate, warn)
        self.in_flight = StepsInFlight()
        self._counts = HostCounts()
        self._is_counting = False  # nobody has asked for a phase
        self._numbers: Numbers | None = None  # of its states, once there is one
        self._collected: PyTree | None = None  # types of a device's part of the last such batch
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
        if self.embeddings is not None:
            self.placing.refuse_counted()
        layout = self.layouts.of(state)
        self._collected = self.placing.share(given.batch, layout)
        room = self._room_of(given.window, num_batches)
        if given.window is None:
            first = Given(given.batch, given.weight)
            window = self.run(open_window(room.num_batches), layout, state, first)
            given = given._replace(window=window)
        fits = self.embeddings is None or (room.num_batches > 0 and room.share == self._share())
        task = add_to_window(ahead, fits=fits)
        window, metrics, carry = self.run(task, layout, state, given)
        if room.num_batches and not isinstance(window.count, Tracer):
            left = room._replace(num_batches=room.num_batches - 1) if fits else room
            self._counts.note(window.count, left)
        self.ran(given, metrics)
        return window, metrics, carry

    def run(self, task: Task, layout: Layout, state: TrainState, given: Given) -> Any:
        """What the program of a task returns."""
        return self.program(task, layout, state, given)(state=state, **given._asdict())

    def compiled(
        self, state: TrainState, given: Given, ahead: Ahead | None = None
    ) -> jax.stages.Compiled:
        """The program of an update, compiled now if it was not; nothing runs."""
        self.checks.numbers(state).replace(state.opt_state)
        task = update(self._phase(state), windowed=given.window is not None, ahead=ahead)
        program = self.program(task, self.layouts.of(state), state, given)
        return program.lower(state=state, **given._asdict()).compile()

    def program(self, task: Task, layout: Layout, state: TrainState, given: Given) -> Any:
        """The jitted program of a task, made at its first use."""
        if self.parts.raw_keys:
            refuse_raw_keys(state.model_state)
        return self.programs.get(task, layout, state, given, self.checks.before_first_use)

    def ran(self, given: Given, metrics: Metrics) -> None:
        """Take note of a program that was started with a batch."""
        self.in_flight.admit(metrics["loss"])
        if self.embeddings is not None:
            self.placing.ran(given.batch, metrics)

    def note(self, state: TrainState, layout: Layout) -> None:
        """Let a state that was made here know it, so that less of it is looked at again."""
        self.layouts.note(state, layout)
        state.made_by = self._mark

    def _update(
        self, task: Task, state: TrainState, given: Given
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run an update, and know of its result what is known without reading it."""
        if self._numbers is None:
            self._numbers = self.checks.numbers(state)
        if self._numbers.places:
            self._numbers.replace(state.opt_state)
        if self.embeddings is not None:
            self.placing.refuse_counted()
        layout = self.layouts.of(state)
        program = self.program(task, layout, state, given)
        so_far = None
        if self._is_counting:
            so_far = self._counts.get(counter_of(state, self.parts.sync))
        new_state, metrics, carry = program(state=state, **given._asdict())
        self.ran(given, metrics)
        self.note(new_state, layout)
        if given.window is not None and self.programs.donate:
            forget(given.window)
        if so_far is not None:  # count on, without asking the device
            counter = counter_of(new_state, self.parts.sync)
            self._counts.note(counter, so_far._replace(updates=so_far.updates + 1))
        return new_state, metrics, carry

    def _phase(self, state: TrainState) -> Phase | None:
        """Of the program of the next update; None where one program does for all."""
        return self.next_phase(state) if self.mode == "host" else None

    def refuse(self, state: TrainState) -> None:
        """Raise `ValueError` for what is no state of this step, or one whose buffers are gone."""
        if getattr(state, "made_by", None) is self._mark:
            refuse_donated(state)
            return
        refuse_unusable(state)
        refuse_state_of_others(state, self.parts)

    def refuse_window(self, window: Any, state: TrainState, weight: Any = ...) -> None:
        """Raise `ValueError` for what is no window of this state, or one that was used."""
        dense = state._replace(params=self.parts.lookup.dense(state.params))
        refuse_unusable_window(window, dense, weight)

    def _room_of(self, window: GradientWindow | None, num_batches: int) -> Room:
        """What the host knows of the room in a window, or plans for one that begins."""
        if window is not None:
            return self._counts.get(window.count) or Room(0, None)
        return Room(num_batches if self.embeddings is not None else 0, self._share())

    def _share(self) -> Hashable:
        leaves, structure = jax.tree.flatten(self._collected)
        return structure, tuple((x.shape, x.dtype) for x in leaves)
