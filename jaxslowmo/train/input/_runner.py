"""What a pipeline does with a batch whose turn it is: an update, or an evaluation."""

from collections.abc import Callable
from typing import Any, Protocol

from ..._typing import PyTree
from .._hooks import StepResult
from ..step import bounded
from ._stages import Prepared


class Runner(Protocol):
    """Takes the batches of a pipeline one after the other.

    Attributes:
      state: what the next batch meets.
      position: of the iterator after the last batch that is in the state.
    """

    @property
    def state(self) -> PyTree:
        """What the next batch meets."""
        ...

    position: Any

    def __call__(self, batch: Prepared) -> Any:
        """The result of a batch."""
        ...


class Training:
    """One update per batch.

    Args:
      step: `step(state, batch) -> (state, metrics)`, with a third argument for weights.
      state: where to start.
    """

    def __init__(self, step: Callable[..., Any], state: PyTree) -> None:
        self.state, self.position = state, None
        self._step, self._done = _of_few(step), 0
        self._next_phase = getattr(step, "next_phase", None)

    def __call__(self, batch: Prepared) -> StepResult:
        """The update."""
        phase = () if self._next_phase is None else self._next_phase(self.state)
        found = self._step(self.state, *_arguments(batch))
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                "`step` must return `(state, metrics)` where `state` is one to train, got "
                f"{type(found).__name__}; to evaluate, give a pipeline or a function that returns "
                "the state."
            )
        self.state, metrics = found
        self.position = batch.position
        self._done += 1
        return StepResult(self._done, self.state, metrics, phase, position=batch.position)


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


def _arguments(batch: Prepared) -> tuple[Any, ...]:
    return (batch.batch,) if batch.weight is None else (batch.batch, batch.weight)


def _of_few(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of which few are unfinished at once: those of `make_train_step` see to it."""
    is_ours = hasattr(step, "place") or hasattr(getattr(step, "__self__", None), "place")
    return step if is_ours else bounded(step)
