"""The records of a run: progress, tables, the best evaluation, the bytes sent, the files."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

import jaxslowmo as js
from jaxslowmo.models import gpt_preset

from .._support.checks import warn_user
from .._support.files import write_atomic
from ._config import TrainConfig, to_file
from ._folder import RunFolder
from ._setup import learning_rate_schedule

# Entries of records that not every run has, and those that become curves of TensorBoard.
_OPTIONAL = ("loss_scale", "skipped_updates", "round")
_CURVES = (
    "loss", "validation_loss", "learning_rate", "tokens_per_second", "bytes_sent", *_OPTIONAL[:2],
)  # fmt: skip
# Errors that may pass: the disk is full, or the folder is being deleted (the next record makes it
# again).
_TRANSIENT = (errno.ENOSPC, errno.ENOENT)


class ByteLedger:
    """The bytes that a replica has sent so far.

    They are those of the collectives that the programs emit over the axis "replica", as rings: an
    all-reduce of N bytes between R replicas sends 2 (R - 1) / R N. With several devices per replica
    the bytes of all of them are added, for all_reduce including what stays inside the replica (its
    one collective spans both axes). Evaluation of the consensus is not counted. Virtual replicas
    send nothing: the numbers are what the same programs would send on a mesh of as many devices.

    Of an island it is what the island has written to the store, as the store's client counts it:
    joining, parts and snapshots. What its replicas send each other is only in `by_kind`.

    Args:
      report: what the step's programs emit.
      mesh: mesh of the step.
      sent: bytes sent before this start of the run.
      island: the island, which has joined; None: a run without islands.

    Attributes:
      by_kind: bytes that each replica sends in one step of each kind.
    """

    def __init__(
        self,
        report: js.reports.CommReport,
        mesh: Any,
        sent: int = 0,
        island: "js.islands.Island | None" = None,
    ) -> None:
        inner = math.prod(size for name, size in mesh.shape.items() if name != "replica")
        self.by_kind, self._sent, self._island = dict.fromkeys(report.kinds, 0), sent, island
        if "replica" in report.axes:  # else one replica, which sends nothing
            for kind in self.by_kind:
                self.by_kind[kind] = inner * report.wire_bytes(axis="replica", kind=kind)

    @property
    def sent(self) -> int:
        """The bytes that each replica, or the island, has sent so far."""
        return self._sent + (0 if self._island is None else self._island.bytes_sent)

    def add(self, phase: tuple[str, ...]) -> int:
        """Count one step and return the bytes so far."""
        if self._island is not None:
            return self.sent
        events, always = set(phase) or {"local"}, self.by_kind.get("local", 0)
        # "every": the only kind where there is no parameter transform.
        kinds = (x for x in self.by_kind if x == "every" or set(x.split("+")) == events)
        kind = next(kinds, None)
        # Events in separate conditionals of one program have no kind for their combination. Each
        # kind holds what all steps send ("local") and the part of its event.
        parts = sum(self._event_bytes(event) - always for event in events)
        self._sent += always + parts if kind is None else self.by_kind[kind]
        return self.sent

    def _event_bytes(self, event: str) -> int:
        # "round": only the state knows which round, since a refused round is repeated. Other events
        # without a kind, such as "take", send nothing.
        always = self.by_kind.get("local", 0)
        rounds = [sent for kind, sent in self.by_kind.items() if kind.startswith("round ")]
        return self.by_kind.get(event, max(rounds, default=always) if event == "round" else always)


def report_collectives(step: js.train.TrainStep, state: Any, batch: Any) -> js.reports.CommReport:
    """Return the collectives of a step's programs, which are traced and neither compiled nor run.

    These are the collectives that the algorithm emits. To read those that a backend executes, every
    program would have to be compiled a second time.
    """

    def shape_struct(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    # The batch itself and not its shape: each of several processes has only a part of it.
    programs = step.traced_by_phase(jax.tree.map(shape_struct, state), batch)
    lowered: Any = {kind: traced.lower() for kind, traced in programs.items()}
    mesh = step.mesh if isinstance(step.mesh, jax.sharding.Mesh) else None
    lowered = lowered.get(None, lowered)
    return js.comm_report_of(lowered, mesh=mesh, compile=False, sync=step.sync)


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

    def update(self, step: int, validation_loss: float) -> "Best":
        """Return the best after one more evaluation; NaN is never better."""
        if self.validation_loss is None or validation_loss < self.validation_loss:
            return Best(step, validation_loss)
        return dataclasses.replace(self, since=self.since + 1)


class Recorder(contextlib.AbstractContextManager):
    """A context that collects the records of a run, writes and shows them.

    A record has `step`, `loss` (mean over replicas, of that step's batches), `learning_rate` (of
    that step's update), `tokens_per_second` (since the last record; null where a program was
    compiled in between), `bytes_sent` (so far, see `ByteLedger`), and `validation_loss` if the
    consensus model was evaluated. With a loss scale it has `loss_scale`, the smallest of all
    replicas in that step, and `skipped_updates`, the sum over all replicas so far. That of an
    island has `round`, the round towards which it trains. The record of step 0 has only
    `bytes_sent` and `validation_loss`. Each is a line of metrics.jsonl, on disk at once, and there
    may be events for TensorBoard. If metrics.jsonl or the folder is deleted meanwhile, the next
    record restores all.

    Args:
      config: configuration of the run, written to config.json.
      ledger: counts the bytes.
      folder: folder of the run; None: this process does not write.
      reporter: shows the progress.
      after: step from which the run goes on; later records, which an interrupted run may have
        left, are dropped. 0 drops all.
      best: best evaluation so far.

    Attributes:
      records: earlier records of the run, and those since this start.
      best: best evaluation so far.

    Raises:
      ValueError: metrics.jsonl is damaged; it is not changed.
    """

    def __init__(
        self,
        config: TrainConfig,
        ledger: ByteLedger,
        folder: RunFolder | None,
        reporter: "Reporter",
        after: int,
        best: Best,
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self.best = best
        self._config, self._ledger = config, ledger
        self._schedule = learning_rate_schedule(config)
        self._folder, self._reporter = folder, reporter
        context = gpt_preset(config.model.preset).context_length
        self._tokens_per_step = config.mesh.num_replicas * config.data.batch * context
        self._seen: set[tuple[str, ...]] = set()
        self._tokens, self._seconds = 0, 0.0
        self._is_behind, self._events = False, None
        self._restart_clock()
        self._began = self._since
        if folder is None:
            return
        if after and (folder / "metrics.jsonl").exists():
            earlier = read_records(folder / "metrics.jsonl")
            self.records = [record for record in earlier if record["step"] <= after]
        self._write_all()
        if config.run.tensorboard:
            is_new = not (folder / "tensorboard").exists()
            self._begin_events(after)
            for record in self.records if is_new else ():
                self._add_events(record)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None and self._is_behind:
                self._write_all()
        finally:
            with contextlib.suppress(OSError):  # the same data is in metrics.jsonl
                if self._events is not None:
                    self._events.close()

    def start(self, reports: Mapping[str, float]) -> None:
        """Record the evaluation before the first step."""
        self.note(0, **reports)
        self.best = self.best.update(0, reports["validation_loss"])

    def note(self, step: int, **facts: Any) -> None:
        """Record an event that is no step, such as a resume or a rollback."""
        self._add_record({"step": step, "bytes_sent": self._ledger.sent, **facts})

    def step(
        self, result: js.train.StepResult, evaluate: Callable[[], Mapping[str, float]] | None
    ) -> bool:
        """Count a step; record it if a record is due, or there is an evaluation.

        Returns:
          Whether to go on: False if the loss was read and is not finite.
        """
        sent, run = self._ledger.add(result.phase), self._config.run
        self._steps_since += 1
        # A host-scheduled step compiles a program at the first step of each kind.
        is_host = self._config.mesh.mode == "host"
        self._compiled_since |= not self._seen or (is_host and result.phase not in self._seen)
        self._seen.add(result.phase)
        if not (result.step == 1 or result.step % run.log_every == 0 or evaluate):
            return True
        record = {
            "step": result.step,
            # Of all processes, so that all decide alike; it waits for the step.
            "loss": float(_all_gather(result.metrics["loss"]).mean(dtype=np.float64)),
            "learning_rate": np.asarray(self._schedule(result.step - 1)).item(),
            "tokens_per_second": self._tokens_per_second(),
            "bytes_sent": sent,
        }
        if "loss_scale" in result.metrics:  # which may differ between replicas
            scales, skipped = (_all_gather(result.metrics[name]) for name in _OPTIONAL[:2])
            record |= {"loss_scale": float(scales.min()), "skipped_updates": int(skipped.sum())}
        record |= {name: x for name, x in result.reports.items() if name in _OPTIONAL}
        go_on = math.isfinite(record["loss"])
        if evaluate and go_on:
            record.update(evaluate())
            if "validation_loss" in record:
                self.best = self.best.update(result.step, record["validation_loss"])
        self._add_record(record)
        return go_on

    @property
    def is_patience_over(self) -> bool:
        """True if the validation loss has not improved for `patience` evaluations."""
        return 0 < self._config.checkpoint.patience <= self.best.since

    def summary(self, status: str, **facts: Any) -> dict[str, Any]:
        """Return the main numbers of the run, which become summary.json; after the context."""
        latest = {name: value for record in self.records for name, value in record.items()}
        summary = {
            "status": status,
            "seed": self._config.data.seed,
            "steps": latest.get("step", 0),
            "loss": latest.get("loss"),
            "validation_loss": latest.get("validation_loss"),
            "best_validation_loss": self.best.validation_loss,
            "best_step": self.best.step,
            "stopped_early": status == "finished" and self.is_patience_over,
            "bytes_sent": self._ledger.sent,
            **{name: latest[name] for name in _OPTIONAL if name in latest},
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "seconds": time.perf_counter() - self._began,
            "bytes_per_step_by_kind": self._ledger.by_kind,
            **facts,
        }
        if self._folder is not None:
            if not (self._folder / "metrics.jsonl").exists():  # deleted since the last record
                self._write_all()
            write_atomic(self._folder / "summary.json", to_json(summary, 2))
        return summary

    def _tokens_per_second(self) -> float | None:
        """Return tokens per second of all replicas since the last record; None with compilation."""
        tokens, seconds = self._steps_since * self._tokens_per_step, time.perf_counter()
        seconds -= self._since
        if self._compiled_since:
            return None
        self._tokens += tokens
        self._seconds += seconds
        return tokens / seconds

    def _restart_clock(self) -> None:
        self._steps_since, self._compiled_since = 0, False
        self._since = time.perf_counter()

    def _add_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._reporter.show(record)
        if self._folder is not None:
            try:
                self._add_line(self._folder / "metrics.jsonl", to_json(record))
                self._is_behind = False
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
                if not self._is_behind:
                    name = self._folder / "metrics.jsonl"
                    warn_user(f"{name} does not grow: {error.strerror}; its lines are kept.")
                self._is_behind = True
        if self._events is not None:
            if "rolled_back_from" in record:
                self._begin_events(record["step"])
            self._add_events(record)
        self._restart_clock()

    def _add_line(self, path: Path, line: str) -> None:
        if self._is_behind or not path.exists():
            self._write_all()
            return
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(line.encode())

    def _write_all(self) -> None:
        """Write config.json and all of metrics.jsonl."""
        assert self._folder is not None
        self._folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / "config.json", to_json(to_file(self._config), 2))
        write_atomic(self._folder / "metrics.jsonl", "".join(map(to_json, self.records)))

    def _begin_events(self, after: int) -> None:
        """Begin a file of events, from which TensorBoard ignores earlier events past a step."""
        from tensorboardX import SummaryWriter

        if self._events is not None:
            self._events.close()
        assert self._folder is not None
        self._events: Any = SummaryWriter(
            str(self._folder / "tensorboard"),
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


def _all_gather(values: jax.Array) -> np.ndarray:
    """Return a metric of the replicas of all processes.

    Communication: with several processes one all-gather of 4 bytes per replica.
    """
    if not values.is_fully_addressable:
        values = multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)


def read_records(path: Path) -> list[dict[str, Any]]:
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


_LINES = 10  # progress lines of a run


def format_count(count: float | None, unit: str = "") -> str:
    """Return three digits and a decimal prefix: 999, 1.07M, 1.50 MB; a dash for None."""
    if count is None:
        return "-"
    digits, prefix = f"{count:.0f}", ""
    if count >= 999.5:
        digits, power = Decimal(f"{count:.2e}").to_eng_string().split("E+")
        prefix = "kMGTPE"[int(power) // 3 - 1]
    return f"{digits}{' ' if unit else ''}{prefix}{unit}"


def format_bytes(count: float | None) -> str:
    """Return bytes in decimal units with three digits: 0 B, 999 B, 1.50 MB; a dash for None."""
    return format_count(count, "B")


def format_loss(loss: float | None) -> str:
    """Return a loss with three decimals; a dash for None, NaN and infinities."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.3f}"


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a line of JSON, or several with `indent`; NaN and infinities become null."""
    plain = json.loads(json.dumps(value, default=vars), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent) + "\n"


def print_lines(console: Console, *sentences: str) -> None:
    """Print each sentence on its own line, without colours; the terminal wraps long lines."""
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)


class Reporter:
    """Prints lines about the progress of one run, about ten in all.

    Args:
      console: console to which it writes.
      label: name of the run, such as "slowmo, seed 0".
      steps: number of steps of the run.
      would: whether bytes are only what the run would send (virtual replicas).
    """

    def __init__(self, console: Console, label: str, steps: int, *, would: bool = False):
        self.console, self._label, self._steps = console, label, steps
        self._verb = "would send" if would else "sent"
        self._latest: dict[str, Any] = {}
        self._next_line = 0.0

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of a step, and an evaluation of an earlier step with its number."""
        step, latest = record["step"], self._latest
        latest |= {name: value for name, value in record.items() if value is not None}
        if "validation_loss" in record:
            latest["evaluated"] = step
        if step < self._next_line and step != self._steps:
            return
        self._next_line = step + self._steps / _LINES
        at = latest.get("evaluated", step)
        shown = {
            "loss": f"loss {format_loss(latest.get('loss'))}",
            "validation_loss": f"validation {format_loss(latest.get('validation_loss'))}"
            f"{f' (step {at})' * (at != step)}",
            "tokens_per_second": f"{format_count(latest.get('tokens_per_second'))} tokens/s",
            "bytes_sent": f"{self._verb} {format_bytes(latest.get('bytes_sent'))}",
        }
        status = "  ".join(text for name, text in shown.items() if name in latest)
        count = f"{step:{len(str(self._steps))}}/{self._steps}"
        print_lines(self.console, f"{self._label}: {count}  {status}")


def facts_table(facts: Mapping[str, str], title: str) -> Table:
    """Return a table with a line per entry."""
    table = Table(show_header=False, title=title, title_justify="left")
    for row in facts.items():
        table.add_row(*row)
    return table


def rows_table(rows: Iterable[Mapping[str, str]], caption: str) -> Table:
    """Return a table with a line per row, and a column per name of the first row."""
    rows = list(rows)
    table = Table(caption=caption, caption_justify="left")
    for name in rows[0]:
        # Settings of algorithms make long names in the first column.
        is_first = not table.columns
        justify = "left" if is_first else "right"
        table.add_column(name, justify=justify, no_wrap=not is_first, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def run_table(summary: dict[str, Any]) -> Table:
    """Return a table of one run: a line per number."""
    verb = "would be sent" if summary["bytes_are_hypothetical"] else "sent"
    by_kind, sent = summary["bytes_per_step_by_kind"], f"bytes {verb} per replica"
    if "island" in summary:
        sent = "bytes sent to the store"
        by_kind = {f"{kind}, between replicas": n for kind, n in by_kind.items() if n}
    facts = {
        "steps": str(summary["steps"]),
        "parameters": format_count(summary["parameters"]),
        "training loss, nats/byte": format_loss(summary["loss"]),
        "validation loss of the consensus, nats/byte": format_loss(summary["validation_loss"]),
        sent: format_bytes(summary["bytes_sent"]),
    }
    for kind, count in by_kind.items():
        facts[f"  in a step of kind {kind}"] = format_bytes(count)
    if "loss_scale" in summary:
        facts["scale of the loss"] = f"{summary['loss_scale']:g}"
        facts["updates skipped, all replicas"] = str(summary["skipped_updates"])
    facts["tokens/s, all replicas"] = format_count(summary["tokens_per_second"])
    facts["seconds"] = f"{summary['seconds']:.1f}"
    return facts_table(facts, title=f"{summary['algorithm']}: {summary['status']}")
