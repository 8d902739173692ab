"""One training run: everything between a configuration and its metrics."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxslowmo as js
from jaxslowmo.models import num_parameters

from .._output import Reporter
from ..config._training import TrainConfig
from ..processes._peers import ALONE, Cluster, StopOnSignal
from ._division import RunBatches, RunDevices, Text
from ._keeper import Keeper, Progress
from ._metrics import RunFiles
from ._model import form_of, loss_fn_of, policy_of, saved_form
from ._recipes import build_algorithm
from ._recorder import ByteLedger, Recorder
from ._run_folder import RunFolder
from ._session import Session


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run left.

    Attributes:
      status: "finished", "interrupted" (Ctrl-C), "preempted" (SIGTERM) or "diverged".
      records: the lines of metrics.jsonl.
      summary: what summary.json holds.
      statistics: what statistics.json holds, where it was asked for.
      saved: the step of the newest checkpoint; None without any.
    """

    status: str
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    statistics: js.StepReport | None = None
    saved: int | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether a signal ended it early."""
        return self.status in ("interrupted", "preempted")


class Job:
    """A configuration made ready: programs that several seeds share.

    Args:
      config: of all its runs, which differ in their seeds.
      placement: where.
      text: what `divide_text` returned.
      label: what the summary calls the algorithm; None: its name.
      cluster: the processes that run it.

    Raises:
      ValueError: for arguments that the library refuses.
    """

    def __init__(
        self,
        config: TrainConfig,
        placement: RunDevices,
        text: Text,
        label: str | None = None,
        cluster: Cluster = ALONE,
    ):
        self.placement, self.text = placement, text
        self.label = label or config.algorithm.algorithm
        self._cluster = cluster
        if config.tensorboard:
            importlib.import_module(f"{__package__}._tensorboard")  # or it is missing
        self._form = form_of(config)
        self.num_parameters = num_parameters(self._form.config)
        loss_fn = loss_fn_of(config, self._form, placement.mesh)
        self._algorithm = build_algorithm(config, self._form.specs)
        # As the backward pass finishes gradients, so that buckets can travel beside it. A pipeline
        # finishes all with its last microbatch.
        is_ready = self._algorithm.gradients is not None and self._form.layout is None
        self.step = self._algorithm.make_step(
            loss_fn,
            config,
            mesh=placement.mesh,
            mode=config.mode,
            policy=policy_of(config),
            order="ready" if is_ready else "reverse",
            validate=config.optimizer.validate,
        )
        is_host = config.mesh.executor == "host"  # whose loss is no part of another program
        self._loss_fn = loss_fn if is_host else jax.jit(loss_fn)

    def evaluate(self, params: Any, model_state: Any = None) -> dict[str, float]:
        """Loss of one copy of the parameters on the held-out text, nats per byte.

        Args:
          params: of stages their buffers, so that no device has to hold the whole model.
          model_state: of no use here.

        Communication: with several processes process 0 tells the others what it found, 4 bytes.
        """
        del model_state
        if self._form.specs is None and self._form.layout is None:
            # On one device: all would compute the same, and CPU devices share their cores.
            params = jax.tree.map(lambda x: x.addressable_data(0), params)
        # One batch after another, so that memory does not grow with their number.
        loss = np.mean([np.asarray(self._loss_fn(params, x)) for x in self.text.validation])
        if self._cluster.count > 1:
            # Processors of other kinds round otherwise, and all must stop at the same evaluation.
            loss = multihost_utils.broadcast_one_to_all(loss)
        return {"validation_loss": float(loss)}

    def run(
        self, config: TrainConfig, folder: RunFolder, reporter: Reporter, *, saves: bool = False
    ) -> RunResult:
        """Trains and writes config.json, metrics.jsonl and summary.json to `folder`.

        With `config.statistics` also statistics.json. Ctrl-C and SIGTERM end it after the step in
        progress, a loss that is not finite as soon as it is read.

        Args:
          config: the job's, with the seed of the run.
          folder: of the run.
          reporter: shows the progress.
          saves: keep checkpoints and resume from them, as `config.checkpoint` says.

        Raises:
          CommandError: a checkpoint that cannot be resumed.
        """
        params = self._form.init(config.seed, self.placement.mesh)
        batches = RunBatches(self.text, config, self.placement.mesh)
        resumes = saves and config.checkpoint.resume
        with (
            StopOnSignal(self._cluster) as stop,  # until the last save is complete
            Keeper(
                config,
                folder,
                self.step,
                params,
                cluster=self._cluster,
                corpus=self.text.fingerprint,
                saved_form=lambda extra: saved_form(extra, self._form),
            ) as keeper,
        ):
            found = keeper.newest() if resumes else None
            state, done, notes = found or (self.step.init(params, seed=config.seed), Progress(), ())
            batches.position = done.next_batch
            ledger = ByteLedger.of_step(self.step, state, batches.batch(0), sent=done.bytes_sent)
            rate = config.statistics_rate if config.statistics else None
            measured = js.measured(self.step, rate=rate) if rate else None
            with RunFiles(folder, config, writes=self._cluster.is_first, after=done.step) as files:
                recorder = Recorder(config, ledger, self._algorithm.schedule, files, reporter)
                recorder.best = done.best
                if found:
                    beyond = self._algorithm.beyond(config, done.step)
                    reporter.say(f"Resumed at step {done.step}.", *notes, *beyond)
                    recorder.note(done.step, resumed=list(notes))
                else:
                    if resumes:
                        reporter.say(f"There is no checkpoint in {folder.path}: from scratch.")
                    # All replicas start alike.
                    recorder.start(self.evaluate(self.step.consensus(state, whole=False)))
                session = Session(
                    config=config,
                    step=measured or self.step,
                    evaluate=js.Evaluate(self.evaluate, mesh=self.placement.mesh, whole=False),
                    batches=batches,
                    recorder=recorder,
                    keeper=keeper if saves else None,
                    stop=stop,
                    waits=self.placement.is_cpu,
                )
                status, state = session.train(state, done.step)
                if saves and config.checkpoint.export and status == "finished":
                    with stop.besides_steps():
                        self._export(folder.model, state)
        summary = recorder.summary(status) | self._facts(ledger)
        statistics = measured.report() if measured else None
        files.finish(summary, statistics)
        return RunResult(status, recorder.records, summary, statistics, keeper.last)

    def _facts(self, ledger: ByteLedger) -> dict[str, Any]:
        """What summary.json tells besides the recorder's numbers."""
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

        mean = self._form.join(self.step.consensus(state))
        one = jax.tree.map(lambda x: x[None], mean)  # the mean of which is itself
        shape = {"model": dataclasses.asdict(self._form.config)}
        export_consensus(folder, one, mesh=js.virtual_mesh({"replica": 1}), extra=shape)
