"""The records of a run: their metrics, the best evaluation, the bytes sent, and the files."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxslowmo as js
from jaxslowmo.models import GPT_PRESETS

from ..._support.checks import warn_user
from ..._support.files import write_anew
from .._output import Reporter, json_line, write_json
from ..config._training import TrainConfig
from ._run_folder import RunFolder

# Entries of records about the loss scale.
_OF_SCALE = ("loss_scale", "skipped_updates")
_OF_ISLAND = ("round",)
# Entries of records that become curves of TensorBoard.
_CURVES = (
    "loss", "validation_loss", "learning_rate", "tokens_per_second", "bytes_sent", *_OF_SCALE,
)  # fmt: skip
# Errors that may pass: the disk is full, or the folder is being deleted (the next record makes it
# again).
_RETRIED = (errno.ENOSPC, errno.ENOENT)


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the smallest validation loss so far, the first one of equal ones.

    Attributes:
      step: step after which it was; None before the first evaluation.
      validation_loss: its loss in nats per byte; None before the first evaluation.
      since: number of evaluations after it.
    """

    step: int | None = None
    validation_loss: float | None = None
    since: int = 0

    def after(self, step: int, validation_loss: float) -> "Best":
        """Return the best after one more evaluation; NaN is never better."""
        if self.validation_loss is None or validation_loss < self.validation_loss:
            return Best(step, validation_loss)
        return dataclasses.replace(self, since=self.since + 1)


class ByteLedger:
    """The bytes that a replica has sent so far.

    They are those of the collectives that the programs emit over the axis "replica", as rings: an
    all-reduce of N bytes between R replicas sends 2 (R - 1) / R N. With several devices per replica
    the bytes of all of them are added, for all_reduce including what stays inside the replica (its
    one collective spans both axes). Evaluation of the consensus is not counted. Virtual replicas
    send nothing: the numbers are what the same programs would send on a mesh of as many devices.

    Attributes:
      by_kind: bytes that each replica sends in one step of each kind.
      sent: bytes that each replica has sent so far.
    """

    def __init__(self, by_kind: dict[str, int], sent: int = 0):
        self.by_kind = by_kind
        self.sent = sent

    @classmethod
    def of_step(
        cls, step: js.train.TrainStep, state: Any, batch: Any, *, sent: int = 0
    ) -> "ByteLedger":
        """Return the ledger of a step, from its programs, which are neither compiled nor run."""
        report = emitted(step, state, batch)
        inner = math.prod(size for name, size in step.mesh.shape.items() if name != "replica")
        kinds = dict.fromkeys(report.kinds, 0)
        if "replica" in report.axes:  # else one replica, which sends nothing
            kinds = {kind: inner * report.wire_bytes(axis="replica", kind=kind) for kind in kinds}
        return cls(kinds, sent)

    def add(self, phase: tuple[str, ...]) -> int:
        """Count one step and return the bytes so far."""
        events, always = set(phase) or {"local"}, self.by_kind.get("local", 0)
        # "every": the only kind where there is no parameter transform.
        kinds = (x for x in self.by_kind if x == "every" or set(x.split("+")) == events)
        kind = next(kinds, None)
        # Events in separate conditionals of one program have no kind for their combination. Each
        # kind holds what all steps send ("local") and the part of its event.
        parts = sum(self._of_event(event) - always for event in events)
        self.sent += always + parts if kind is None else self.by_kind[kind]
        return self.sent

    def _of_event(self, event: str) -> int:
        if event in self.by_kind:
            return self.by_kind[event]
        # "round": only the state knows which round, since a refused round is repeated. Other events
        # without a kind, such as "take", send nothing.
        rounds = [sent for kind, sent in self.by_kind.items() if kind.startswith("round ")]
        always = self.by_kind.get("local", 0)
        return max(rounds, default=always) if event == "round" else always


def emitted(step: js.train.TrainStep, state: Any, batch: Any) -> js.reports.CommReport:
    """Return the collectives of a step's programs, which are traced and neither compiled nor run.

    These are the collectives that the algorithm emits. To read those that a backend executes, every
    program would have to be compiled a second time.
    """

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    # The batch itself and not its shape: each of several processes has only a part of it.
    programs = step.traced_by_phase(jax.tree.map(shape_of, state), batch)
    lowered: Any = {kind: traced.lower() for kind, traced in programs.items()}
    mesh = step.mesh if isinstance(step.mesh, jax.sharding.Mesh) else None
    return js.comm_report_of(lowered.get(None, lowered), mesh=mesh, compile=False)


class Recorder:
    """A collector of records, which writes and shows them.

    A record has `step`, `loss` (mean over replicas, of that step's batches), `learning_rate` (of
    that step's update), `tokens_per_second` (since the last record; null where a program was
    compiled in between), `bytes_sent` (per replica, so far), and `validation_loss` if the consensus
    model was evaluated. With a loss scale it has `loss_scale`, the smallest of all replicas in that
    step, and `skipped_updates`, the sum over all replicas so far. That of an island has `round`,
    the round towards which it trains. The record of step 0 has only `bytes_sent` and
    `validation_loss`.

    Args:
      config: configuration of the run.
      ledger: counts the bytes.
      schedule: learning rate as a function of the 0-based update count.
      files: write each record, and hold the earlier records of a resumed run.
      reporter: shows the progress.

    Attributes:
      records: earlier records of the run, and those since this start.
      best: best evaluation so far; the caller sets it for a resumed run.
    """

    def __init__(
        self,
        config: TrainConfig,
        ledger: ByteLedger,
        schedule: optax.Schedule,
        files: "RunFiles",
        reporter: Reporter,
    ):
        self.records, self.best = files.records, Best()
        self._config, self._ledger, self._schedule = config, ledger, schedule
        self._files, self._reporter = files, reporter
        context = GPT_PRESETS[config.preset].context_length
        self._tokens_per_step = config.replicas * config.batch * context
        self._seen: set[tuple[str, ...]] = set()
        self._steps_since = 0
        self._compiled_since = False
        self._since = time.perf_counter()
        self._began = self._since
        self._tokens, self._seconds = 0, 0.0

    @property
    def bytes_sent(self) -> int:
        """The bytes that each replica has sent so far."""
        return self._ledger.sent

    def start(self, reports: Mapping[str, float]) -> None:
        """Record the evaluation before the first step."""
        self._keep({"step": 0, "bytes_sent": 0, **reports})
        self.best = self.best.after(0, reports["validation_loss"])
        self._restart_clock()

    def step(
        self,
        result: js.train.StepResult,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        now: bool = False,
    ) -> bool:
        """Count a step; record it if a record is due, with `evaluate`, or with `now`.

        Returns:
          Whether to go on: False if the loss was read and is not finite.
        """
        sent = self._ledger.add(result.phase)
        self._steps_since += 1
        # A host-scheduled step compiles a program at the first step of each kind.
        is_new = not self._seen or (self._config.mode == "host" and result.phase not in self._seen)
        self._compiled_since |= is_new
        self._seen.add(result.phase)
        is_due = result.step == 1 or result.step % self._config.log_every == 0
        if not (is_due or now or evaluate):
            self._reporter.advance(result.step)
            return True
        record = {
            "step": result.step,
            # Of all processes, so that all decide alike; it waits for the step.
            "loss": float(_gathered(result.metrics["loss"]).mean(dtype=np.float64)),
            "learning_rate": np.asarray(self._schedule(result.step - 1)).item(),
            "tokens_per_second": self._lap(),
            "bytes_sent": sent,
        }
        if "loss_scale" in result.metrics:  # which may differ between replicas
            scales, skipped = (_gathered(result.metrics[name]) for name in _OF_SCALE)
            record |= {"loss_scale": float(scales.min()), "skipped_updates": int(skipped.sum())}
        record |= {name: result.reports[name] for name in _OF_ISLAND if name in result.reports}
        go_on = math.isfinite(record["loss"])
        if evaluate and go_on:
            record.update(evaluate())
            self.best = self.best.after(result.step, record["validation_loss"])
        self._keep(record)
        self._restart_clock()
        return go_on

    @property
    def is_patience_over(self) -> bool:
        """True if the validation loss has not improved for `--patience` evaluations."""
        return 0 < self._config.patience <= self.best.since

    def summary(self, status: str) -> dict[str, Any]:
        """Return the main numbers of the run, for summary.json."""
        latest = {name: value for record in self.records for name, value in record.items()}
        some = {name: latest[name] for name in (*_OF_SCALE, *_OF_ISLAND) if name in latest}
        return {
            "status": status,
            "seed": self._config.seed,
            "steps": latest.get("step", 0),
            "loss": latest.get("loss"),
            "validation_loss": latest.get("validation_loss"),
            "best_validation_loss": self.best.validation_loss,
            "best_step": self.best.step,
            "stopped_early": status == "finished" and self.is_patience_over,
            "bytes_sent": self._ledger.sent,
            **some,
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "seconds": time.perf_counter() - self._began,
        }

    def note(self, step: int, **facts: Any) -> None:
        """Record an event that is no step, such as a resume or a rollback."""
        self._keep({"step": step, "bytes_sent": self.bytes_sent, **facts})
        self._restart_clock()

    def _lap(self) -> float | None:
        """Return tokens per second of all replicas since the last record; None with compilation."""
        tokens = self._steps_since * self._tokens_per_step
        seconds = time.perf_counter() - self._since
        if self._compiled_since:
            return None
        self._tokens += tokens
        self._seconds += seconds
        return tokens / seconds

    def _restart_clock(self) -> None:
        self._steps_since, self._compiled_since = 0, False
        self._since = time.perf_counter()

    def _keep(self, record: dict[str, Any]) -> None:
        self._files.write_record(record)
        self._reporter.show(record)


def _gathered(values: jax.Array) -> np.ndarray:
    """Return a metric of the replicas of all processes.

    Communication: with several processes one all-gather of 4 bytes per replica.
    """
    if not values.is_fully_addressable:
        values = multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)


class RunFiles:
    """A context in which `write_record` adds to metrics.jsonl, and to events of TensorBoard.

    If metrics.jsonl or the folder is deleted meanwhile, the next record restores all lines.

    Args:
      folder: folder of the run.
      config: configuration, written to config.json; with `config.tensorboard` there are events.
      writes: whether this process writes; one of several processes does.
      after: step from which the run goes on; later records, which an interrupted run may have
        left, are dropped. 0 drops all.

    Attributes:
      records: earlier records of the run, and those written since.

    Raises:
      ValueError: metrics.jsonl is damaged; it is not changed.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig, *, writes: bool, after: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._folder, self._config, self._writes = folder, config, writes
        self._is_behind = False
        self._events: Any = None
        if not writes:
            return
        if after and folder.metrics.exists():
            self.records = [line for line in _read(folder.metrics) if line["step"] <= after]
        self._write_all()
        if config.tensorboard:
            is_new = not folder.tensorboard.exists()
            self._begin_events(after)
            for record in self.records if is_new else ():
                self._add_events(record)

    def write_record(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, on disk at once, and events within some seconds.

        While a disk is full or the folder is being deleted, lines are kept and written later, at
        the latest at the end.

        Raises:
          OSError: the line cannot be written. The file may hold a part of it, which a resumed run
            drops.
        """
        self.records.append(record)
        if not self._writes:
            return
        try:
            self._add(json_line(record).encode())
            self._is_behind = False
        except OSError as error:
            if error.errno not in _RETRIED:
                raise
            if not self._is_behind:
                self._is_behind = True
                path = self._folder.metrics
                warn_user(f"{path} does not grow: {error.strerror}; its lines are kept.")
        if self._events is not None:
            if "rolled_back_from" in record:
                self._begin_events(record["step"])
            self._add_events(record)

    def finish(self, summary: dict[str, Any], statistics: js.reports.StepReport | None) -> None:
        """Write summary.json, and statistics.json if there are statistics; after the context."""
        if not self._writes:
            return
        if not self._folder.metrics.exists():  # deleted since the last record
            self._write_all()
        write_json(self._folder.summary, summary)
        if statistics:
            statistics.write(self._folder.statistics)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None and self._is_behind:
                self._write_all()
        finally:
            if self._events is not None:
                self._end_events()

    def _add(self, line: bytes) -> None:
        if not self._is_behind:
            with contextlib.suppress(FileNotFoundError):
                with self._folder.metrics.open("r+b") as file:
                    file.seek(0, os.SEEK_END)
                    file.write(line)
                return
        self._write_all()

    def _write_all(self) -> None:
        """Write config.json and all of metrics.jsonl."""
        self._folder.path.mkdir(parents=True, exist_ok=True)
        write_json(self._folder.config, self._config.to_file())
        write_anew(self._folder.metrics, "".join(map(json_line, self.records)))

    def _begin_events(self, after: int) -> None:
        """Begin a file of events, from which TensorBoard ignores earlier events past a step."""
        from tensorboardX import SummaryWriter

        if self._events is not None:
            self._end_events()
        self._events = SummaryWriter(
            str(self._folder.tensorboard),
            purge_step=after + 1,
            # Its thread ends with the first error. A full queue would then stop the training.
            max_queue=0,
            flush_secs=10,
            # The name has whole seconds, within which a run may begin twice.
            filename_suffix=f".{time.time_ns()}",
        )

    def _add_events(self, record: dict[str, Any]) -> None:
        for name in _CURVES:
            if record.get(name) is not None:
                self._events.add_scalar(name, record[name], record["step"])

    def _end_events(self) -> None:
        with contextlib.suppress(OSError):  # the same data is in metrics.jsonl
            self._events.close()


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, without a last line that is cut off.

    Raises:
      ValueError: another line is not a record.
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError(f"its step is {record['step']!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: line {number} is no record of a step ({error!r}). Remove that "
                "line, or move the file away, and resume again."
            ) from error
        records.append(record)
    return records
