"""What a pipeline does with a batch whose turn it is: an update, or an evaluation."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from ..._support.types import Phase, PyTree
from .._train_state import TrainState
from ..batches import count_here
from ..step import bounded
from ._feed import Prepared, of_step

Partial = Literal["step", "discard", "error"]


@dataclass
class StepResult:
    """What one step left.

    Attributes:
      step: number of this step in the loop, from 1.
      state: the state after it. The next step donates its buffers: read it before going on.
      metrics: stacked per replica, on the devices; reading them waits for the step.
      phase: what was exchanged, `()` for a local step; see `js.phase_name`.
      reports: what hooks returned, merged in their order.
      position: what the `get_state()` of the batches said right after the batch of this step, None
        where they have none: batches that were loaded ahead are not in it, nor those of an update
        that is not complete. Save it with the state.
      is_update: False for a batch whose gradients wait for those of the batches that follow, with
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
    """One update per batch, or per `accumulate` of them.

    Batch c = 0, 1, 2, ... begins a window of gradients where c % A == 0 and ends it with an update
    where (c + 1) % A == 0.

    Args:
      step: `step(state, batch) -> (state, metrics)`, with a third argument for weights.
      state: where to start.
      accumulate: A.
      partial: what becomes of a window that the batches leave open.

    Attributes:
      partial_update: the update of such a window, since the last batch; None where there was none.
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
        self._step: Any = _of_few(step)
        self._done = 0
        self._next_phase = getattr(step, "next_phase", None)
        self._accumulate, self._partial = accumulate, partial
        self._window: Any = None
        self._collected = 0
        self._position: Any = None  # of the last batch in the window
        if accumulate > 1 and not (hasattr(step, "collect") and hasattr(step, "apply")):
            raise ValueError(
                f"`accumulate`={accumulate} needs a step of js.make_train_step, got "
                f"{getattr(step, '__name__', type(step).__name__)}."
            )

    def __call__(self, batch: Prepared) -> StepResult:
        """The batch into its window, and the update where it is the last one there."""
        self.partial_update = None
        if self._collected + 1 < self._accumulate:
            return self._collect(batch)
        windowed = {"window": self._window} if self._accumulate > 1 else {}
        phase = self._phase()
        found = self._step(self.state, *_arguments(batch), **windowed)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                "`step` must return `(state, metrics)` where `state` is one to train, got "
                f"{type(found).__name__}; to evaluate, give a pipeline or a function that returns "
                "the state."
            )
        return self._updated(found, phase, batch.position)

    def end(self) -> None:
        """As `partial` says, of the window that is open.

        Raises:
          ValueError: "error" and some batches wait in a window, where they stay.
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
            self._forget()
            return
        phase = self._phase()
        found = self._step.apply(self.state, self._window)
        self.partial_update = self._updated(found, phase, self._position)

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
            self._done, self.state, metrics, (), position=self.position, is_update=False
        )

    def _updated(self, found: tuple[PyTree, Any], phase: Phase, position: Any) -> StepResult:
        self.state, metrics = found
        self.position = position
        self._done += 1
        self._forget()
        return StepResult(self._done, self.state, metrics, phase, position=position)

    def _forget(self) -> None:
        self._window, self._collected, self._position = None, 0, None

    def _phase(self) -> Phase:
        return () if self._next_phase is None else self._next_phase(self.state)


class Evaluation:
    """`step` of each batch, with the state of another pipeline as it is then.

    Args:
      step: `step(state, batch) -> anything`, with a third argument for weights.
      read: returns the state.
    """

    def __init__(self, step: Callable[..., Any], read: Callable[[], PyTree]) -> None:
        self._step, self._read, self.position = _of_few(step), read, None

    @property
    def state(self) -> PyTree:
        """As it is now."""
        return self._read()

    def __call__(self, batch: Prepared) -> Any:
        """What the step returns."""
        found = self._step(self.state, *_arguments(batch))
        self.position = batch.position
        return found

    def end(self) -> None:
        """Nothing is left open."""


def _arguments(batch: Prepared) -> tuple[Any, ...]:
    return (batch.batch,) if batch.weight is None else (batch.batch, batch.weight)


def _of_few(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of which few are unfinished at once: those of `make_train_step` see to it."""
    return step if of_step(step, "place") else bounded(step)


_KEPT = 32  # counts of so many steps are left on the devices


class Beside:
    """Calls a step and hands it the batch that comes next; has the step's attributes.

    Args:
      ahead: `step.ahead(...)`.
      step: of `js.make_train_step`, with tables.
      upcoming: returns the batch after the one that is used, None where there is none.
    """

    def __init__(self, ahead: Any, step: Any, upcoming: Callable[[], Prepared | None]) -> None:
        self._ahead, self._step, self._upcoming = ahead, step, upcoming
        self._asked: Any = None
        self._asked_for: PyTree = None
        self._counts: deque[dict[str, Any]] = deque()
        self._resent = self._needed = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(
        self, state: PyTree, batch: PyTree, weight: Any = None, **options: Any
    ) -> tuple[PyTree, Any]:
        """`step`, and beside it what the next batch asks for."""
        asked = self._asked if self._asked_for is batch else self._ahead.prime(state, batch)
        found = self._upcoming()
        upcoming = None if found is None else found.batch
        done, metrics, self._asked = self._ahead(state, batch, asked, upcoming, weight, **options)
        self._asked_for = upcoming
        self._counts.append({n: x for n, x in metrics.items() if n.startswith("embeddings/")})
        self._read(_KEPT)
        return done, metrics

    def collect(self, *args: Any, **options: Any) -> tuple[PyTree, Any]:
        """`step.collect`, likewise."""
        return self(*args, collect=True, **options)

    @property
    def resent_share(self) -> float | None:
        """Of the rows that were asked for, the part that was sent again; None where none can be."""
        self._read(0)
        if self._ahead.mode != "patched" or not self._needed:
            return None
        return self._resent / self._needed

    def _read(self, kept: int) -> None:
        """Add up the counts of the oldest steps, which have ended or are waited for."""
        while len(self._counts) > kept:
            for name, count in self._counts.popleft().items():
                if name.endswith("/resent"):
                    self._resent += count_here(count)
                elif name.endswith("/asked"):
                    self._needed += count_here(count)
