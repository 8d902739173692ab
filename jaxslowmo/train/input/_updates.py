"""The use of a batch by a pipeline: as an update of the state, or as an evaluation."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from ..._support.types import Phase, PyTree
from .._train_state import TrainState, updates_of
from ..batches import count_here
from ..step import BoundedStep
from ._feed import Prepared, step_method

Partial = Literal["step", "discard", "error"]


@dataclass
class StepResult:
    """The result of one step.

    Attributes:
      step: number of updates so far, this one included: the state's own count, unless `start` of
        `js.train_loop` says otherwise.
      state: state after the step. The next step donates its buffers, so read it before that.
      metrics: arrays on the devices, stacked per replica; reading them waits for the step.
      phase: what the step exchanged, `()` for a local step; see `js.phase_name`.
      reports: what the hooks returned, merged in their order.
      position: what `get_state()` of the batches returned right after the batch of this step; None
        if they have no `get_state`. It does not include batches that were loaded ahead, or those
        of an incomplete update. Save it with the state.
      is_update: False for a batch whose gradients wait for those of the following batches, with
        `js.TrainPipeline(accumulate=...)`; `step` is then the number of the last update.
    """

    step: int
    state: TrainState
    metrics: dict[str, jax.Array]
    phase: Phase
    reports: dict[str, Any] = field(default_factory=dict)
    position: Any = None
    is_update: bool = True


class Training:
    """A training run: one update per batch, or per `accumulate` batches.

    Batch c = 0, 1, 2, ... begins a window of gradients where c % A == 0 and ends it with an update
    where (c + 1) % A == 0.

    Args:
      step: `step(state, batch) -> (state, metrics)`, with a third argument for weights.
      state: initial state.
      accumulate: A, the number of batches per update.
      partial: what to do with a window that is incomplete when the batches end.

    Attributes:
      partial_update: result of the update that `end` made of an incomplete window, until the next
        batch; None otherwise.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: PyTree,
        accumulate: int = 1,
        partial: Partial = "step",
    ) -> None:
        self.state, self.position = state, None
        self.partial_update: StepResult | None = None
        self._step: Any = _bounded(step)
        self._num_updates = updates_of(state)
        self._next_phase = getattr(step, "next_phase", None)
        self._accumulate, self._partial = accumulate, partial
        self._window: Any = None
        self._collected = 0
        self._position: Any = None  # the iterator's, after the last batch in the window
        if accumulate > 1 and not (hasattr(step, "collect") and hasattr(step, "apply")):
            raise ValueError(
                f"`accumulate`={accumulate} needs a step of js.make_train_step, got "
                f"{getattr(step, '__name__', type(step).__name__)}."
            )

    def __call__(self, batch: Prepared) -> StepResult:
        """Add a batch to the window, and update the state if the window is complete."""
        self.partial_update = None
        if self._collected + 1 < self._accumulate:
            return self._collect(batch)
        windowed = {"window": self._window} if self._accumulate > 1 else {}
        phase = self._phase()
        result = self._step(self.state, *_arguments(batch), **windowed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "`step` must return `(state, metrics)` where `state` is one to train, got "
                f"{type(result).__name__}; to evaluate, give a pipeline or a function that returns "
                "the state."
            )
        return self._updated(result, phase, batch.position)

    def end(self) -> None:
        """Treat an incomplete window as `partial` says.

        Raises:
          ValueError: `partial="error"` and the window is incomplete; its batches stay in it.
        """
        self.partial_update = None
        if not self._collected:
            return
        if self._partial == "error":
            raise ValueError(
                f"`batches` ended after {self._collected} of the {self._accumulate} of an update "
                '(`accumulate`), and `partial`="error". They wait: batches of another iterator '
                "complete the update."
            )
        if self._partial == "discard":
            self._reset_window()
            return
        phase = self._phase()
        result = self._step.apply(self.state, self._window)
        self.partial_update = self._updated(result, phase, self._position)

    def _collect(self, batch: Prepared) -> StepResult:
        collect: Any = self._step.collect
        self._window, metrics = collect(
            self.state,
            *_arguments(batch),
            window=self._window,
            num_batches=self._accumulate - 1,
        )
        self._collected += 1
        self._position = batch.position
        return StepResult(
            self._num_updates, self.state, metrics, (), position=self.position, is_update=False
        )

    def _updated(self, result: tuple[PyTree, Any], phase: Phase, position: Any) -> StepResult:
        self.state, metrics = result
        self.position = position
        self._num_updates += 1
        self._reset_window()
        return StepResult(self._num_updates, self.state, metrics, phase, position=position)

    def _reset_window(self) -> None:
        self._window, self._collected, self._position = None, 0, None

    def _phase(self) -> Phase:
        return () if self._next_phase is None else self._next_phase(self.state)


class Evaluation:
    """An evaluation of each batch with the current state of another pipeline.

    Args:
      step: `step(state, batch) -> anything`, with a third argument for weights.
      read: function that returns the current state.
    """

    def __init__(self, step: Callable[..., Any], read: Callable[[], PyTree]) -> None:
        self._step, self._read, self.position = _bounded(step), read, None

    @property
    def state(self) -> PyTree:
        """The current state."""
        return self._read()

    def __call__(self, batch: Prepared) -> Any:
        """Return the step's result for a batch."""
        result = self._step(self.state, *_arguments(batch))
        self.position = batch.position
        return result

    def end(self) -> None:
        """Do nothing: an evaluation has no window."""


def _arguments(batch: Prepared) -> tuple[Any, ...]:
    return (batch.batch,) if batch.weight is None else (batch.batch, batch.weight)


def _bounded(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that limits how many calls run at once; a `TrainStep` does so by itself."""
    return step if step_method(step, "place") else BoundedStep(step)


_MAX_COUNTS = 32  # steps whose counts stay on the devices, so that reading them does not wait


class LookaheadStep:
    """A step that also does the table exchange of the next batch; has the step's attributes.

    Args:
      ahead: what `step.ahead(...)` returned.
      step: step of `js.make_train_step`, with embedding tables.
      upcoming: function that returns the batch after the one in use; None if there is none.
    """

    def __init__(self, ahead: Any, step: Any, upcoming: Callable[[], Prepared | None]) -> None:
        self._ahead, self._step, self._upcoming = ahead, step, upcoming
        self._requested: Any = None
        self._requested_batch: PyTree = None
        self._counts: deque[dict[str, Any]] = deque()
        self._num_resent = self._num_requested = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(
        self, state: PyTree, batch: PyTree, weight: Any = None, **options: Any
    ) -> tuple[PyTree, Any]:
        """Run `step`, and at the same time the table requests of the next batch."""
        requested = (
            self._requested if self._requested_batch is batch else self._ahead.prime(state, batch)
        )
        prepared = self._upcoming()
        upcoming = None if prepared is None else prepared.batch
        new_state, metrics, self._requested = self._ahead(
            state, batch, requested, upcoming, weight, **options
        )
        self._requested_batch = upcoming
        self._counts.append({n: x for n, x in metrics.items() if n.startswith("embeddings/")})
        self._read(_MAX_COUNTS)
        return new_state, metrics

    def collect(self, *args: Any, **options: Any) -> tuple[PyTree, Any]:
        """Run `step.collect`, and at the same time the table requests of the next batch."""
        return self(*args, collect=True, **options)

    @property
    def resent_share(self) -> float | None:
        """The fraction of the requested rows that were sent again; None unless `mode="patched"`."""
        self._read(0)
        if self._ahead.mode != "patched" or not self._num_requested:
            return None
        return self._num_resent / self._num_requested

    def _read(self, num_kept: int) -> None:
        """Add up the counts of all but the last `num_kept` steps, and wait for those."""
        while len(self._counts) > num_kept:
            for name, count in self._counts.popleft().items():
                if name.endswith("/resent"):
                    self._num_resent += count_here(count)
                elif name.endswith("/asked"):
                    self._num_requested += count_here(count)
