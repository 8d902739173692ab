"""A pipeline that loads batches and puts them on the devices ahead of the steps that use them."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax

from ..._support.checks import as_int, check_choice
from ..._support.types import PyTree
from .._train_state import TrainState
from ..step import AheadMode
from ._feed import Feed, InputStages, Prepared, Stage, step_method
from ._input_report import Clock, InputPipelineReport, InputStageTimes
from ._updates import Evaluation, LookaheadStep, Partial, StepResult, Training


class TrainPipeline(Iterator[Any]):
    """An iterator of step results that prepares batches ahead, to train or to evaluate.

    A thread takes batches from their iterator while steps run. Each batch is put on the devices,
    and goes through `stages`, right after an earlier step was started:

        pipeline = js.TrainPipeline(step, state, batches)
        for result in pipeline: ...
        state = pipeline.state

    Results equal those of a plain loop over the same batches, bit for bit. `progress` runs one
    step of the iteration. In a `with` statement the thread ends with the block; it also ends with
    the iterator, by `close`, and when nothing references the pipeline any more.

    Args:
      step: step of `js.make_train_step`, also wrapped by `js.measured`, or a function
        `step(state, batch) -> (state, metrics)`, with a third argument for the weights of
        `js.WeightedBatch`. To evaluate, a function that returns anything, such as `step.evaluate`.
      state: initial state to train. To evaluate, another pipeline, or a function that returns a
        state: `step` is called with its current state, and the results are what `step` returns.
      batches: iterable of what `step` takes, such as `js.uneven_batches`, a generator, grain or a
        torch DataLoader. None if `progress` receives iterators.
      stages: functions `batch -> batch`, best made by `jax.jit`, that run after `step.place` in the
        calling thread; they receive a weighted batch without its weights. They may make the ids of
        tables, which are checked afterwards. None: no function, but for a function as `step` arrays
        are put on the default device.
      depth: number of batches to load beyond the one in use. 0 loads none ahead, without a thread.
      drain: whether to train the batches that are held when an iterator ends. False keeps `depth`
        of them for the next iterator that `progress` receives, as torchrec does.
      accumulate: A, the number of batches that make one update, of the mean of their gradients.
        Batch c = 0, 1, 2, ... begins a window where c % A == 0 and makes the update where
        (c + 1) % A == 0. The batches before it are only collected (`step.collect`): their results
        have the metrics of their batch, the unchanged state, and `is_update` False. Needs a step of
        `js.make_train_step`; the step's own `accumulate` splits each batch in addition.
      partial: what to do with fewer than A batches when `StopIteration` is raised. `"step"`: an
        update of their mean in that call. `"discard"`: drop them, with their positions. `"error"`:
        raise ValueError instead, and keep them for the batches of another iterator. With
        drain=False they are always kept.
      timeout: seconds that a call may wait for a batch; None: no limit. Needs depth > 0.
      mode: what a step with `embeddings` exchanges for the next batch while it runs. `"exact"`:
        row numbers are exchanged. `"stale"`: rows are looked up and sent, too, as they were before
        the step, so a batch trains with rows that are one update old (with `accumulate` only the
        first batch of an update does). `"patched"`: as `"stale"`, and the rows that the step has
        changed are sent again, so that no row is stale.
      num_exact: number of first batches for which `"stale"` acts as `"exact"`.
      room: fraction of the slots in which `"patched"` can send rows again; if more rows have
        changed, all are sent.

    Attributes:
      state: state after the last result. It may be set between calls; gradients that wait for the
        rest of their update keep waiting. Read it at each use: steps reuse its buffers.
      position: what `get_state()` of the iterator returned right after the last batch that is in
        the state, or before the first batch; None without `get_state`. Save it with the state: it
        does not include batches that are loaded ahead, or that wait for the rest of an update.
      partial_update: the `js.StepResult` of the update that `partial="step"` made when the batches
        ended, whose metrics are means over its batches; None at any other time.

    Raises:
      ValueError: accumulate < 1, or > 1 where the pipeline evaluates or the step is a function;
        another partial; depth < 0, a timeout that is not positive or has no thread to wait for,
        stages that are not functions.

    Communication: that of the step and the stages. All processes place batches in the same order
      between the same steps, so in several processes each call waits for the next batch.

    Source: torchrec, `TrainPipelineBase` and `TrainPipelineSparseDist`.
    """

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
        _check(step, stages, depth, timeout)
        check_accumulation(accumulate, partial)
        depth, accumulate = int(depth), int(accumulate)  # such as NumPy integers
        self._refuse_ids = step_method(step, "refuse_ids")
        prepare = InputStages(step, stages)
        read = _state_reader(state)
        has_next = depth > 0 and read is None
        step = self._with_lookahead(step, has_next, mode, num_exact=num_exact, room=room)
        runner: Training | Evaluation
        if read is None:
            runner = Training(step, state, accumulate, partial)
        elif accumulate > 1:
            raise ValueError(
                f"`accumulate`={accumulate} batches make one update, and a pipeline that evaluates "
                "makes none: leave it out."
            )
        else:
            runner = Evaluation(step, read)
        # The feed reads the state of `runner`: a reference to `self` would keep the thread alive.
        self._runner = runner
        self._feed = Feed(
            prepare,
            depth=depth,
            drain=drain,
            timeout=timeout,
            state=lambda: runner.state,
            looks_ahead=self._tables is not None,
        )
        if batches is not None:
            runner.position = self._feed.give(iter(batches)).position()
        self._clocks = [self._feed.load_clock, *prepare.clocks, Clock("step")]
        self._start: float | None = None
        self._end = self._inside = 0.0
        self._has_batches = batches is not None
        self._drain, self._is_closed = drain, False

    def __iter__(self) -> "TrainPipeline":
        return self

    def __next__(self) -> Any:
        """Return the next result; raise `StopIteration` after the last one."""
        return self.progress()

    def progress(self, iterator: Iterator[PyTree] | None = None) -> Any:
        """Run the step on one batch, and prepare the next ones meanwhile.

        Args:
          iterator: iterator of the batches from now on; batches of an earlier one that are held
            come first. None, or the same iterator as before, continues with that.

        Returns:
          A `js.StepResult`, or what `step` returns where the pipeline evaluates.

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
            self._feed.give(iterator)
            self._has_batches = True
        if not self._has_batches:
            raise ValueError("progress: `iterator` must be given where there were no `batches`.")
        start = time.perf_counter()
        self._start = start if self._start is None else self._start
        try:
            self.refuse_ids(num_running=1)  # before a batch is taken, since that would be lost
            batch = self._feed.next()
            if batch is None:
                self.refuse_ids()
                if self._drain:
                    self._runner.end()
                raise StopIteration
            result = self._clocks[-1](self._runner, batch)
            self._feed.prepare()
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
    def trains(self) -> bool:
        """True if the pipeline trains its own state, False if it evaluates that of another."""
        return isinstance(self._runner, Training)

    @property
    def state(self) -> Any:
        """The state after the last result."""
        return self._runner.state

    @state.setter
    def state(self, state: Any) -> None:
        # An evaluation's is that of another pipeline, which can only be read.
        self._runner.state = state  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def position(self) -> Any:
        """The position of the iterator right after the last batch that is in the state."""
        return self._runner.position

    @property
    def partial_update(self) -> StepResult | None:
        """The result of the update of the batches that were left when their iterator ended."""
        return self._runner.partial_update if isinstance(self._runner, Training) else None

    def _with_lookahead(self, step: Any, has_next: bool, mode: Any, **options: Any) -> Any:
        """Return a step that also does the table exchange of the next batch, if it has tables."""
        self._tables: LookaheadStep | None = None
        needs_next = mode != "exact" or bool(options["num_exact"])
        if needs_next and not has_next:
            raise ValueError(
                f"`mode`={mode!r} and its {options} need a pipeline that trains with "
                "`depth` > 0: without a batch ahead no rows can be requested from the tables."
            )
        if not needs_next and not (has_next and getattr(step, "embeddings", None) is not None):
            return step
        if not hasattr(step, "ahead"):
            raise ValueError(f"`mode`={mode!r} needs a step of js.make_train_step with tables.")
        self_ref = weakref.ref(self)  # a strong reference would keep the thread alive

        def upcoming() -> Prepared | None:
            pipeline = self_ref()
            return None if pipeline is None else pipeline._feed.peek()

        self._tables = LookaheadStep(step.ahead(mode, **options), step, upcoming)
        return self._tables

    def report(self) -> InputPipelineReport:
        """Return the times of the stages so far.

        Returns:
          A `js.InputPipelineReport`.

        Communication: none.
        """
        seconds = 0.0 if self._start is None else self._end - self._start
        return InputPipelineReport(
            stages=tuple(
                InputStageTimes(
                    clock.name, clock.count, clock.seconds, max(0.0, seconds - clock.seconds)
                )
                for clock in self._clocks
            ),
            batches=self._clocks[-1].count,
            held=self._feed.num_held,
            seconds=seconds,
            waiting_seconds=self._feed.wait_clock.seconds,
            caller_seconds=seconds - self._inside,
            resent_share=None if self._tables is None else self._tables.resent_share,
        )

    def close(self) -> None:
        """End the thread and drop the batches that are held; state and position stay."""
        self._is_closed = True
        self._feed.close()

    def __enter__(self) -> "TrainPipeline":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _state_reader(state: Any) -> Callable[[], Any] | None:
    """Return a function that returns the state to evaluate; None for a state to train."""
    if isinstance(state, TrainPipeline):
        return lambda: state.state
    # A model that is a tree of arrays may be callable as well.
    is_function = callable(state) and jax.tree_util.all_leaves([state])
    return state if is_function else None


def check_accumulation(accumulate: Any, partial: Any) -> None:
    """Raise `ValueError` for a wrong number of batches per update, or a wrong `partial`."""
    if as_int(accumulate, 1) is None:
        raise ValueError(
            f"`accumulate` counts batches per update and must be an int >= 1, got {accumulate!r}."
        )
    check_choice("partial", partial, Partial)


def _check(step: Any, stages: Any, depth: Any, timeout: Any) -> None:
    if not callable(step):
        raise ValueError(f"`step` must be a function, got {type(step).__name__}.")
    if as_int(depth, 0) is None:
        raise ValueError(f"`depth` counts batches and must be an int >= 0, got {depth!r}.")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and (depth == 0 or not is_number or not timeout > 0):
        raise ValueError(
            "`timeout` must be a number of seconds > 0, and needs `depth` > 0: without a thread "
            f"nothing can be waited for. Got {timeout!r} and `depth`={depth}."
        )
    if stages is not None and not (isinstance(stages, Sequence) and all(map(callable, stages))):
        raise ValueError(
            f"`stages` must be a sequence of functions `batch -> batch`, got {stages!r}."
        )
