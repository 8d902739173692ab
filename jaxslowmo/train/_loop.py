"""The training loop: a generator of step results, with hooks."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from .._support.checks import as_int
from .._support.types import Phase, PyTree
from ..transform import as_schedule
from ..tree import at_least_float32
from ._hooks import Hook, StepResult
from ._state import TrainState
from .input import Partial, TrainPipeline, at_most, check_accumulation

_PREFETCH = 2  # where nobody can tell


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
    step: LoopStep | TrainPipeline,
    state: TrainState | None = None,
    batches: Iterable[PyTree] | None = None,
    *,
    num_steps: int | None = None,
    hooks: Sequence[Hook] = (),
    start: int = 0,
    prefetch: int | None = None,
    accumulate: int = 1,
    partial: Partial = "step",
) -> Iterator[StepResult]:
    """Run steps and yield after each; hooks run first.

    Args:
      step: made by `js.make_train_step`, or such a one in `js.measured`. Or a `js.TrainPipeline`
        that trains, which has state and batches and goes on from where it is.
      state: where to start; its buffers are donated if the step does so.
      batches: one batch per step, or `accumulate` of them; or `js.uneven_batches(...)`.
      num_steps: at which step to end; None goes on until `batches` ends.
      hooks: each is called with the `StepResult` when its `every` is due, in order; a dict that it
        returns is merged into `reports`, so later hooks see it.
      start: steps that were done before, where a run is resumed: the next is `start + 1`.
      prefetch: batches that a thread loads, and that are put on the devices, ahead of their steps
        (`js.TrainPipeline`); never more than `num_steps` needs. 0: each is loaded when its step is
        next. None: 0 for an iterator, such as a generator, since the caller may read its position
        (`get_state()`) or go on with it; 2 for what the loop makes an iterator of, such as a list
        or a loader, of which nobody else takes batches. With `result.position` in place of
        `get_state()` an iterator can be given 2, too.
      accumulate: so many batches make one step, of the mean of their gradients, and its metrics are
        their means; see `js.TrainPipeline`. (`js.make_train_step(accumulate=)` splits each batch.)
      partial: what becomes of fewer batches at the end: `"step"`, `"discard"` or `"error"`.

    Yields:
      A `StepResult` per step, also of a pipeline that accumulates. Stopping early (`break`) is safe
      at any step; batches that were loaded ahead are dropped then, but for those of a pipeline.

    Raises:
      ValueError: num_steps < 0, start < 0, prefetch < 0, a hook without `every`, a pipeline that
        evaluates, or beside a state, batches, prefetch or accumulate; no state or batches;
        `batches` ended before `num_steps`, or with `partial="error"` in the middle of a step; ids
        that are in no table, by `step.refuse_ids`, also behind the last step.

    Communication: the step's; hooks state their own.

    Example:
      for result in js.train_loop(step, state, batches, num_steps=100): ...
    """
    end = None if num_steps is None else _count("num_steps", num_steps)
    done = _count("start", start)
    check_accumulation(accumulate, partial)
    for hook in hooks:
        if not hasattr(hook, "every"):
            what = getattr(hook, "__name__", type(hook).__name__)
            raise ValueError(
                "`hooks` must be callables with an attribute `every`, such as js.Log(write, "
                f"every=10), got {what} without one: give it one, or call it in the loop's body."
            )
    if isinstance(step, TrainPipeline):
        given = any(x is not None for x in (state, batches, prefetch)) or accumulate != 1
        if given or partial != "step":
            raise ValueError(
                "`step` is a js.TrainPipeline, which has a state, batches, a depth and how many "
                "batches it accumulates: leave `state`, `batches`, `prefetch`, `accumulate` and "
                "`partial` out."
            )
        if not step.trains:
            raise ValueError(
                "`step` is a js.TrainPipeline that evaluates: its results are no steps. Iterate it."
            )
        return _run(contextlib.nullcontext(step), end, tuple(hooks), done)
    if state is None or batches is None or isinstance(batches, TrainPipeline):
        raise ValueError(
            "`state` and `batches` must be given where `step` is no js.TrainPipeline; to train "
            "with one, js.train_loop(pipeline)."
        )
    if prefetch is None:
        prefetch = 0 if isinstance(batches, Iterator) else _PREFETCH
    left = None if end is None else max(0, end - done)
    pipeline = TrainPipeline(
        step,
        state,
        at_most(iter(batches), left, accumulate),
        depth=prefetch,
        accumulate=accumulate,
        partial=partial,
    )
    return _run(pipeline, end, tuple(hooks), done)


def _count(argument: str, value: Any) -> int:
    number = as_int(value, 0)
    if number is None:
        raise ValueError(f"`{argument}` counts steps and must be an int >= 0, got {value!r}.")
    return number


def _run(
    pipeline: contextlib.AbstractContextManager[TrainPipeline],
    num_steps: int | None,
    hooks: tuple[Hook, ...],
    done: int,
) -> Iterator[StepResult]:
    with pipeline as results:
        while num_steps is None or done < num_steps:
            result = _next_update(results)
            if result is None:
                if num_steps is not None:
                    raise ValueError(
                        f"`batches` ended after {done} of `num_steps`={num_steps} steps."
                    )
                return
            done += 1
            result.step = done
            for hook in hooks:
                if as_schedule(hook.every, "every")(done):
                    result.reports.update(hook(result) or {})
            yield result
        results.refuse_ids()


def _next_update(pipeline: TrainPipeline) -> StepResult | None:
    """The result of the next update, with the means of metrics over its batches."""
    seen: list[dict[str, jax.Array]] = []
    for result in pipeline:
        seen.append(result.metrics)
        if result.is_update:
            result.metrics = seen[0] if len(seen) == 1 else _means(seen)
            return result
    return pipeline.partial_update


@jax.jit
def _means(batches: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Return each replica's means of the metrics of batches, weighted where these have weights.

    They are in at least float32; "weight" is the sum of the weights, and a replica that was idle in
    all has zeros. What the last batch alone tells is of the update that it made, such as the loss
    scale, and stays as it is.
    """
    count = len(batches)
    weights = [batch["weight"] for batch in batches] if "weight" in batches[0] else None

    def mean(name: str) -> jax.Array:
        values = [batch[name].astype(at_least_float32(batch[name].dtype)) for batch in batches]
        if weights is None:
            return sum(values[1:], values[0]) / count
        # An idle replica's metrics are zeros.
        shares = [w.reshape(-1, *(1,) * (values[0].ndim - 1)) for w in weights]
        total, *rest = (w * x for w, x in zip(shares, values, strict=True))
        whole = sum(shares[1:], shares[0])
        return sum(rest, total) / jnp.where(whole > 0, whole, jnp.inf)

    means = {name: mean(name) for name in batches[0] if name != "weight"}
    means = {**batches[-1], **means}
    if weights is None:
        return means
    return {**means, "weight": sum(weights[1:], weights[0])}
