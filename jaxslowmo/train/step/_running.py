"""The programs of a step, run, and what is known of their results without reading them."""

from collections.abc import Hashable
from typing import Any, Literal

import jax
from jax.core import Tracer

from ..._typing import PyTree
from ..._warn import warn_once
from ...mesh import AnyMesh
from .._raw_keys import refuse_raw_keys
from .._state import Layout, TrainState
from ..batches import HostBatch
from ._host import HostCounts, Room, counter_of
from ._in_flight import StepsInFlight
from ._layouts import Layouts
from ._placing import Placing
from ._programs import Programs, Task, add_to_window, open_window
from ._state_checks import StateChecks
from ._usable import forget
from .update import Ahead, Carry, Given, GradientWindow, Metrics, StepParts

Mode = Literal["traced", "host"]


class Running:
    """The part of a training step that runs its programs.

    Attributes:
      mesh: the mesh it runs on.
      axis_name: the replica axis.
      mode: `"traced"` or `"host"`.
      embeddings: the tables; None without.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self._parts = parts
        self.mesh, self.axis_name, self.mode = mesh, parts.axis_name, mode
        self.embeddings = None if parts.tables is None else parts.tables.embeddings
        warn = warn_once()
        self._checks = StateChecks(parts, mesh, mode, warn)
        self._counts = HostCounts()
        self._layouts = Layouts(mesh, parts.axis_name, parts.tables, parts.sync)
        self._programs = Programs(parts, mesh, self._layouts, donate, warn)
        self._in_flight = StepsInFlight()
        self._placing = Placing(mesh, parts.axis_name, host_batch, self._layouts, self.embeddings)
        self._collected: PyTree | None = None  # types of a device's part of the last such batch

    def _program(self, task: Task, layout: Layout, state: TrainState, given: Given) -> Any:
        """The compiled program of a task, made at its first use."""
        if self._parts.raw_keys:
            refuse_raw_keys(state.model_state)
        return self._programs.get(task, layout, state, given, self._checks.before_first_use)

    def _collect(
        self, layout: Layout, state: TrainState, given: Given, num_batches: int, ahead: Ahead
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Run a program that adds to a window, which begins here where there is none."""
        self._placing.refuse_counted()
        self._collected = self._placing.share(given.batch, layout)
        room = self._room_of(given.window, num_batches)
        if given.window is None:
            first = Given(given.batch, given.weight)
            program = self._program(open_window(room.num_batches), layout, state, first)
            given = given._replace(window=program(state, *first))
        fits = self.embeddings is None or (room.num_batches > 0 and room.share == self._share())
        task = add_to_window(ahead, fits=fits)
        window, metrics, carry = self._program(task, layout, state, given)(state, *given)
        if room.num_batches and not isinstance(window.count, Tracer):
            left = room._replace(num_batches=room.num_batches - 1) if fits else room
            self._counts.note(window.count, left)
        self._in_flight.admit(metrics)
        self._placing.ran(given.batch, metrics)
        return window, metrics, carry

    def _room_of(self, window: GradientWindow | None, num_batches: int) -> Room:
        """What the host knows of the room in a window, or plans for one that begins."""
        if window is not None:
            return self._counts.get(window.count) or Room(0, None)
        return Room(num_batches if self.embeddings is not None else 0, self._share())

    def _share(self) -> Hashable:
        leaves, structure = jax.tree.flatten(self._collected)
        return structure, tuple((x.shape, x.dtype) for x in leaves)

    def _update(
        self, task: Task, layout: Layout, state: TrainState, given: Given
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run the program of an update, and know of its result what is known without reading it."""
        self._checks.numbers(state).replace(state.opt_state)
        self._placing.refuse_counted()
        program = self._program(task, layout, state, given)
        so_far = self._counts.get(counter_of(state, self._parts.sync))
        new_state, metrics, carry = program(state, *given)
        self._in_flight.admit(metrics)
        self._placing.ran(given.batch, metrics)
        self._layouts.note(new_state, layout)
        if given.window is not None and self._programs.donate:
            forget(given.window)
        if so_far is not None:  # count on, without asking the device
            counter = counter_of(new_state, self._parts.sync)
            self._counts.note(counter, so_far._replace(updates=so_far.updates + 1))
        return new_state, metrics, carry
