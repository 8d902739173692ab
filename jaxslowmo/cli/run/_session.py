"""The steps of a run: recorded, saved, stopped, and taken back where they went wrong."""

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

Evaluation = Callable[[js.StepResult], Mapping[str, float]]


@dataclasses.dataclass
class Session:
    """One run of the steps of a configuration.

    Attributes:
      config: of the run.
      step: what does a step.
      evaluate: the losses of the consensus model after a step.
      batches: where they come from.
      recorder: what is told of them.
      keeper: what saves them; None for a run that is not saved.
      stop: what may end them early.
      waits: wait for every step before the next is started.
    """

    config: TrainConfig
    step: js.TrainStep | js.MeasuredStep
    evaluate: Evaluation
    batches: RunBatches
    recorder: Recorder
    keeper: Keeper | None
    stop: StopOnSignal
    waits: bool

    def train(self, state: js.TrainState, done: int) -> tuple[str, js.TrainState]:
        """Trains to the last step, or until something ends it.

        Args:
          state: after `done` steps.
          done: steps.

        Returns:
          "finished", "interrupted", "preempted" or "diverged", and the last state.

        Communication: that of the steps; evaluations and checkpoints bring the parameters together
          and look whether all are finite.
        """
        if self.recorder.is_patience_over:  # it had ended so
            return "finished", state
        options = self.config.checkpoint
        rollbacks = options.max_rollbacks if options.on_nan == "rollback" else 0
        while True:
            status, state, done = self._until_something(state, done)
            if status != "diverged" or not rollbacks or self.keeper is None:
                return status, state
            found = self.keeper.newest()
            if found is None:
                return status, state
            rollbacks -= 1
            # The batches since then are left out: with them it would end like this again.
            state, before, _ = found
            self.recorder.note(before.step, rolled_back_from=done)
            self.recorder.best = before.best
            done = before.step

    def _until_something(self, state: js.TrainState, done: int) -> tuple[str, js.TrainState, int]:
        status = "interrupted"
        pipeline = js.TrainPipeline(self.step, state, self.batches, depth=self.config.prefetch)
        loop = js.train_loop(pipeline, num_steps=self.config.steps, start=done)
        # The second Ctrl-C, in the middle of a step, raises.
        with contextlib.suppress(KeyboardInterrupt), pipeline:
            for result in loop:
                state, done = result.state, result.step
                if self.waits:
                    # Devices of a host share its threads: steps queued behind each other could
                    # hold the threads that an earlier step's collective waits for.
                    jax.block_until_ready(result.metrics)
                ending = self._after(result)
                if ending is not None:
                    status = ending
                    break
            else:
                status = "finished"
        # Batches that were loaded ahead were not trained on: they come first after a rollback.
        self.batches.position = pipeline.position
        return status, state, done

    def _after(self, result: js.StepResult) -> str | None:
        """Records and saves; why to end here, if so."""
        config, is_last = self.config, result.step == self.config.steps
        if self.keeper is not None:
            self.keeper.look()
        asked = None if is_last else self.stop.after_step(result.phase)
        evaluates = is_last or result.step % config.eval_every == 0
        if not self.recorder.step(
            result,
            evaluate=functools.partial(self._evaluate, result) if evaluates else None,
            now=bool(asked),
        ):
            return "diverged"
        if config.checkpoint.check_parameters and result.phase and _was_refused(result.state):
            return "diverged"
        is_early = evaluates and self.recorder.is_patience_over
        if self.keeper is not None:
            is_due = self.keeper.is_due(result.step, is_last=is_last or is_early)
            if asked or is_due:
                if not _all_finite(result.state.params):
                    return "diverged"
                self.keeper.save(result.state, self._progress(result), wait=bool(asked))
        return asked or ("finished" if is_early else None)

    def _progress(self, result: js.StepResult) -> Progress:
        recorder = self.recorder
        return Progress(result.step, result.position, recorder.bytes_sent, recorder.best)

    def _evaluate(self, result: js.StepResult) -> Mapping[str, float]:
        with self.stop.besides_steps():
            return self.evaluate(result)


def _was_refused(state: js.TrainState) -> bool:
    """Whether an exchange did not take place, as all replicas know. Waits for the step."""
    refused = state.opt_state[-1].refused
    return bool(np.asarray(refused.addressable_data(0)).any())


# With several devices one all-reduce of a boolean.
_all_finite = jax.jit(all_finite)
