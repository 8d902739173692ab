"""One training run, from its configuration to its metrics."""

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


class Job:
    """The programs of a configuration, which runs with several seeds share.

    Args:
      config: configuration of all its runs, which differ only in their seeds.
      placement: devices of the replicas.
      text: text that `divide_text` returned.
      label: name of the algorithm in the summary; the default is `config.algorithm.algorithm`.
      cluster: the processes that run it.

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
    ):
        self.placement, self.text = placement, text
        self.label = label or config.algorithm.algorithm
        self._cluster = cluster
        if config.tensorboard:
            importlib.import_module(f"{__package__}._tensorboard")  # raises without the extra
        self._form = form_of(config)
        self.num_parameters = num_parameters(self._form.config)
        loss_fn = loss_fn_of(config, self._form, placement.mesh)
        self._algorithm = build_algorithm(config, self._form.specs)
        self.step = self._algorithm.make_step(
            loss_fn,
            config,
            mesh=placement.mesh,
            mode=config.mode,
            policy=policy_of(config),
        )
        # The loss of the host executor starts programs itself, and cannot be jitted.
        is_host = config.mesh.executor == "host"
        self._loss_fn = loss_fn if is_host else jax.jit(loss_fn)

    def evaluate(self, params: Any, model_state: Any = None) -> dict[str, float]:
        """Return the loss of one copy of the parameters on the held-out text, in nats per byte.

        Args:
          params: parameters; with stages their buffers, so that no device holds the whole model.
          model_state: unused.

        Communication: a broadcast of 4 bytes from process 0, with several processes.
        """
        del model_state
        if self._form.specs is None and self._form.layout is None:
            # One device is enough: all would compute the same, and CPU devices share their cores.
            params = jax.tree.map(lambda x: x.addressable_data(0), params)
        # One batch after another, so that memory does not grow with their number.
        loss = np.mean([np.asarray(self._loss_fn(params, x)) for x in self.text.validation])
        if self._cluster.count > 1:
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
          saves: whether to keep checkpoints and resume from them, according to `config.checkpoint`.

        Raises:
          CommandError: the checkpoint cannot be resumed.
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
            restored = keeper.newest() if resumes else None
            state, done, notes = restored or (
                self.step.init(params, seed=config.seed),
                Progress(),
                (),
            )
            batches.position = done.next_batch
            ledger = ByteLedger.of_step(self.step, state, batches.batch(0), sent=done.bytes_sent)
            rate = config.statistics_rate if config.statistics else None
            measured = js.measured(self.step, rate=rate) if rate else None
            with RunFiles(folder, config, writes=self._cluster.is_first, after=done.step) as files:
                recorder = Recorder(config, ledger, self._algorithm.schedule, files, reporter)
                recorder.best = done.best
                if restored:
                    past_schedule = self._algorithm.past_schedule(config, done.step)
                    reporter.say(f"Resumed at step {done.step}.", *notes, *past_schedule)
                    recorder.note(done.step, resumed=list(notes))
                else:
                    if resumes:
                        reporter.say(f"There is no checkpoint in {folder.path}: from scratch.")
                    # All replicas start with the same parameters.
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

        mean = self._form.join(self.step.consensus(state))
        one = jax.tree.map(lambda x: x[None], mean)  # a single replica: its mean is itself
        shape = {"model": dataclasses.asdict(self._form.config)}
        export_consensus(folder, one, mesh=js.virtual_mesh({"replica": 1}), extra=shape)
