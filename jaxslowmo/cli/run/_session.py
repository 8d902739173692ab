"""The loop over the steps of a run, with records, saves, stops and rollbacks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

import jaxslowmo as js
from jaxslowmo.tree import all_finite

from ..config._training import TrainConfig
from ..processes._peers import StopOnSignal
from ._division import RunBatches
from ._keeper import Keeper, Progress
from ._recorder import Recorder

Evaluation = Callable[[js.train.StepResult], Mapping[str, float]]


@dataclasses.dataclass
class Session:
    """The training loop of one run.

    Attributes:
      config: configuration of the run.
      step: the training step.
      evaluate: returns the losses of the consensus model after a step.
      batches: batches of the run.
      recorder: records the metrics.
      keeper: saves the run; None for a run without checkpoints.
      stop: ends the run early after a signal.
      waits: whether to wait for every step before the next one starts.
    """

    config: TrainConfig
    step: js.train.TrainStep | js.reports.MeasuredStep
    evaluate: Evaluation
    batches: RunBatches
    recorder: Recorder
    keeper: Keeper | None
    stop: StopOnSignal
    waits: bool

    def train(self, state: js.TrainState, done: int) -> tuple[str, js.TrainState]:
        """Train to the last step, or until the run ends early.

        Args:
          state: training state after `done` steps.
          done: number of steps done.

        Returns:
          "finished", "interrupted", "preempted" or "diverged", and the last state.

        Communication: that of the steps. Evaluations gather the parameters, and checkpoints check
          with one all-reduce that all are finite.
        """
        # The resumed run had already ended, early or after all steps.
        if self.recorder.is_patience_over or done >= self.config.steps:
            return "finished", state
        options = self.config.checkpoint
        rollbacks = options.max_rollbacks if options.on_nan == "rollback" else 0
        while True:
            status, state, done = self._train_until_end(state, done)
            if status != "diverged" or not rollbacks or self.keeper is None:
                return status, state
            checkpoint = self.keeper.newest()
            if checkpoint is None:
                return status, state
            rollbacks -= 1
            # The batches since the checkpoint are skipped: they would diverge again.
            state, progress, _ = checkpoint
            self.recorder.note(progress.step, rolled_back_from=done)
            self.recorder.best = progress.best
            done = progress.step

    def _train_until_end(self, state: js.TrainState, done: int) -> tuple[str, js.TrainState, int]:
        status = "interrupted"
        pipeline = js.TrainPipeline(self.step, state, self.batches, depth=self.config.prefetch)
        loop = js.train_loop(pipeline, num_steps=self.config.steps)
        # A second Ctrl-C raises in the middle of a step.
        with contextlib.suppress(KeyboardInterrupt), pipeline:
            for result in loop:
                state, done = result.state, result.step
                if self.waits:
                    # CPU devices share the threads of the host: later steps in the queue could
                    # hold the threads that the collective of an earlier step waits for.
                    jax.block_until_ready(result.metrics)
                ending = self._after(result)
                if ending is not None:
                    status = ending
                    break
            else:
                status = "finished"
        # Batches that were loaded ahead were not trained on: after a rollback they come first.
        self.batches.position = pipeline.position
        return status, state, done

    def _after(self, result: js.train.StepResult) -> str | None:
        """Record and save after a step; return the status with which to end, or None."""
        config, is_last = self.config, result.step == self.config.steps
        if self.keeper is not None:
            self.keeper.look()
        stop = None if is_last else self.stop.after_step(result.phase)
        evaluates = is_last or result.step % config.eval_every == 0
        if not self.recorder.step(
            result,
            evaluate=functools.partial(self._evaluate, result) if evaluates else None,
            now=bool(stop),
        ):
            return "diverged"
        if config.checkpoint.check_parameters and result.phase and _was_refused(result.state):
            return "diverged"
        is_early = evaluates and self.recorder.is_patience_over
        if self.keeper is not None:
            is_due = self.keeper.is_due(result.step, is_last=is_last or is_early)
            if stop or is_due:
                if not _all_finite(result.state.params):
                    return "diverged"
                self.keeper.save(result.state, self._progress(result), wait=bool(stop))
        return stop or ("finished" if is_early else None)

    def _progress(self, result: js.train.StepResult) -> Progress:
        recorder = self.recorder
        return Progress(result.step, result.position, recorder.bytes_sent, recorder.best)

    def _evaluate(self, result: js.train.StepResult) -> Mapping[str, float]:
        with self.stop.besides_steps():
            return self.evaluate(result)


def _was_refused(state: js.TrainState) -> bool:
    """Wait for the step, and return whether the replicas refused an exchange."""
    refused = state.opt_state[-1].refused
    return bool(np.asarray(refused.addressable_data(0)).any())


# With several devices one all-reduce of a boolean.
_all_finite = jax.jit(all_finite)
