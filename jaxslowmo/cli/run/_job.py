"""One training run: its checkpoints, programs, and loop with records, stops and rollbacks."""

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxslowmo as js
from jaxslowmo.models import num_parameters
from jaxslowmo.tree import all_finite

from .._errors import CommandError, code_of, island_errors
from .._output import Reporter
from ..config._training import TrainConfig
from ..processes._peers import ALONE, Cluster, StopOnSignal
from ..processes._watch import lost_a_peer
from ._agreement import refuse_to_resume
from ._division import RunBatches, RunDevices, Text
from ._recipes import build_algorithm, form_of, loss_fn_of, policy_of
from ._recorder import Best, ByteLedger, Recorder, RunFiles
from ._run_folder import RunFolder

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import Checkpoints  # loads orbax


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
      status: "finished", "interrupted" (Ctrl-C), "preempted" (SIGTERM) or "diverged".
      records: the lines of metrics.jsonl.
      summary: the content of summary.json.
      statistics: the content of statistics.json; None without `--statistics`.
      saved: step of the newest checkpoint; None without one.
    """

    status: str
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    statistics: js.reports.StepReport | None = None
    saved: int | None = None

    @property
    def was_stopped(self) -> bool:
        """True if a signal ended the run early."""
        return self.status in ("interrupted", "preempted")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run, which a checkpoint holds next to the training state.

    Attributes:
      step: number of steps done.
      next_batch: index of the next batch; larger than `step` if a rollback skipped batches.
      bytes_sent: bytes that each replica has sent.
      best: best evaluation.
    """

    step: int = 0
    next_batch: int = 0
    bytes_sent: int = 0
    best: Best = dataclasses.field(default_factory=Best)

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Progress":
        """Return the progress in the extra data of a checkpoint."""
        return cls(**extra["progress"], best=Best(**extra["best"]))

    def extra(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        progress = dataclasses.asdict(self)
        best = progress.pop("best")
        return {"progress": progress, "best": best}


class Keeper:
    """A context that saves a run in OUT/checkpoints.

    A failed save is a warning, and the next one is tried. Several failures in a row end the run,
    and so does a failure of the last save. orbax is imported with the first checkpoint: a run
    without checkpoints does not need it.

    Args:
      job: job of the run, whose states are saved.
      config: configuration of the run.
      folder: folder of the run.
      params: one copy of the initial parameters.

    Attributes:
      last: step of the newest complete checkpoint of this run; None without one.
    """

    def __init__(self, job: "Job", config: TrainConfig, folder: RunFolder, params: Any) -> None:
        self._job, self._config, self._folder, self._params = job, config, folder, params
        self._begun: int | None = None
        self._failures = 0
        self.last: int | None = None

    @functools.cached_property
    def _checkpoints(self) -> "Checkpoints":
        from jaxslowmo.checkpoint import Checkpoints

        checkpoints = Checkpoints(self._folder.checkpoints, keep=self._config.keep)
        if self._job.cluster.watch is not None:
            self._job.cluster.watch.follow(checkpoints.written)
        return checkpoints

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an error in one process the others may never finish a save.
        if error is not None and self._job.cluster.count > 1:
            return
        try:
            self._settle(is_last=True)
        except CommandError as failed:
            if error is None:
                raise
            # The earlier error is raised; this one is only printed.
            print(f"warning: {failed}", file=sys.stderr, flush=True)

    def save(self, state: js.TrainState, progress: Progress, *, wait: bool = False) -> None:
        """Save the run, in the background unless `wait`.

        Raises:
          CommandError: too many saves in a row have failed; with `wait`, this one has.
        """
        if progress.step not in (self.last, self._begun):
            self._settle()  # raises or warns if the previous save failed
            extra = {
                "config": dataclasses.asdict(self._config),
                "corpus": self._job.text.fingerprint,
                **progress.extra(),
            }
            try:
                self._checkpoints.save(progress.step, state, extra=extra)
                self._begun = progress.step
            except Exception as error:
                self._failed(error, is_last=wait)
        if wait:
            self._settle(is_last=True)

    def look(self) -> None:
        """Warn now, and not when the next save is due, if the save in progress has failed.

        A failure that ends the run waits for that save, where all processes meet.
        """
        if self._begun is None or self._checkpoints.failure is None:
            return
        if self._failures + 1 < self._config.max_failed_saves and self._begun != self._config.steps:
            self._settle()

    def _settle(self, *, is_last: bool = False) -> None:
        """Wait for the save in progress.

        Raises:
          CommandError: it has failed, and it was the last save or too many failed before it.
        """
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        try:
            self._checkpoints.wait()
            self.last, self._failures = begun, 0
        except Exception as error:
            self._failed(error, is_last=is_last)

    def _failed(self, error: Any, *, is_last: bool) -> None:
        from jaxslowmo.checkpoint import CheckpointError, UnansweredError

        # If a file server does not answer, other processes may see another result of the save.
        is_alike = isinstance(error, CheckpointError) and not isinstance(error, UnansweredError)
        if not is_alike or lost_a_peer(error):
            raise error
        self._failures += 1
        what = f"{error.reason}; {self._folder.last_saved()}"
        if is_last or self._failures >= self._config.max_failed_saves:
            rows = f"; {self._failures} saves in a row have failed" if self._failures > 1 else ""
            raise CommandError(what + rows, code_of(error)) from error
        if self._job.cluster.is_first:
            line = f"warning: {what}; training goes on, and the next save is tried"
            print(line, file=sys.stderr, flush=True)

    def newest(self) -> tuple[js.TrainState, Progress, tuple[str, ...]] | None:
        """Return state and progress of the newest checkpoint, and notes on what has changed.

        Return None without a checkpoint.

        Raises:
          CommandError: the checkpoint is damaged, or does not fit.
        """
        self._settle()
        if not self._folder.checkpoints.exists() or not self._checkpoints.steps():
            return None
        from jaxslowmo.checkpoint import CheckpointError

        try:
            restored = self._checkpoints.restore(
                self._job.step,
                self._params,
                seed=self._config.seed,
                fallback=self._config.fallback,
                names=self._job.form.other_names(),
            )
        except CheckpointError as error:
            refuse_to_resume(error)
        self.last = restored.step
        return restored.state, Progress.of(restored.extra), restored.notes


class Job:
    """The programs of a configuration, and the loop of its runs, which differ in their seeds.

    Args:
      config: configuration of all its runs.
      placement: devices of the replicas.
      text: text that `divide_text` returned.
      label: name of the algorithm in the summary; the default is `config.algorithm`.
      cluster: the processes that run it.
      island: the island that `join_islands` returned for the configuration.

    Raises:
      ValueError: the library refuses an argument.
    """

    def __init__(
        self,
        config: TrainConfig,
        placement: RunDevices,
        text: Text,
        label: str | None = None,
        cluster: Cluster = ALONE,
        island: "js.islands.Island | None" = None,
    ):
        self.placement, self.text, self._island = placement, text, island
        self.label = label or config.algorithm
        self.cluster = cluster
        if config.tensorboard:
            importlib.import_module("tensorboardX")  # raises without the extra
        self.form = form_of(config)
        self.num_parameters = num_parameters(self.form.config)
        loss_fn = loss_fn_of(config, self.form, placement.mesh)
        self._algorithm = build_algorithm(config, self.form.specs)
        self.step = self._algorithm.make_step(
            loss_fn,
            config,
            mesh=placement.mesh,
            mode=config.mode,
            policy=policy_of(config),
        )
        # The loss of the host executor starts programs itself, and cannot be jitted.
        is_host = config.executor == "host"
        self._loss_fn = loss_fn if is_host else jax.jit(loss_fn)

    def evaluate(self, params: Any, model_state: Any = None) -> dict[str, float]:
        """Return the loss of one copy of the parameters on the held-out text, in nats per byte.

        Args:
          params: parameters; with stages their buffers, so that no device holds the whole model.
          model_state: unused.

        Communication: a broadcast of 4 bytes from process 0, with several processes.
        """
        del model_state
        if self.form.specs is None and self.form.layout is None:
            # One device is enough: all would compute the same, and CPU devices share their cores.
            params = jax.tree.map(lambda x: x.addressable_data(0), params)
        # One batch after another, so that memory does not grow with their number.
        loss = np.mean([np.asarray(self._loss_fn(params, x)) for x in self.text.validation])
        if self.cluster.count > 1:
            # Different processors round differently, and all must stop at the same evaluation.
            loss = multihost_utils.broadcast_one_to_all(loss)
        return {"validation_loss": float(loss)}

    def run(
        self, config: TrainConfig, folder: RunFolder, reporter: Reporter, *, saves: bool = False
    ) -> RunResult:
        """Train, and write config.json, metrics.jsonl and summary.json to `folder`.

        With `config.statistics`, write statistics.json, too. Ctrl-C and SIGTERM end the run after
        the step in progress; a loss that is not finite ends it when it is read.

        Args:
          config: configuration of the job, with the seed of the run.
          folder: folder of the run.
          reporter: shows the progress.
          saves: whether to keep checkpoints and resume from them, according to the configuration.

        Raises:
          CommandError: the checkpoint cannot be resumed.
        """
        self._config = config
        params = self.form.init(config.seed, self.placement.mesh)
        self._batches = RunBatches(self.text, config, self.placement.mesh)
        resumes = saves and config.resume
        with (
            StopOnSignal(self.cluster) as self._stop,  # until the last save is complete
            Keeper(self, config, folder, params) as keeper,
        ):
            self._keeper = keeper if saves else None
            restored = keeper.newest() if resumes else None
            init = self.step.init
            state, done, notes = restored or (init(params, seed=config.seed), Progress(), ())
            if self._island is not None:
                state = self._exchange(self._island, state)
            self._batches.position = done.next_batch
            first = self._batches.batch(0)
            ledger = ByteLedger.of_step(self.step, state, first, sent=done.bytes_sent)
            rate = config.statistics_rate
            measured = js.measured(self.step, rate=rate) if config.statistics else None
            with RunFiles(folder, config, writes=self.cluster.is_first, after=done.step) as files:
                recorder = Recorder(config, ledger, self._algorithm.schedule, files, reporter)
                recorder.best, self._recorder = done.best, recorder
                if restored:
                    past_schedule = self._algorithm.past_schedule(config, done.step)
                    reporter.say(f"Resumed at step {done.step}.", *notes, *past_schedule)
                    recorder.note(done.step, resumed=list(notes))
                else:
                    if resumes:
                        reporter.say(f"There is no checkpoint in {folder.path}: from scratch.")
                    # All replicas start with the same parameters.
                    recorder.start(self.evaluate(self.step.consensus(state, whole=False)))
                status, state = self._train(measured or self.step, state, done.step)
                if saves and config.export and status == "finished":
                    with self._stop.besides_steps():
                        self._export(folder.model, state)
        summary = recorder.summary(status) | self._facts(ledger)
        statistics = measured.report() if measured else None
        files.finish(summary, statistics)
        return RunResult(status, recorder.records, summary, statistics, keeper.last)

    def _train(
        self, step: js.train.TrainStep | js.reports.MeasuredStep, state: js.TrainState, done: int
    ) -> tuple[str, js.TrainState]:
        """Train from step `done` to the last one, or until the run ends early.

        Returns:
          "finished", "interrupted", "preempted" or "diverged", and the last state.

        Communication: that of the steps. Evaluations gather the parameters, and checkpoints check
          with one all-reduce that all are finite.
        """
        # The resumed run had already ended, early or after all steps.
        if self._recorder.is_patience_over or done >= self._config.steps:
            return "finished", state
        options = self._config
        rollbacks = options.max_rollbacks if options.on_nan == "rollback" else 0
        while True:
            status, state, done = self._train_until_end(step, state, done)
            if status != "diverged" or not rollbacks or self._keeper is None:
                return status, state
            checkpoint = self._keeper.newest()
            if checkpoint is None:
                return status, state
            rollbacks -= 1
            # The batches since the checkpoint are skipped: they would diverge again.
            state, progress, _ = checkpoint
            self._recorder.note(progress.step, rolled_back_from=done)
            self._recorder.best = progress.best
            done = progress.step

    def _train_until_end(
        self, step: Any, state: js.TrainState, done: int
    ) -> tuple[str, js.TrainState, int]:
        status = "interrupted"
        evaluate = js.Evaluate(self.evaluate, mesh=self.placement.mesh, whole=False)
        pipeline = js.TrainPipeline(step, state, self._batches, depth=self._config.prefetch)
        loop = js.train_loop(pipeline, num_steps=self._config.steps)
        # A second Ctrl-C raises in the middle of a step.
        with contextlib.suppress(KeyboardInterrupt), pipeline:
            for result in loop:
                if self.placement.is_cpu:
                    # CPU devices share the threads of the host: later steps in the queue could
                    # hold the threads that the collective of an earlier step waits for.
                    jax.block_until_ready(result.metrics)
                island = self._island
                if island is not None:
                    if island.due(result.step):
                        pipeline.state = result.state = self._exchange(island, result.state)
                    result.reports["round"] = island.round
                state, done = result.state, result.step
                ending = self._after(result, evaluate)
                if ending is not None:
                    status = ending
                    break
            else:
                status = "finished"
        # Batches that were loaded ahead were not trained on: after a rollback they come first.
        self._batches.position = pipeline.position
        return status, state, done

    def _exchange(self, island: "js.islands.Island", state: js.TrainState) -> js.TrainState:
        """Return the state with which an island goes on; unchanged if a signal ends its wait.

        A resumed run then makes up for the exchange.
        """
        if self._stop.reason is None:
            with self._stop.besides_steps(), island_errors(), self._stop.ends_wait():
                return island.exchange(state)
        return state

    def _after(self, result: js.train.StepResult, evaluate: js.Evaluate) -> str | None:
        """Record and save after a step; return the status with which to end, or None."""
        config, recorder, options = self._config, self._recorder, self._config
        is_last = result.step == config.steps
        if self._keeper is not None:
            self._keeper.look()
        stop = None if is_last else self._stop.after_step(result.phase)
        evaluates = is_last or result.step % config.eval_every == 0

        def measure() -> Mapping[str, float]:
            with self._stop.besides_steps():
                return evaluate(result)

        if not recorder.step(result, evaluate=measure if evaluates else None, now=bool(stop)):
            return "diverged"
        if options.check_parameters and result.phase and _was_refused(result.state):
            return "diverged"
        is_early = evaluates and recorder.is_patience_over
        every = options.checkpoint_every
        is_due = every and (result.step % every == 0 or is_last or is_early)
        if self._keeper is not None and (stop or is_due):
            if not _all_finite(result.state.params):
                return "diverged"
            sent, best = recorder.bytes_sent, recorder.best
            progress = Progress(result.step, result.position, sent, best)
            self._keeper.save(result.state, progress, wait=bool(stop))
        return stop or ("finished" if is_early else None)

    def _facts(self, ledger: ByteLedger) -> dict[str, Any]:
        """Return the entries of summary.json that the recorder does not know."""
        return {
            "algorithm": self.label,
            "parameters": self.num_parameters,
            "placement": self.placement.description,
            "bytes_are_hypothetical": self.placement.is_virtual,
            "bytes_per_step_by_kind": ledger.by_kind,
            "data": self.text.description,
        }

    def _export(self, folder: Path, state: js.TrainState) -> None:
        from jaxslowmo.checkpoint import export_consensus

        mean = self.form.join(self.step.consensus(state))
        one = jax.tree.map(lambda x: x[None], mean)  # a single replica: its mean is itself
        shape = {"model": dataclasses.asdict(self.form.config)}
        export_consensus(folder, one, mesh=js.virtual_mesh({"replica": 1}), extra=shape)


def _was_refused(state: js.TrainState) -> bool:
    """Wait for the step, and return whether the replicas refused an exchange."""
    refused = state.exchange.local["refused"]
    return bool(np.asarray(refused.addressable_data(0)).any())


# With several devices one all-reduce of a boolean.
_all_finite = jax.jit(all_finite)
