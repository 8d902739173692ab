"""An iterator of results whose batches are loaded and put on the devices ahead of their steps."""

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
from ._feed import Feed, InputStages, Prepared, Stage, of_step
from ._input_report import Clock, InputPipelineReport, InputStageTimes
from ._updates import Beside, Evaluation, Partial, StepResult, Training


class TrainPipeline(Iterator[Any]):
    """Trains, or evaluates, with batches that are ready before their turn.

    A thread takes batches from their iterator while steps run; each is put on the devices, and goes
    through `stages`, right after an earlier step was started:

        pipeline = js.TrainPipeline(step, state, batches)
        for result in pipeline: ...
        state = pipeline.state

    Results are those of a plain loop over the same batches, bit for bit. It is itself an iterator,
    and `progress` one of its steps. In a `with` statement its thread ends with the block; it ends
    also with the iterator, by `close`, and when nothing holds the pipeline any more.

    Args:
      step: of `js.make_train_step`, such a one in `js.measured`, or a function
        `step(state, batch) -> (state, metrics)`, with a third argument for the weights of
        `js.WeightedBatch`. To evaluate, one that returns anything: `step.evaluate`.
      state: a state to train. Or another pipeline, or a function that returns a state: then `step`
        is called with that state as it is at each call, and what it returns are the results.
      batches: of anything that `step` takes; `js.uneven_batches`, a generator, grain, torch's
        DataLoader. It may be left out where `progress` is given iterators.
      stages: functions `batch -> batch`, best made by `jax.jit`, which come after `step.place`, in
        the calling thread; on a weighted batch without its weights. They may make the ids of
        tables, which are looked at behind them. None: none, and for a function as `step` arrays are
        put on the default device.
      depth: how many batches may be loaded beyond the one that is used. 0: none, and no thread.
      drain: train the batches that are held when an iterator ends. False keeps them for the next
        iterator that `progress` is given, as torchrec does: of the first one all but `depth`.
      accumulate: A batches of the iterator make one update, of the mean of their gradients: batch
        c = 0, 1, 2, ... begins with none where c % A == 0 and makes the update where
        (c + 1) % A == 0. Those before it are only collected (`step.collect`): their results have
        the metrics of their batch, the state as it was, and `is_update` False. Needs a step of
        `js.make_train_step`, whose own `accumulate` splits each batch besides.
      partial: what becomes of fewer than A batches when `StopIteration` is raised: `"step"`, an
        update of their mean in that call; `"discard"`, nothing, their positions included;
        `"error"`, a ValueError in its place, and they wait for the batches of another iterator.
        With drain=False they always wait.
      timeout: seconds that a call may wait for a batch; None: any. Not with depth 0.
      mode: for a step with `embeddings`, what is done for the next batch beside a step. `"exact"`:
        row numbers are exchanged; `"stale"`: rows are looked up and sent, too, as they were before
        that step, so a batch trains with rows that are one update old (of several that make one
        update the first one: no update comes between the others); `"patched"`: likewise, and the
        rows that the step has changed are sent again, so that nothing is stale.
      num_exact: batches of `"stale"` that begin as `"exact"`.
      room: of `"patched"`: the part of the slots in which rows can be sent again; where more have
        changed, all are.

    Attributes:
      state: as it is after the last result; may be set between calls, and gradients that wait for
        others of their update go on waiting. Read it at each use: steps reuse its buffers.
      position: what the `get_state()` of the iterator said right after the last batch that is in
        the state; before the first one, as it was. None where it has no `get_state`. To be saved
        with the state: batches that are loaded ahead are not in it, nor those that wait for the
        others of an update.
      partial_update: the `js.StepResult` of the update that `partial="step"` made when the batches
        ended, whose metrics are means over its batches; None at any other time.

    Raises:
      ValueError: accumulate < 1, or > 1 where the pipeline evaluates or the step is a function;
        another partial; depth < 0, a timeout that is not positive or has no thread to wait for,
        stages that are not functions, batches without an iterator.

    Communication: the step's and the stages'. In several processes batches are placed in the same
      order between the same steps on all of them, so each call waits until the next batch is there.

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
        depth, accumulate = int(depth), int(accumulate)  # whatever integers they are
        self._refuse_ids = of_step(step, "refuse_ids")
        prepare = InputStages(step, stages)
        read = _reads(state)
        knows_next = depth > 0 and read is None
        step = self._beside(step, knows_next, mode, num_exact=num_exact, room=room)
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
        self._runner = runner  # whose own state the feed reads: what is left alone should end
        self._feed = Feed(
            prepare,
            depth=depth,
            drain=drain,
            timeout=timeout,
            state=lambda: runner.state,
            looks_ahead=self._tables is not None,
        )
        if batches is not None:
            runner.position = self._feed.give(_iterator_of(batches)).position()
        self._clocks = [self._feed.load_clock, *prepare.clocks, Clock("step")]
        self._began: float | None = None
        self._ended = self._inside = 0.0
        self._has_batches = batches is not None
        self._drain, self._is_closed = drain, False

    def __iter__(self) -> "TrainPipeline":
        return self

    def __next__(self) -> Any:
        """The next result; `StopIteration` where there is no more."""
        return self.progress()

    def progress(self, iterator: Iterator[PyTree] | None = None) -> Any:
        """One batch: used, and the next ones prepared beside it.

        Args:
          iterator: of the batches from now on; those of an earlier one that are held come first.
            None, or the same as before, goes on with it.

        Returns:
          A `js.StepResult`, or what `step` returns where the pipeline evaluates.

        Raises:
          StopIteration: there is no batch left. An iterator that ended is asked again at the next
            call, as a loop would.
          ValueError: likewise, with `partial="error"` in the middle of an update.
          TimeoutError: none came within `timeout`; the next call waits for the same.
          ValueError: there is no iterator, or the pipeline was closed.
          ValueError: a batch but the last one had ids that are in no table, as devices have found;
            its update was skipped, and no batch is lost. At the end also for the last one.
          Exception: what the iterator or a stage raised in place of this batch, with its traceback;
            the batches before it were used, or wait for the others of an update. The next call goes
            on behind it.

        Communication: the step's and the stages'.
        """
        if self._is_closed:
            raise ValueError("`progress` of a js.TrainPipeline that was closed: make another one.")
        if iterator is not None:
            if not isinstance(iterator, Iterator):
                raise ValueError(
                    "progress: `iterator` must be an iterator, such as iter(batches), got "
                    f"{type(iterator).__name__}."
                )
            self._feed.give(iterator)
            self._has_batches = True
        if not self._has_batches:
            raise ValueError("progress: `iterator` must be given where there were no `batches`.")
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        try:
            self.refuse_ids(num_running=1)  # before a batch is taken, which would be lost
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
            self._ended = time.perf_counter()
            self._inside += self._ended - began

    def refuse_ids(self, num_running: int = 0) -> None:
        """Raise `ValueError` where a batch that was used had ids that are in no table.

        `TrainStep.refuse_ids` of the step, where it has one: to be called where one leaves before
        the batches end. At their end the pipeline does it by itself.

        Args:
          num_running: how many of the last batches are not asked and not waited for.
        """
        if self._refuse_ids is not None:
            self._refuse_ids(num_running)

    @property
    def trains(self) -> bool:
        """Whether it has a state of its own; else it evaluates that of another."""
        return isinstance(self._runner, Training)

    @property
    def state(self) -> Any:
        """As it is after the last result."""
        return self._runner.state

    @state.setter
    def state(self, state: Any) -> None:
        if not isinstance(self._runner, Training):
            raise ValueError(
                "`state` of a pipeline that evaluates is another's: set it where it is trained."
            )
        self._runner.state = state

    @property
    def position(self) -> Any:
        """Of the iterator, right after the last batch that is in the state."""
        return self._runner.position

    @property
    def partial_update(self) -> StepResult | None:
        """Of the batches that were left when their iterator ended."""
        return self._runner.partial_update if isinstance(self._runner, Training) else None

    def _beside(self, step: Any, knows_next: bool, mode: Any, **options: Any) -> Any:
        """The step with the next batch's tables asked beside it, where there are any."""
        self._tables: Beside | None = None
        asked_for = mode != "exact" or bool(options["num_exact"])
        if asked_for and not knows_next:
            raise ValueError(
                f"`mode`={mode!r} and its {options} are of a pipeline that trains with "
                "`depth` > 0: without a batch ahead there is nothing to ask the tables for."
            )
        if not asked_for and not (knows_next and getattr(step, "embeddings", None) is not None):
            return step
        if not hasattr(step, "ahead"):
            raise ValueError(f"`mode`={mode!r} needs a step of js.make_train_step with tables.")
        mine = weakref.ref(self)  # a pipeline that nobody holds ends at once

        def upcoming() -> Prepared | None:
            pipeline = mine()
            return None if pipeline is None else pipeline._feed.peek()

        self._tables = Beside(step.ahead(mode, **options), step, upcoming)
        return self._tables

    def report(self) -> InputPipelineReport:
        """What the stages took so far.

        Returns:
          A `js.InputPipelineReport`.

        Communication: none.
        """
        seconds = 0.0 if self._began is None else self._ended - self._began
        return InputPipelineReport(
            stages=tuple(
                InputStageTimes(c.name, c.count, c.seconds, max(0.0, seconds - c.seconds))
                for c in self._clocks
            ),
            batches=self._clocks[-1].count,
            held=self._feed.num_held,
            seconds=seconds,
            waiting_seconds=self._feed.wait_clock.seconds,
            caller_seconds=seconds - self._inside,
            resent_share=None if self._tables is None else self._tables.resent_share,
        )

    def close(self) -> None:
        """Ends the thread and lets go of the batches that are held; state and position stay."""
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


def _reads(state: Any) -> Callable[[], Any] | None:
    """What returns the state of a pipeline that evaluates; None for one that trains."""
    if isinstance(state, TrainPipeline):
        return lambda: state.state
    # A model that is a tree of arrays may be callable as well.
    is_function = callable(state) and jax.tree_util.all_leaves([state])
    return state if is_function else None


def _iterator_of(batches: Iterable[PyTree]) -> Iterator[PyTree]:
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise ValueError(
            f"`batches` must be an iterator, or have one, got {type(batches).__name__}."
        )
    return iter(batches)


def check_accumulation(accumulate: Any, partial: Any) -> None:
    """Raise `ValueError` for what is no number of batches, or no way to end."""
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
