"""The training loop and its hooks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import jax
import numpy as np

from .._support.checks import checked_int, checks_flags, warn_user
from .._support.types import AxisName, PyTree
from ..algorithms import shares_of_gossip
from ..mesh import AnyMesh, consensus
from ..transform import Every, ParameterTransform, as_schedule
from ..tree import add, leaf_names
from ._train_pipeline import (
    Partial,
    ScanBatches,
    ScanPipeline,
    StepResult,
    TrainPipeline,
    checked_accumulation,
)
from ._train_state import TrainState, update_count
from .step import mean_metrics, metric_weight, weighted_metrics


class Hook(Protocol):
    """A function that `js.train_loop` calls after some of its steps.

    Attributes:
      every: an int k (steps k, 2k, ...) or a `js.every` schedule.
    """

    @property
    def every(self) -> int | Every:
        """The steps after which the hook is called."""
        ...

    def __call__(self, result: StepResult) -> Mapping[str, Any] | None:
        """Act on a step's result; a returned mapping is merged into `result.reports`.

        A hook may set `result.state`, with which later hooks and the next step go on.
        """
        ...


@overload
def host_mean(metrics: Mapping[str, jax.Array]) -> dict[str, float | np.ndarray]: ...
@overload
def host_mean(metrics: jax.Array) -> float | np.ndarray: ...
def host_mean(metrics: Any) -> Any:
    """Wait for a step's metrics and return their means over the replicas.

    If the metrics hold "weight", since the step was called with weights, the means are weighted;
    replicas of weight 0 are left out. If they hold "loss_weight", since the loss function returns
    `(sum, weight)`, the mean of the loss is weighted by that: it is the quotient over all replicas.

    Args:
      metrics: arrays `(replicas, *s)` of numbers by name, as a step returns them, or one array.

    Returns:
      The mean of each metric over the replicas of this process, in a dict; of one array its mean
      alone. A mean is a float if s is (), else a float64 NumPy array of shape s; complex where the
      metric is. Metrics in a dict inside of another are called "outer/inner".

    Raises:
      ValueError: a metric is split inside replicas over several processes.

    Communication: none between replicas; device to host.
    """
    if not isinstance(metrics, Mapping):
        return host_mean({"metrics": metrics})["metrics"]
    weights = {
        name: _local_replicas(name, metrics[name])
        for name in ("weight", "loss_weight")
        if name in metrics and metrics[name].ndim == 1
    }
    means: dict[str, float | np.ndarray] = {}
    for name, value in zip(leaf_names(metrics), jax.tree.leaves(metrics), strict=True):
        each = _local_replicas(name, value)
        mean = np.mean(each, axis=0)
        weight = metric_weight(name, weights)
        # An idle replica reports zeros. If all replicas of this process are idle, the mean is 0.
        if weight is not None and weight.any():
            used = weight > 0
            mean = np.average(each[used], axis=0, weights=weight[used])
        means[name] = mean if mean.ndim else mean.item()
    return means


def _local_replicas(name: str, value: jax.Array) -> np.ndarray:
    """Return the values of this process's replicas, in their order: `(local replicas, *s)`."""
    # One shard per block: several devices may hold copies of it.
    shards = list({str(shard.index): shard for shard in value.addressable_shards}.values())
    blocks = [s.index[0].indices(value.shape[0]) for s in shards]
    replicas = sorted({row for block in blocks for row in range(*block)})
    kind = np.complex128 if np.iscomplexobj(value) else np.float64
    values = np.empty((len(replicas), *value.shape[1:]), kind)
    for shard, block in zip(shards, blocks, strict=True):
        first = replicas.index(block[0])
        values[first : first + len(range(*block)), *shard.index[1:]] = jax.device_get(shard.data)
    if values.size != sum(shard.data.size for shard in shards):
        raise ValueError(
            f"host_mean: {name!r} of `metrics` must not be split inside replicas, got "
            f"{value.sharding}."
        )
    return values


class Log:
    """A hook that writes the step's metrics, averaged over replicas, and earlier hooks' reports.

    Args:
      write: function called with one flat dict: step, metrics as `js.host_mean` returns them, and
        reports. A metric of one number per replica is a float, others are NumPy arrays.
      every: period in steps, or a schedule.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], *, every: int | Every = 10) -> None:
        as_schedule(every, "every")  # raises unless it is a period
        self.every = every
        self._write = write

    def __call__(self, result: StepResult) -> None:
        """Write one record."""
        self._write({"step": result.step, **host_mean(result.last_metrics), **result.reports})


class Evaluate:
    """A hook that evaluates the consensus model: the mean of the replicas.

    Args:
      evaluate: `evaluate(params, model_state) -> dict`, called with one averaged copy of each.
      mesh: the step's mesh.
      axis_name: the replica axis.
      every: period in steps, or a schedule.
      sync: the step's transform, `step.sync`, needed if it is your own and its `shares` define the
        weights of replicas. With None, the gossip algorithms of this library weight replicas and
        count parameters in flight, as `step.consensus` does; for all others it is the plain mean.
      whole: the argument `whole` of `js.consensus`.

    Communication: one all-reduce of parameters and model state over `axis_name` per evaluation,
      and one of 4 bytes if replicas are weighted (not counted in the step's report).
    """

    @checks_flags("Evaluate")
    def __init__(
        self,
        evaluate: Callable[[PyTree, PyTree], Mapping[str, Any]],
        *,
        mesh: AnyMesh,
        axis_name: AxisName = "replica",
        every: int | Every = 100,
        sync: ParameterTransform | None = None,
        whole: bool = True,
    ) -> None:
        if not callable(evaluate):
            raise ValueError(f"Evaluate: `evaluate` must be a function, got {evaluate!r}.")
        as_schedule(every, "every")  # raises unless it is a period
        self.every = every
        self._evaluate, self._mesh, self._axis_name = evaluate, mesh, axis_name
        self._sync, self._whole = sync, whole

    def __call__(self, result: StepResult) -> Mapping[str, Any]:
        """Return the evaluation of the consensus of the state after this step."""
        state = result.state
        if not isinstance(state, TrainState):
            raise ValueError(
                f"Evaluate: needs the state of a step of js.make_train_step, got "
                f"{type(state).__name__}: evaluate the step's `consensus(state)` in a hook."
            )
        mean = functools.partial(
            consensus, mesh=self._mesh, axis_name=self._axis_name, whole=self._whole
        )
        if self._sync is None:
            shares = shares_of_gossip((state.opt_state, state.exchange.local))
        else:
            shares = self._sync.shares(state.exchange)
        return self._evaluate(mean(state.params, shares=shares), mean(state.model_state))


_PREFETCH = 2  # default for iterables that only the loop iterates over


def train_loop(
    step: Callable[..., Any] | TrainPipeline,
    state: TrainState | None = None,
    batches: Iterable[PyTree] | None = None,
    *,
    num_steps: int | None = None,
    hooks: Sequence[Hook] = (),
    prefetch: int | None = None,
    accumulate: int = 1,
    partial: Partial = "step",
    steps_per_call: int = 1,
) -> Iterator[StepResult]:
    """Yield the result of each training step, after the hooks have run.

    More on each argument: [docs/api/loop.md](#details).

    Args:
      step: a step of `js.make_train_step`, also wrapped by `js.reports.measured`, or of
        `js.with_exchange`; or a training `js.TrainPipeline`, which has its own state and batches
        and continues from its position.
      state: the state to start from; its buffers are donated if the step donates.
      batches: one batch per step, or `accumulate` of them; or `js.train.uneven_batches(...)`.
      num_steps: the number of the last step: a state that counts k updates runs `num_steps` - k
        more, and that of a step of your own all. None continues until `batches` ends.
      hooks: each is called in order with the `StepResult` when its `every` is due. A dict that it
        returns is merged into `reports`, so later hooks see it.
      prefetch: number of batches that a thread loads and places on the devices ahead of their steps
        (`js.TrainPipeline`); never more than `num_steps` needs. 0 loads each batch when its step is
        next. None (the default) means 0 for an iterator, such as a generator, and 2 for others.
      accumulate: number of batches per step. The step uses the mean of their gradients, and its
        metrics are their means. (`js.make_train_step(accumulate=)` splits each batch.)
      partial: treatment of fewer batches at the end: `"step"`, `"discard"` or `"error"`.
      steps_per_call: number of updates that one program runs, by `step.scan`; the default is 1. A
        call also ends after a step at which a hook is due, and at `num_steps`.

    Yields:
      A `StepResult` per step, also of a pipeline that accumulates; with `steps_per_call` > 1 one
      per call, whose `metrics` have a first dimension of `num_updates`. Stopping early (`break`) is
      safe at any step; it drops batches that were loaded ahead, except those of a pipeline.

    Raises:
      ValueError: num_steps < 0, prefetch < 0; a hook without `every`; a pipeline that
        evaluates, or one together with state, batches, prefetch, accumulate or steps_per_call; no
        state or batches; steps_per_call < 1, or > 1 for what has no such call; `batches` ended
        before `num_steps`, or with `partial="error"` in the middle of a step; ids that are in no
        table, by `step.refuse_ids`, also after the last step.
      UserWarning: the state has done `num_steps` steps already, so that nothing runs.

    Communication: the step's; hooks state their own.

    Example:
      for result in js.train_loop(step, state, batches, num_steps=100): ...
    """
    end = None if num_steps is None else checked_int("`num_steps` counts steps and", num_steps, 0)
    checked_accumulation(accumulate, partial)
    per_call = checked_int("`steps_per_call` counts updates and", steps_per_call, 1)
    hooks = tuple(hooks)
    for hook in hooks:
        if not hasattr(hook, "every"):
            what = getattr(hook, "__name__", type(hook).__name__)
            raise ValueError(
                "`hooks` must have an attribute `every`, as js.train.Log(write, every=10), got "
                f"{what}: call it in the loop's body."
            )
    schedules = [as_schedule(hook.every, "every") for hook in hooks]
    if isinstance(step, TrainPipeline):
        has_others = any(x is not None for x in (state, batches, prefetch)) or accumulate != 1
        if has_others or partial != "step":
            raise ValueError(
                "`step` is a js.TrainPipeline with its own state and batches: leave `state`, "
                "`batches`, `prefetch`, `accumulate` and `partial` out."
            )
        if per_call > 1:
            raise ValueError(
                f"`steps_per_call`={per_call} needs a step, and a js.TrainPipeline calls its own."
            )
        if not step.trains:
            raise ValueError("`step` is a js.TrainPipeline that evaluates: iterate it.")
        done = _completed_steps(step.state, end)
        return _run(contextlib.nullcontext(step), end, hooks, schedules, done)
    if state is None or batches is None or isinstance(batches, TrainPipeline):
        raise ValueError("`state` and `batches` must be given where `step` is no js.TrainPipeline.")
    if prefetch is None:
        prefetch = 0 if isinstance(batches, Iterator) else _PREFETCH
    done = _completed_steps(state, end)
    if per_call > 1:
        if accumulate > 1:
            raise ValueError(
                f"`steps_per_call`={per_call} needs `accumulate`=1, got {accumulate}: give larger "
                "batches, which js.make_train_step(accumulate=) splits."
            )
        # The class is asked, since one in js.reports.measured has the attributes of the step in it.
        if not hasattr(type(step), "scan"):
            raise ValueError(
                f"`steps_per_call`={per_call} needs a step of js.make_train_step or "
                f"js.with_exchange without a wrapper, got {type(step).__name__}."
            )
        length = functools.partial(_call_length, per_call, end, schedules)
        calls = ScanBatches(iter(batches), length, done)
        pipeline = ScanPipeline(step, state, calls, depth=prefetch)
        return _run(pipeline, end, hooks, schedules, done)
    pipeline = TrainPipeline(
        step, state, batches, depth=prefetch, accumulate=accumulate, partial=partial
    )
    if end is not None:
        pipeline._limit_batches(max(0, end - done) * accumulate)
    return _run(pipeline, end, hooks, schedules, done)


def _call_length(per_call: int, end: int | None, schedules: Sequence[Every], done: int) -> int:
    """Return the number of updates of the call after `done` updates; 0 after the last."""
    most = per_call if end is None else min(per_call, max(0, end - done))
    for length in range(1, most):
        if any(schedule(done + length) for schedule in schedules):
            return length
    return most


def _completed_steps(state: Any, end: int | None) -> int:
    """Return the number of steps that the state has done."""
    done = update_count(state)
    if end is not None and done >= end > 0:
        warn_user(
            f"train_loop: the state has done {done} steps and `num_steps`={end} is the number of "
            f"the last one, so nothing runs: for n more steps pass `num_steps`={done} + n."
        )
    return done


def _run(
    pipeline: contextlib.AbstractContextManager[TrainPipeline],
    num_steps: int | None,
    hooks: tuple[Hook, ...],
    schedules: Sequence[Every],
    done: int,
) -> Iterator[StepResult]:
    with pipeline as results:
        while num_steps is None or done < num_steps:
            result = _next_update(results)
            if result is None:
                if num_steps is not None:
                    raise ValueError(f"`batches` ended after {done} of `num_steps`={num_steps}.")
                return
            done += result.num_updates or 1
            result.step = done
            state = result.state
            for hook, is_due in zip(hooks, schedules, strict=True):
                if is_due(done):
                    result.reports.update(_checked_report(hook, hook(result)))
            if result.state is not state:
                results.state = result.state
            yield result
        results.refuse_ids()


def _checked_report(hook: Hook, report: Any) -> Mapping[str, Any]:
    """Return what a hook reports; {} for None."""
    if report is None or isinstance(report, Mapping):
        return report or {}
    raise ValueError(
        f"`hooks`: a hook must return None or a dict of reports, got {report!r} from {hook!r}."
    )


def _next_update(pipeline: TrainPipeline) -> StepResult | None:
    """Return the result of the next update, with the means of metrics over its batches."""
    metrics: list[dict[str, jax.Array]] = []
    for result in pipeline:
        metrics.append(result.metrics)
        if result.is_update:
            result.metrics = metrics[0] if len(metrics) == 1 else _means(metrics)
            return result
    return pipeline.partial_update


@jax.jit
def _means(batches: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Return each replica's mean of the metrics over batches, weighted if batches have weights.

    They are in at least float32; "weight" and "loss_weight" are the sums of the weights, and a
    replica that was idle in all batches has zeros. Metrics that only the last batch has, such as
    the loss scale, describe the update and are returned unchanged.
    """
    terms = [weighted_metrics({name: batch[name] for name in batches[0]}) for batch in batches]
    sums = functools.reduce(functools.partial(jax.tree.map, add), terms)
    return {**batches[-1], **mean_metrics(sums)}
