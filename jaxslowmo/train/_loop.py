"""The training loop: a generator of step results, with hooks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from .._typing import Phase, PyTree
from ._hooks import Hook, StepResult, is_hook_due
from ._state import TrainState
from ._uneven import WeightedBatch


class LoopStep(Protocol):
    """What the loop needs of a step: a `TrainStep`, or what stands in its place."""

    def next_phase(self, state: TrainState) -> Phase:
        """What the next update exchanges beside gradients."""
        ...

    def __call__(
        self, state: TrainState, batch: PyTree, weight: Any = None
    ) -> tuple[TrainState, Any]:
        """One update: the new state and metrics."""
        ...


def train_loop(
    step: LoopStep,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    num_steps: int | None = None,
    hooks: Sequence[Hook] = (),
    start: int = 0,
) -> Iterator[StepResult]:
    """Run steps and yield after each; hooks run first.

    Args:
      step: made by `js.make_train_step`, or such a one in `js.measured`.
      state: where to start; its buffers are donated if the step does so.
      batches: one batch per step, or `js.uneven_batches(...)`.
      num_steps: at which step to end; None goes on until `batches` ends.
      hooks: each is called with the `StepResult` when its `every` is due, in order; a dict that it
        returns is merged into `reports`, so later hooks see it.
      start: steps that were done before, where a run is resumed: the next is `start + 1`.

    Yields:
      A `StepResult` per step. Stopping early (`break`) is safe at any step.

    Raises:
      ValueError: num_steps < 0, start < 0, a hook without `every`, or `batches` ended before
        `num_steps`.

    Communication: the step's; hooks state their own.

    Example:
      for result in js.train_loop(step, state, batches, num_steps=100): ...
    """
    if num_steps is not None and num_steps < 0:
        raise ValueError(f"`num_steps` must be >= 0, got {num_steps}.")
    if start < 0:
        raise ValueError(f"`start` must be >= 0, got {start}.")
    for hook in hooks:
        if not hasattr(hook, "every"):
            what = getattr(hook, "__name__", type(hook).__name__)
            raise ValueError(
                "`hooks` must be callables with an attribute `every`, such as js.Log(write, "
                f"every=10), got {what} without one: give it one, or call it in the loop's body."
            )
    return _run(step, state, iter(batches), num_steps, tuple(hooks), start)


def _run(
    step: LoopStep,
    state: TrainState,
    batches: Iterator[PyTree],
    num_steps: int | None,
    hooks: tuple[Hook, ...],
    done: int,
) -> Iterator[StepResult]:
    while num_steps is None or done < num_steps:
        try:
            batch = next(batches)
        except StopIteration:
            if num_steps is not None:
                raise ValueError(
                    f"`batches` ended after {done} of `num_steps`={num_steps} steps."
                ) from None
            return
        phase = step.next_phase(state)
        if isinstance(batch, WeightedBatch):
            state, metrics = step(state, batch.batch, batch.weight)
        else:
            state, metrics = step(state, batch)
        done += 1
        result = StepResult(done, state, metrics, phase)
        for hook in hooks:
            if is_hook_due(hook, done):
                result.reports.update(hook(result) or {})
        yield result
