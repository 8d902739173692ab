"""`jaxslowmo train`: one training run, in one process or as one of several.

A `Job` holds the programs of a configuration and the loop with its records, stops and rollbacks;
`RunSaver` holds its checkpoints.
"""

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
from rich.console import Console

import jaxslowmo as js
from jaxslowmo.data import read_corpus
from jaxslowmo.models import num_parameters
from jaxslowmo.tree import all_finite

from ._config import TrainConfig, argument_errors, to_file
from ._errors import EXIT_CODES, CommandError, code_of, island_errors
from ._folder import RunFolder, clear_folder, open_run, refuse_to_resume
from ._processes import ALONE, Cluster, StopOnSignal, is_one_of_several, known_processes
from ._record import (
    Best,
    ByteLedger,
    Recorder,
    Reporter,
    facts_table,
    format_bytes,
    format_count,
    format_loss,
    print_lines,
    report_collectives,
    run_table,
)
from ._setup import (
    Devices,
    Model,
    Text,
    choose_devices,
    join_islands,
    make_step,
    parse_codec,
    past_schedule,
    set_cpu_devices,
)
from ._watch import Watch, is_peer_failure, join_cluster, propagate_failures

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import Checkpoints  # loads orbax


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
      status: "finished", "interrupted" (Ctrl-C), "preempted" (SIGTERM) or "diverged".
      records: the lines of metrics.jsonl.
      summary: the content of summary.json.
      statistics: the content of statistics.json; None without `statistics`.
      saved: step of the newest checkpoint; None without one.
    """

    status: str
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    statistics: js.reports.StepReport | None = None
    saved: int | None = None

    @property
    def got_signal(self) -> bool:
        """True if a signal ended the run early."""
        return self.status in ("interrupted", "preempted")


def train(config: TrainConfig) -> int:
    """Train once, show the progress and a summary, and return the exit code.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the other processes.
    """
    if not is_one_of_several(config.cluster):
        return _train(config, ALONE)
    assert config.run.out is not None  # checked by the parent
    set_cpu_devices(config, known_processes(config.cluster))
    cluster, saved = join_cluster(config.cluster), RunFolder(config.run.out).describe_checkpoint
    watch = Watch(cluster.index, cluster.count, config.cluster.stall_timeout, saved)
    with propagate_failures(watch):
        return _train(config, dataclasses.replace(cluster, watch=watch))


def _train(config: TrainConfig, cluster: Cluster) -> int:
    with contextlib.ExitStack() as stack:
        with argument_errors():
            devices = choose_devices(config, cluster)
            model, corpus = Model(config, devices.mesh), read_corpus(config.data.data)
            text = Text(config, corpus, devices.mesh)
            folder, config = stack.enter_context(open_run(config, corpus.fingerprint, cluster))
            del corpus  # it may be large, and `text` is what this process needs of it
            island = join_islands(config)
            job = Job(config, devices, model, text, cluster=cluster, island=island)
        if config.run.overwrite:  # only now: a wrong call should delete nothing
            clear_folder(config, folder, cluster)
        console = Console(quiet=not cluster.is_first)
        if config.cluster.process_logs and not cluster.is_first:
            path = folder / "logs" / f"process-{cluster.index}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
            console = Console(file=log)
        name, size = job.label, format_count(job.num_parameters)
        print_lines(console, f"{name}, {size} parameters, {devices.description}", text.description)
        reporter = Reporter(console, name, config.run.steps, would=job.has_hypothetical_bytes)
        result = job.run(config, folder, reporter, saves=True)
        if island is not None and cluster.is_first:
            print_lines(console, f"Island {island.name}: {island.report()}")
        if cluster.is_first:
            from ._figures import draw_loss  # loads matplotlib

            draw_loss(result.records, result.summary, folder / "loss.png")
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


def _conclude(console: Console, result: RunResult, folder: RunFolder) -> None:
    console.print(run_table(result.summary))
    summary = result.summary
    if result.statistics:
        print_lines(console, str(result.statistics))
    if result.status == "diverged":
        advice = "lower --learning-rate or lengthen --warmup"
        print_lines(console, f"The loss is not finite at step {summary['steps']}: {advice}.")
    if summary["stopped_early"]:
        loss = format_loss(summary["best_validation_loss"])
        best = f"the smallest validation loss, {loss}, was that of step {summary['best_step']}"
        print_lines(
            console, f"Stopped early: {best}. A resumed run with a larger patience goes on."
        )
    if result.got_signal and result.saved is not None:
        print_lines(console, f"Saved at step {result.saved}; --resume goes on from there.")
    print_lines(console, f"Results in {folder.path}, its loss drawn in loss.png")
    if result.status == "finished" and result.saved is not None:
        print_lines(console, f"Text of this model: jaxslowmo sample {folder.path}")


def dry_run(config: TrainConfig) -> int:
    """Print the placement of a run and the collectives of its steps; return the exit code.

    Nothing is trained and no text is read: programs are traced for the available devices.

    Raises:
      CommandError: `train` would refuse the options, or there are too few devices.
    """
    console = Console()
    with argument_errors():
        devices = choose_devices(config)
        model = Model(config, devices.mesh)
        step = make_step(config, model.loss_fn, devices.mesh)
        state = step.init(model.init(config.data.seed), seed=config.data.seed)

    def on_a_device(tree: Any) -> str:
        leaves = jax.tree.leaves(tree)
        if devices.is_virtual:
            return format_bytes(sum(x.nbytes for x in leaves) // config.mesh.num_replicas)
        return format_bytes(sum(x.addressable_shards[0].data.nbytes for x in leaves))

    facts = {
        "devices": devices.description,
        "parameters": format_count(num_parameters(model.config)),
        "parameters on a device": on_a_device(state.params),
        "optimizer on a device": on_a_device(state.opt_state),
        "algorithm on a device": on_a_device(state.exchange),
        "windows of a replica in a step": str(config.data.batch),
    }
    if model.schedule is not None and model.parts is not None:
        schedule, executor = model.schedule, config.mesh.executor
        timed = schedule.simulate(lockstep=executor == "one_program")
        stages = [
            " and ".join(f"{start} to {end - 1}" for start, end in ranges) for ranges in model.parts
        ]
        facts |= {
            "microbatches": str(schedule.num_microbatches),
            "layers of each stage": "; ".join(stages),
            "schedule": schedule.name,
            "executor": executor,
            "bubble, equal costs": f"{timed.bubble:.1%}",
            "microbatches that a stage holds": ", ".join(map(str, schedule.stash)),
        }
    if config.island.islands is not None:
        codec, size = parse_codec(config.algorithm.codec), num_parameters(model.config)
        part = 4 * size if codec is None else codec.num_bytes(size)
        facts["part of a round, to the store"] = format_bytes(part)
    console.print(facts_table(facts, title=config.algorithm.algorithm))
    rows = config.mesh.num_replicas * config.data.batch
    batch = np.zeros((rows, model.config.context_length + 1), np.uint8)
    report = report_collectives(step, state, batch)
    print_lines(console, "What goes into the collectives of one device, and what that sends:")
    counted = "Each replica sends in a step, as progress lines count it:"
    if config.island.islands is not None:  # whose progress lines count what goes to the store
        counted = "Each replica of the island sends the others in a step:"
    print_lines(console, str(report), counted)
    for kind, count in ByteLedger(report, devices.mesh).by_kind.items():
        print_lines(console, f"  {kind}: {format_bytes(count)}")
    return 0


class Job:
    """The programs of a configuration, and the loop of its runs, which differ in their seeds.

    Args:
      config: configuration of all its runs.
      devices: devices of the replicas.
      model: the model, on the mesh of the devices.
      text: what it reads.
      label: name of the algorithm in the summary; the default is that of the configuration.
      cluster: the processes that run it.
      island: the island that `join_islands` returned for the configuration.

    Raises:
      CommandError: the library refuses an argument.
    """

    def __init__(
        self,
        config: TrainConfig,
        devices: Devices,
        model: Model,
        text: Text,
        label: str | None = None,
        cluster: Cluster = ALONE,
        island: "js.islands.Island | None" = None,
    ):
        if config.run.tensorboard:
            importlib.import_module("tensorboardX")  # raises without the extra
        self.devices, self.model, self.text, self.cluster = devices, model, text, cluster
        self.label, self._island = label or config.algorithm.algorithm, island
        self.num_parameters = num_parameters(model.config)
        self.step = make_step(config, model.loss_fn, devices.mesh)
        # The loss of the host executor starts programs itself, and cannot be jitted.
        is_host = config.mesh.executor == "host"
        self._loss_fn = model.loss_fn if is_host else jax.jit(model.loss_fn)

    @property
    def has_hypothetical_bytes(self) -> bool:
        """True if the bytes are those that virtual replicas would send; an island's are sent."""
        return self.devices.is_virtual and self._island is None

    def evaluate(self, params: Any, model_state: Any = None) -> dict[str, float]:
        """Return the loss of one copy of the parameters on the held-out text, in nats per byte.

        Args:
          params: parameters; with stages their buffers, so that no device holds the whole model.
          model_state: unused.

        Communication: a broadcast of 4 bytes from process 0, with several processes.
        """
        del model_state
        if self.model.is_whole:
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

        Ctrl-C and SIGTERM end the run after the step in progress; a loss that is not finite ends it
        when it is read.

        Args:
          config: configuration of the job, with the seed of the run.
          folder: folder of the run.
          reporter: shows the progress.
          saves: whether to keep checkpoints and resume from them, according to the configuration.

        Raises:
          CommandError: the checkpoint cannot be resumed.
        """
        self._config, options, seed = config, config.checkpoint, config.data.seed
        params = self.model.init(seed)
        self.text.begin(config)
        with (
            StopOnSignal(self.cluster) as self._stop,  # until the last save is complete
            RunSaver(self, config, folder, params) as keeper,
        ):
            self._keeper = keeper if saves else None
            restored = keeper.restore_newest() if saves and options.resume else None
            state, done, notes = restored or (self.step.init(params, seed=seed), Progress(), ())
            if self._island is not None:
                state = self._exchange(self._island, state)
            self.text.position = done.next_batch
            report = report_collectives(self.step, state, self.text.batch(0))
            self._ledger = ByteLedger(report, self.step.mesh, done.bytes_sent, self._island)
            measured = js.reports.measured(self.step) if options.statistics else None
            own = folder if self.cluster.is_first else None
            with Recorder(config, self._ledger, own, reporter, done.step, done.best) as recorder:
                self._recorder = recorder
                if restored:
                    past = past_schedule(config, done.step)
                    print_lines(reporter.console, f"Resumed at step {done.step}.", *notes, *past)
                    recorder.note(done.step, resumed=list(notes))
                else:
                    if saves and options.resume:
                        nothing = f"There is no checkpoint in {folder.path}: from scratch."
                        print_lines(reporter.console, nothing)
                    # All replicas start with the same parameters.
                    recorder.start(self.evaluate(self.step.consensus(state, whole=False)))
                status, state = self._train(measured or self.step, state, done.step)
                if saves and options.export and status == "finished":
                    with self._stop.outside_steps():
                        self._export(folder / "model", state)
        statistics = measured.report() if measured else None
        if statistics and own:
            statistics.write(own / "statistics.json")
        summary = recorder.summary(
            status,
            algorithm=self.label,
            parameters=self.num_parameters,
            placement=self.devices.description,
            bytes_are_hypothetical=self.has_hypothetical_bytes,
            data=self.text.description,
            **({} if self._island is None else {"island": self._island.name}),
        )
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
        if self._recorder.is_patience_over or done >= self._config.run.steps:
            return "finished", state
        options = self._config.checkpoint
        rollbacks = options.max_rollbacks if options.on_nan == "rollback" else 0
        while True:
            status, state, done = self._train_until_end(step, state, done)
            if status != "diverged" or not rollbacks or self._keeper is None:
                return status, state
            checkpoint = self._keeper.restore_newest()
            if checkpoint is None:
                return status, state
            rollbacks -= 1
            # The batches since the checkpoint are skipped: they would diverge again.
            state, progress, _ = checkpoint
            self._recorder.note(progress.step, rolled_back_from=done)
            self._recorder.best, done = progress.best, progress.step

    def _train_until_end(
        self, step: Any, state: js.TrainState, done: int
    ) -> tuple[str, js.TrainState, int]:
        status, run, island = "interrupted", self._config.run, self._island
        evaluate = js.train.Evaluate(self.evaluate, mesh=self.devices.mesh, whole=False)
        pipeline = js.TrainPipeline(step, state, self.text, depth=run.prefetch)
        loop = js.train_loop(pipeline, num_steps=run.steps)
        # A second Ctrl-C raises in the middle of a step.
        with contextlib.suppress(KeyboardInterrupt), pipeline:
            for result in loop:
                if self.devices.is_cpu:
                    # CPU devices share the threads of the host: later steps in the queue could
                    # hold the threads that the collective of an earlier step waits for.
                    jax.block_until_ready(result.metrics)
                if island is not None:
                    if island.due(result.step):
                        pipeline.state = result.state = self._exchange(island, result.state)
                    result.reports["round"] = island.round
                state, done = result.state, result.step
                ending = self._finish_step(result, evaluate)
                if ending is not None:
                    status = ending
                    break
            else:
                status = "finished"
        # Batches that were loaded ahead were not trained on: after a rollback they come first.
        self.text.position = pipeline.position
        return status, state, done

    def _exchange(self, island: "js.islands.Island", state: js.TrainState) -> js.TrainState:
        """Return the state with which an island goes on; unchanged if a signal ends its wait.

        A resumed run then makes up for the exchange.
        """
        if self._stop.reason is None:
            with self._stop.outside_steps(), island_errors(), self._stop.interruptible_wait():
                return island.exchange(state)
        return state

    def _finish_step(self, result: js.train.StepResult, evaluate: js.train.Evaluate) -> str | None:
        """Record and save after a step; return the status with which to end, or None."""
        run, recorder, options = self._config.run, self._recorder, self._config.checkpoint
        step, is_last = result.step, result.step == run.steps
        if self._keeper is not None:
            self._keeper.check_save()
        stop = None if is_last else self._stop.after_step(result.phase)
        evaluates = is_last or step % run.eval_every == 0

        def measure() -> Mapping[str, float]:
            if not evaluates:  # the record before a stop
                return {}
            with self._stop.outside_steps():
                return evaluate(result)

        if not recorder.step(result, measure if evaluates or stop else None):
            return "diverged"
        checks = self._config.algorithm.check_parameters
        if checks and result.phase and _has_refusal(result.state):
            return "diverged"
        is_early = evaluates and recorder.is_patience_over
        every, is_end = options.checkpoint_every, is_last or is_early
        is_due = is_end if every is None else every and (step % every == 0 or is_end)
        if self._keeper is not None and (stop or is_due):
            if not _all_finite(result.state.params):
                return "diverged"
            progress = Progress(step, result.position, self._ledger.sent, recorder.best)
            self._keeper.save(result.state, progress, wait=bool(stop))
        return stop or ("finished" if is_early else None)

    def _export(self, folder: Path, state: js.TrainState) -> None:
        from jaxslowmo.checkpoint import export_consensus

        mean = self.model.join(self.step.consensus(state))
        one = jax.tree.map(lambda x: x[None], mean)  # a single replica: its mean is itself
        shape = {"model": dataclasses.asdict(self.model.config)}
        export_consensus(folder, one, mesh=js.virtual_mesh({"replica": 1}), extra=shape)


def _has_refusal(state: js.TrainState) -> bool:
    """Wait for the step, and return whether the replicas refused an exchange."""
    refused = state.exchange.local["refused"]
    return bool(np.asarray(refused.addressable_data(0)).any())


# With several devices one all-reduce of a boolean.
_all_finite = jax.jit(all_finite)


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


class RunSaver(contextlib.AbstractContextManager):
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
        self._saving_step: int | None = None
        self._failures = 0
        self.last: int | None = None

    @functools.cached_property
    def _checkpoints(self) -> "Checkpoints":
        from jaxslowmo.checkpoint import Checkpoints

        keep = self._config.checkpoint.keep
        checkpoints = Checkpoints(self._folder / "checkpoints", keep=keep)
        if self._job.cluster.watch is not None:
            self._job.cluster.watch.watch_save(checkpoints.written)
        return checkpoints

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an error in one process the others may never finish a save.
        if error is not None and self._job.cluster.count > 1:
            return
        try:
            self._wait_for_save(is_last=True)
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
        if progress.step not in (self.last, self._saving_step):
            self._wait_for_save()  # raises or warns if the previous save failed
            extra = {
                "config": to_file(self._config),
                "corpus": self._job.text.fingerprint,
                "progress": dataclasses.asdict(progress),
            }
            try:
                self._checkpoints.save(progress.step, state, extra=extra)
                self._saving_step = progress.step
            except Exception as error:
                self._handle_failed_save(error, is_last=wait)
        if wait:
            self._wait_for_save(is_last=True)

    def check_save(self) -> None:
        """Warn now, and not when the next save is due, if the save in progress has failed.

        A failure that ends the run waits for that save, where all processes meet.
        """
        if self._saving_step is None or self._checkpoints.failure is None:
            return
        is_final = self._failures + 1 >= self._config.checkpoint.max_failed_saves
        if not is_final and self._saving_step != self._config.run.steps:
            self._wait_for_save()

    def _wait_for_save(self, *, is_last: bool = False) -> None:
        """Wait for the save in progress.

        Raises:
          CommandError: it has failed, and it was the last save or too many failed before it.
        """
        if self._saving_step is None:
            return
        saving_step, self._saving_step = self._saving_step, None
        try:
            self._checkpoints.wait()
            self.last, self._failures = saving_step, 0
        except Exception as error:
            self._handle_failed_save(error, is_last=is_last)

    def _handle_failed_save(self, error: Any, *, is_last: bool) -> None:
        from jaxslowmo.checkpoint import CheckpointError, UnansweredError

        # If a file server does not answer, other processes may see another result of the save.
        is_alike = isinstance(error, CheckpointError) and not isinstance(error, UnansweredError)
        if not is_alike or is_peer_failure(error):
            raise error
        self._failures += 1
        what = f"{error.reason}; {self._folder.describe_checkpoint()}"
        if is_last or self._failures >= self._config.checkpoint.max_failed_saves:
            rows = f"; {self._failures} saves in a row have failed" if self._failures > 1 else ""
            raise CommandError(what + rows, code_of(error)) from error
        if self._job.cluster.is_first:
            line = f"warning: {what}; training goes on, and the next save is tried"
            print(line, file=sys.stderr, flush=True)

    def restore_newest(self) -> tuple[js.TrainState, Progress, tuple[str, ...]] | None:
        """Return state and progress of the newest checkpoint, and notes on what has changed.

        Return None without a checkpoint.

        Raises:
          CommandError: the checkpoint is damaged, or does not fit.
        """
        self._wait_for_save()
        if not (self._folder / "checkpoints").exists() or not self._checkpoints.steps():
            return None
        from jaxslowmo.checkpoint import CheckpointError

        try:
            restored = self._checkpoints.restore(
                self._job.step,
                self._params,
                seed=self._config.data.seed,
                fallback=self._config.checkpoint.fallback,
                names=self._job.model.other_names(),
            )
        except CheckpointError as error:
            refuse_to_resume(error)
        self.last, done = restored.step, restored.extra["progress"]
        return restored.state, Progress(**done | {"best": Best(**done["best"])}), restored.notes
