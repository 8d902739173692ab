"""Pipelines that load batches and put them on the devices ahead of the steps that use them.

The last one, of `train_loop(steps_per_call=)`, runs several updates in a program, by `step.scan`.
"""

import contextlib
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._support.checks import as_number, check_choice, checked_int, checks_flags
from .._support.types import Phase, PyTree
from ._batches import as_arrays, local_sum, stack
from ._loader import Batch, Clock, Loader, SharedIterator, copy_leaf, shared_iterator
from ._train_state import TrainState, update_count
from .step import AheadMode, BoundedStep

Partial = Literal["step", "discard", "error"]
Stage = Callable[[PyTree], PyTree]
_MAX_COUNTS = 32  # steps whose counts stay on the devices, so that reading them does not wait


@dataclass
class StepResult:
    """The result of one step.

    Attributes:
      step: number of updates so far, this one included: the count of the first state, plus one for
        each update since.
      state: state after the step. The next step donates its buffers, so read it before that.
      metrics: arrays on the devices, stacked per replica; reading them waits for the step. With
        `steps_per_call` of `js.train_loop` those of all its updates, along a first dimension.
      phase: what the step exchanged, `()` for a local step; see `js.spec.phase_name`. Of several
        updates it is the last one's.
      reports: what the hooks returned, merged in their order.
      position: what `get_state()` of the batches returned right after the batch of this step; None
        if they have no `get_state`. It does not include batches that were loaded ahead, or those
        of an incomplete update. Save it with the state.
      is_update: False for a batch whose gradients wait for those of the following batches, with
        `js.TrainPipeline(accumulate=...)`; `step` is then the number of the last update.
      num_updates: number of updates of one call with `steps_per_call`, the first dimension of
        `metrics`; None without it, where `metrics` are those of one step.
    """

    step: int
    state: TrainState
    metrics: dict[str, jax.Array]
    phase: Phase
    reports: dict[str, Any] = field(default_factory=dict)
    position: Any = None
    is_update: bool = True
    num_updates: int | None = None

    @property
    def last_metrics(self) -> dict[str, jax.Array]:
        """The metrics of the last update: arrays on the devices, stacked per replica."""
        return self.metrics if self.num_updates is None else _last(self.metrics)


@dataclass(frozen=True)
class InputStageTimes:
    """The times of one stage of a pipeline, in seconds of host time.

    Attributes:
      name: "load", "place", the name of a function in `stages`, or "step".
      batches: number of batches that went through the stage.
      busy_seconds: time in the iterator for "load"; for other stages time in the call, which starts
        the work on the devices and need not wait for it.
      idle_seconds: the rest of the time since the first call of the pipeline.
    """

    name: str
    batches: int
    busy_seconds: float
    idle_seconds: float


@dataclass(frozen=True)
class InputPipelineReport:
    """The times of a pipeline since its first call, in seconds of host time.

    The thread that trains spends its time in the stages except "load", waiting for a batch, or in
    the caller's code.

    Attributes:
      stages: times of the stages in order, "load" first and "step" last.
      batches: number of batches that were used.
      held: number of batches that are prepared and wait for their turn.
      seconds: time from the first call to the end of the last call.
      waiting_seconds: time that calls waited for a batch to be loaded.
      caller_seconds: time between calls. If the caller reads a result, this includes waiting for
        the devices.
      resent_share: fraction of the requested table rows that were sent again because the previous
        step changed them, for `mode="patched"`; None for other modes.
    """

    stages: tuple[InputStageTimes, ...]
    batches: int
    held: int
    seconds: float
    waiting_seconds: float
    caller_seconds: float
    resent_share: float | None = None

    @property
    def slowest(self) -> str:
        """The name of what took most time: "load", a later stage, or "caller"."""
        spent = {s.name: s.busy_seconds for s in self.stages if s.name != "load"}
        spent |= {"load": self.waiting_seconds, "caller": self.caller_seconds}
        return max(spent, key=lambda name: spent[name])

    def __str__(self) -> str:
        """Return the report as a table of text."""
        lines = [
            f"{self.batches} batches in {self.seconds:.3f} s, {self.held} held; waited "
            f"{self.waiting_seconds:.3f} s for batches, {self.caller_seconds:.3f} s between calls",
            f"{'stage':<16}{'batches':>9}{'busy s':>10}{'idle s':>10}",
        ]
        lines += [
            f"{s.name:<16}{s.batches:>9}{s.busy_seconds:>10.3f}{s.idle_seconds:>10.3f}"
            for s in self.stages
        ]
        if self.resent_share is not None:
            lines.append(f"{self.resent_share:.1%} of the rows looked up ahead were sent again")
        return "\n".join(lines)


class TrainPipeline(Iterator[Any], contextlib.AbstractContextManager[Any]):
    """An iterator of step results that prepares batches ahead, to train or to evaluate.

    A thread takes batches from their iterator while steps run. Each batch is put on the devices,
    and goes through `stages`, right after an earlier step was started. Results equal those of a
    plain loop, bit for bit. `progress` runs one step. The thread ends with the `with` block, with
    the iterator, by `close`, or when nothing references the pipeline any more.
    The guide is `docs/input-pipeline.md`. More on each argument:
    [docs/api/loop.md](#details).

    Args:
      step: step of `js.make_train_step`, or a function `step(state, batch) -> (state, metrics)`; to
        evaluate, a function that returns anything, such as `step.evaluate`.
      state: initial state; to evaluate, another pipeline, or a function that returns a state.
      batches: iterable of what `step` takes. None if `progress` receives iterators.
      stages: functions `batch -> batch`, best made by `jax.jit`, that run after `step.place`.
      depth: number of batches to load beyond the one in use. 0 loads none ahead, without a thread.
      drain: whether to train the batches that are held when an iterator ends.
      accumulate: number A of batches that make one update, of the mean of their gradients.
      partial: what to do with fewer than A batches at the end: `"step"`, `"discard"` or `"error"`.
      timeout: seconds that a call may wait for a batch; None: no limit. Needs depth > 0.
      mode: what a step with `embeddings` sends ahead of a batch: `"exact"` row numbers, `"stale"`
        rows too, `"patched"` also the rows that have changed since.
      num_exact: number of first batches for which `"stale"` acts as `"exact"`.
      room: fraction of the slots in which `"patched"` can send rows again.

    Attributes:
      state: state after the last result. Read it at each use: steps reuse its buffers.
      position: `get_state()` of the iterator right after the last batch that is in the state.
      partial_update: the `js.train.StepResult` that `partial="step"` made at the end, else None.
      trains: True if the pipeline trains its own state, False if it evaluates that of another.

    Raises:
      ValueError: an accumulate, partial, depth or timeout out of its range or without what it
        needs, stages that are not functions.

    Communication: that of the step and the stages. In several processes each call waits for the
      next batch, so that all processes place batches in the same order.

    Source: torchrec, `TrainPipelineBase` and `TrainPipelineSparseDist`.
    """

    @checks_flags("TrainPipeline")
    def __init__(
        self,
        step: Callable[..., Any],
        state: "TrainState | TrainPipeline | Callable[[], PyTree] | PyTree",
        batches: Iterable[PyTree] | None = None,
        *,
        stages: Sequence[Stage] | None = None,
        depth: int = 2,
        drain: bool = True,
        accumulate: int = 1,
        partial: Partial = "step",
        timeout: float | None = None,
        mode: AheadMode = "exact",
        num_exact: int = 0,
        room: float = 0.25,
    ) -> None:
        self._depth = checked_int("`depth` counts batches and", depth, 0)
        self._accumulate = checked_accumulation(accumulate, partial)
        self._drain, self._partial = drain, partial
        is_positive = (as_number(timeout) or 0) > 0
        if timeout is not None and not (is_positive and depth > 0):
            raise ValueError(
                f"`timeout` must be a number > 0, with `depth` > 0, got {timeout!r} and {depth}."
            )
        if stages is not None and not (isinstance(stages, Sequence) and all(map(callable, stages))):
            raise ValueError(f"`stages` must be functions `batch -> batch`, got {stages!r}.")
        self._state, self._read_state = state, _state_reader(state)
        self.trains = self._read_state is None
        if accumulate > 1 and not (self.trains and hasattr(step, "collect")):
            raise ValueError(
                f"`accumulate`={accumulate} needs a pipeline that trains, with a step of "
                f"js.make_train_step, got {getattr(step, '__name__', type(step).__name__)}."
            )
        self._place, self._refuse_ids = _method(step, "place"), _method(step, "refuse_ids")
        # A `TrainStep` limits how many calls run at once by itself.
        self._step: Any = step if self._place else BoundedStep(step)
        self._next_phase = getattr(self._step, "next_phase", None)
        self._set_ahead(step, mode, num_exact=num_exact, room=room)
        if stages is None:
            stages = () if self._place or jax.process_count() > 1 else (put_arrays,)
        self._stages = [
            (Clock(name), BoundedStep(stage))
            for name, stage in zip(_names(stages), stages, strict=True)
        ]
        # An update of several batches: those that were collected, and the position after them.
        self._window: Any = None
        self._num_collected, self._window_position = 0, None
        self._num_updates = update_count(state) if self.trains else 0
        self.partial_update: StepResult | None = None
        # Batches that are ready, oldest first; what was raised in place of one ends the queue.
        self._queue: deque[Batch | BaseException] = deque()
        self._loader = Loader(is_ahead=self._depth > 0, timeout=timeout)
        weakref.finalize(self, self._loader.close, wait=False)
        self._is_open = self._is_closed = False  # open: the end of the iterator was not reported
        self.position: Any = None
        if batches is not None:
            self.position = self._loader.set_source(iter(batches)).position()
        self._place_clock, self._step_clock = Clock("place"), Clock("step")
        self._wait_clock = Clock("wait")
        self._start: float | None = None
        self._end = self._inside = 0.0

    def __repr__(self) -> str:
        """Return a line: the step, and how many batches are prepared ahead."""
        step = getattr(self._step, "__wrapped__", self._step)
        return f"<js.TrainPipeline of {step!r}; depth={self._depth}>"

    def __next__(self) -> Any:
        """Return the next result; raise `StopIteration` after the last one."""
        return self.progress()

    def progress(self, iterator: Iterator[PyTree] | None = None) -> Any:
        """Run the step on one batch, and prepare the next ones meanwhile.

        Args:
          iterator: iterator of the batches from now on; batches of an earlier one that are held
            come first. None, or the same iterator as before, continues with that.

        Returns:
          A `js.train.StepResult`, or what `step` returns where the pipeline evaluates.

        Raises:
          StopIteration: there is no batch left. The next call tries the ended iterator again, as a
            loop would.
          ValueError: there is no batch left, in the middle of an update with `partial="error"`.
          TimeoutError: no batch came within `timeout`; the next call waits for the same batch.
          ValueError: there is no iterator, or the pipeline was closed.
          ValueError: a batch before the last one had ids that are in no table, as counted on
            devices; its update was skipped, and no batch is lost. After the end of the batches also
            for the last one.
          Exception: what the iterator or a stage raised in place of this batch, with its traceback;
            the batches before it were used, or wait for the rest of an update. The next call
            continues after this batch.

        Communication: that of the step and the stages.
        """
        if self._is_closed:
            raise ValueError("`progress` of a js.TrainPipeline that was closed: make another one.")
        if iterator is not None:
            before = self._loader.source
            self._is_open &= self._loader.set_source(iterator) is before
        if self._loader.source is None:
            raise ValueError("progress: `iterator` must be given where there were no `batches`.")
        start = time.perf_counter()
        self._start = start if self._start is None else self._start
        try:
            self.refuse_ids(num_running=1)  # before a batch is taken, since that would be lost
            batch = self._next()
            self.partial_update = None
            if batch is None:
                self.refuse_ids()
                if self._drain and self._num_collected:
                    self._end_window()
                raise StopIteration
            result = self._step_clock(self._run_step, batch)
            self._prepare()
            return result
        finally:
            self._end = time.perf_counter()
            self._inside += self._end - start

    def refuse_ids(self, num_running: int = 0) -> None:
        """Raise `ValueError` if a batch that was used had ids that are in no table.

        This calls `TrainStep.refuse_ids` of the step, if it has one. Call it if you stop before the
        batches end; at their end the pipeline calls it.

        Args:
          num_running: number of last batches that are not checked and not waited for.
        """
        if self._refuse_ids is not None:
            self._refuse_ids(num_running)

    @property
    def state(self) -> Any:
        """The state after the last result."""
        return self._state if self._read_state is None else self._read_state()

    @state.setter
    def state(self, state: Any) -> None:
        self._state, self._read_state = state, None

    # Batches: loaded, held, taken.

    def _limit_batches(self, num_batches: int) -> None:
        """Take no more than so many batches from the iterator."""
        self._loader.num_left = num_batches

    def _next(self) -> Batch | None:
        """Return the next batch, or None after the last one.

        Raises:
          TimeoutError: the batch did not come in time; the next call waits for it again.
          BaseException: what the iterator or a stage raised in place of the batch.
        """
        if not self._is_open:
            self._loader.open()
            self._is_open = True
        limit = self._depth + 1
        if not self._fill_queue(1 if self._drain else limit, limit, wait=True):
            self._is_open = False
            return None
        if self._ahead is not None:
            # The first batch stays held, so that Ctrl-C loses neither. Without the second one no
            # rows are requested; other processes run a program that needs it.
            with contextlib.suppress(*([] if jax.process_count() > 1 else [TimeoutError])):
                self._fill_queue(2, limit, wait=True)
        first = self._queue.popleft()
        if isinstance(first, BaseException):
            raise first
        return first

    def _prepare(self) -> None:
        """Prepare the batches that are loaded, or in several processes wait for the next one."""
        if not self._depth:
            return
        # Several processes must prepare the same batches between the same two steps.
        waits = jax.process_count() > 1
        with contextlib.suppress(TimeoutError):  # raised again when the batch is needed
            self._fill_queue(1 if waits else self._depth, self._depth, wait=waits)
        self._loader.prefetch(self._depth - len(self._queue))

    def _fill_queue(self, count: int, limit: int, *, wait: bool) -> bool:
        """Prepare batches until `count` are held or one failed; return False if there are fewer.

        Meanwhile the loader loads until `limit` are loaded or held.
        """
        while len(self._queue) < count:
            if self._queue and isinstance(self._queue[-1], BaseException):
                break
            self._loader.prefetch(limit - len(self._queue))
            take = self._loader.take
            item = self._wait_clock(take, wait=True) if wait else take(wait=False)
            if item is None:
                return False
            try:
                self._queue.append(self._prepare_batch(*item) if isinstance(item, Batch) else item)
            except Exception as error:  # raised later, in the turn of this batch
                self._queue.append(error)
        return True

    def _prepare_batch(self, batch: PyTree, weight: Any, position: Any) -> Batch:
        """Place a batch and run the stages on it, without waiting for the devices."""
        if self._place:
            # Stages may make the ids of tables, so ids are checked after the last stage.
            options = {"check_ids": False} if self._stages else {}
            batch, weight = self._place_clock(
                self._place, batch, weight, state=self.state, **options
            )
        for clock, stage in self._stages:
            batch = clock(stage, batch)
        if self._place and self._stages:
            # Check the output of the stages now: later the error would come with another batch.
            batch, weight = self._place(batch, weight, state=self.state)
        return Batch(batch, weight, position)

    # Steps.

    def _run_step(self, batch: Batch) -> Any:
        """Run the step on a batch: evaluate it, collect its gradients or update the state."""
        if not self.trains:
            result = self._call(batch)
            self.position = batch.position
            return result
        if self._num_collected + 1 == self._accumulate:
            windowed = {"window": self._window} if self._accumulate > 1 else {}
            return self._update(lambda: self._call(batch, **windowed), batch.position)
        self._window, metrics = self._call(
            batch, collect=True, window=self._window, num_batches=self._accumulate - 1
        )
        self._num_collected += 1
        self._window_position = batch.position
        return StepResult(
            self._num_updates, self.state, metrics, (), position=self.position, is_update=False
        )

    def _update(self, call: Callable[[], Any], position: Any) -> StepResult:
        phase = () if self._next_phase is None else self._next_phase(self.state)
        result = call()
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"`step` must return `(state, metrics)`, got {type(result).__name__}; to evaluate, "
                "give a pipeline or a function as `state`."
            )
        self.state, metrics = result
        self.position = position
        self._num_updates += 1
        self._window, self._num_collected = None, 0
        return StepResult(self._num_updates, self.state, metrics, phase, position=position)

    def _end_window(self) -> None:
        """Treat the batches that were collected when the batches end as `partial` says."""
        if self._partial == "error":
            raise ValueError(
                f"`batches` ended after {self._num_collected} of `accumulate`={self._accumulate}, "
                'and `partial`="error": others complete the update.'
            )
        if self._partial == "discard":
            self._window, self._num_collected = None, 0
            return
        apply = self._step.apply
        self.partial_update = self._update(
            lambda: apply(self.state, self._window), self._window_position
        )

    def _call(self, batch: Batch, **options: Any) -> Any:
        """Call the step, with `collect` its `collect`; for tables request the next batch's rows."""
        if self._ahead is None:
            step = self._step.collect if options.pop("collect", False) else self._step
            if batch.weight is not None:
                options["weight"] = batch.weight
            return step(self.state, batch.batch, **options)
        requested, requested_for = self._requested
        if requested_for is not batch.batch:
            requested = self._ahead.prime(self.state, batch.batch)
        following = self._queue[0] if self._queue else None
        following = following.batch if isinstance(following, Batch) else None
        new, metrics, requested = self._ahead(
            self.state, batch.batch, requested, following, batch.weight, **options
        )
        self._requested = requested, following
        self._counts.append({n: x for n, x in metrics.items() if n.startswith("embeddings/")})
        self._read_counts(_MAX_COUNTS)
        return new, metrics

    def _set_ahead(self, step: Any, mode: Any, **options: Any) -> None:
        """Make `self._ahead`, which also does the table exchange of the next batch, if needed."""
        self._ahead: Any = None
        self._requested: Any = None, None  # rows, and the batch for which they were requested
        self._counts: deque[dict[str, Any]] = deque()
        self._rows: Counter[str] = Counter()
        has_next = self._depth > 0 and self.trains
        needs_next = mode != "exact" or bool(options["num_exact"])
        if needs_next and not (has_next and hasattr(step, "ahead")):
            raise ValueError(
                f"`mode`={mode!r} with {options} needs a pipeline that trains, `depth` > 0, and "
                "a step of js.make_train_step with tables."
            )
        if needs_next or (has_next and getattr(step, "embeddings", None) is not None):
            self._ahead = step.ahead(mode, **options)

    def _read_counts(self, num_kept: int) -> None:
        """Add up the counts of all but the last `num_kept` steps, and wait for those."""
        while len(self._counts) > num_kept:
            for name, count in self._counts.popleft().items():
                self._rows[name.rpartition("/")[2]] += local_sum(count)

    def report(self) -> InputPipelineReport:
        """Return the times of the stages so far.

        Returns:
          A `js.train.InputPipelineReport`.

        Communication: none.
        """
        self._read_counts(0)
        patches = self._ahead is not None and self._ahead.mode == "patched" and self._rows["asked"]
        seconds = 0.0 if self._start is None else self._end - self._start
        placing = [self._place_clock] if self._place else []
        stages = [clock for clock, _ in self._stages]
        clocks = [self._loader.clock, *placing, *stages, self._step_clock]
        return InputPipelineReport(
            stages=tuple(
                InputStageTimes(x.name, x.count, x.seconds, max(0.0, seconds - x.seconds))
                for x in clocks
            ),
            batches=self._step_clock.count,
            held=len(self._queue),
            seconds=seconds,
            waiting_seconds=self._wait_clock.seconds,
            caller_seconds=seconds - self._inside,
            resent_share=self._rows["resent"] / self._rows["asked"] if patches else None,
        )

    def close(self) -> None:
        """End the thread and drop the batches that are held; state and position stay."""
        self._is_closed = True
        self._loader.close()
        self._queue.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


@jax.jit
def _last(metrics: PyTree) -> PyTree:
    """Return the last of the metrics along their first dimension."""
    return jax.tree.map(lambda x: x[-1], metrics)


def _method(step: Any, name: str) -> Any:
    """Return a method of a step, or of the object whose method the step is; None if missing."""
    return getattr(step, name, None) or getattr(getattr(step, "__self__", None), name, None)


def put_arrays(batch: PyTree) -> PyTree:
    """Return the batch with numeric arrays on the default device; other leaves stay."""

    def put_leaf(x: Any) -> Any:
        is_array = isinstance(x, np.ndarray) and x.dtype.kind in "biufc"
        return jax.device_put(x) if is_array or isinstance(x, jax.Array) else x

    return jax.tree.map(put_leaf, batch)


def _names(stages: Sequence[Stage]) -> list[str]:
    names = [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
    is_unique = len(set(names)) == len(names)
    return names if is_unique else [f"{name} {i}" for i, name in enumerate(names, 1)]


def _state_reader(state: Any) -> Callable[[], Any] | None:
    """Return a function that returns the state to evaluate; None for a state to train."""
    if isinstance(state, TrainPipeline):
        return lambda: state.state
    # A model that is a tree of arrays may be callable as well.
    is_function = callable(state) and jax.tree_util.all_leaves([state])
    return state if is_function else None


def checked_accumulation(accumulate: Any, partial: Any) -> int:
    """Return the number of batches per update; raise `ValueError` if it or `partial` is wrong."""
    check_choice("partial", partial, Partial)
    return checked_int("`accumulate` counts batches per update and", accumulate, 1)


# Several updates in one program.


class _Batch(NamedTuple):
    """A batch as leaves.

    Attributes:
      leaves: its leaves, arrays of NumPy or jax.
      types: its structure, and shape and dtype of each leaf; equal where batches can be stacked.
      position: what the iterator's `get_state()` returned right after the batch.
    """

    leaves: list[Any]
    types: tuple[Any, list[Any]]
    position: Any


class ScanBatches(SharedIterator):
    """The batches of one call after the other, of equal structure and shapes.

    A call gets fewer batches than it wants at their end, before an exception of the iterator, which
    then takes the place of the next call, and before a batch of another shape.

    Args:
      iterator: the iterator of batches.
      length: `length(done)`: the number of batches of a call after `done` updates; 0: no more.
      done: number of updates before the first call.
    """

    def __init__(self, iterator: Iterator[PyTree], length: Callable[[int], int], done: int) -> None:
        super().__init__(iterator)
        self._batches, self._length, self._done = shared_iterator(iterator), length, done
        self._last = self._batches.position()
        # What was taken for one call and belongs to the next: at most one item.
        self._pending: deque[_Batch | Exception | None] = deque()

    def take(self, *, waits: bool = False) -> Batch | None:
        """Return structure and lists of leaves of the next call's batches; None after the last."""
        del waits  # a batch always waits for the others of its call
        call: list[list[Any]] = []
        types: Any = None
        with self._lock:
            length = self._length(self._done)
            while len(call) < length:
                item = self._next_item()
                if isinstance(item, _Batch) and types in (None, item.types):
                    call.append(item.leaves)
                    types, self._last = item.types, item.position
                    continue
                if call:
                    self._pending.append(item)
                elif isinstance(item, Exception):
                    raise item
                break
            self._done += len(call)
            return Batch((types[0], call), None, self._last) if call else None

    def position(self) -> Any:
        """Return the iterator's position after the last call that was taken."""
        return self._last

    def _next_item(self) -> "_Batch | Exception | None":
        if self._pending:
            return self._pending.popleft()
        try:
            item = self._batches.take()
            if item is None:
                return None
            if item.weight is not None:
                raise ValueError(
                    "`steps_per_call` must be 1 for a js.train.WeightedBatch, as of "
                    "js.train.uneven_batches, which has weights of its own."
                )
            leaves, structure = jax.tree.flatten(item.batch)
            if not all(isinstance(x, jax.Array) for x in leaves):
                # The iterator may fill the arrays again before the call has all its batches.
                leaves = as_arrays([copy_leaf(x) for x in leaves])
            types = [x.aval if isinstance(x, jax.Array) else (x.shape, x.dtype) for x in leaves]
            return _Batch(leaves, (structure, types), item.position)
        except Exception as error:  # raised by the call that begins with it
            return error


class ScanPipeline(TrainPipeline):
    """A pipeline of calls of `step.scan`, each of several batches.

    Args:
      step: a step with `scan(state, batches)`.
      state: initial state.
      batches: the batches of each call.
      depth: number of calls whose batches are loaded beyond the one in use.
    """

    def __init__(self, step: Any, state: PyTree, batches: ScanBatches, *, depth: int) -> None:
        super().__init__(step, state, depth=depth, stages=())
        self._place = None  # `scan` places the batches
        self._loader.source = batches
        self.position = batches.position()

    def _prepare_batch(self, batch: PyTree, weight: Any, position: Any) -> Batch:
        # In the thread that trains: a program that stacks arrays of several devices must not come
        # between the steps in another order on each process.
        structure, rows = batch
        columns = map(list, zip(*rows, strict=True))
        stacked = [(stack if isinstance(x[0], jax.Array) else np.stack)(x) for x in columns]
        return Batch((len(rows), structure.unflatten(stacked)), weight, position)

    def _run_step(self, batch: Batch) -> StepResult:
        count, batches = batch.batch
        phase = self._step.next_phase(self.state, count - 1)
        self.state, metrics = self._step.scan(self.state, batches)
        self.position = batch.position
        self._num_updates += count
        return StepResult(
            *(self._num_updates, self.state, metrics, phase),
            position=batch.position,
            num_updates=count,
        )
