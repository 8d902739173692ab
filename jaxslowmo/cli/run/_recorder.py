"""Metrics during a run: a record per logged step, the best evaluation, the bytes sent."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxslowmo as js
from jaxslowmo.models import GPT_PRESETS

from .._output import Reporter
from ..config._training import TrainConfig
from ._metrics import RunFiles


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

    def has_lasted(self, patience: int) -> bool:
        """Return whether `patience` evaluations found nothing better; False with patience 0."""
        return 0 < patience <= self.since


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
        if "replica" not in report.axes:  # one replica sends nothing
            return cls(dict.fromkeys(report.kinds, 0), sent)
        by_kind = {
            kind: inner * report.wire_bytes(axis="replica", kind=kind) for kind in report.kinds
        }
        return cls(by_kind, sent)

    def add(self, phase: tuple[str, ...]) -> int:
        """Count one step and return the bytes so far."""
        self.sent += self._of_phase(set(phase) or {"local"})
        return self.sent

    def _of_phase(self, events: set[str]) -> int:
        if set(self.by_kind) == {"every"}:  # no parameter transform
            return self.by_kind["every"]
        for kind, sent in self.by_kind.items():
            if set(kind.split("+")) == events:
                return sent
        # Events in separate conditionals of one program have no kind for their combination. Each
        # kind holds what all steps send ("local") and the part of its event.
        always = self.by_kind.get("local", 0)
        return always + sum(self._of_event(event) - always for event in events)

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
    step, and `skipped_updates`, the sum over all replicas so far. The record of step 0 has only
    `bytes_sent` and `validation_loss`.

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
        files: RunFiles,
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
        self._timed_tokens, self._timed_seconds = 0, 0.0

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
            "loss": _mean_of_all(result.metrics["loss"]),  # waits for the step
            "learning_rate": np.asarray(self._schedule(result.step - 1)).item(),
            "tokens_per_second": self._lap(),
            "bytes_sent": sent,
            **_scale_entries(result.metrics),
        }
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
        return self.best.has_lasted(self._config.patience)

    def summary(self, status: str) -> dict[str, Any]:
        """Return the main numbers of the run, for summary.json."""
        validations = [r["validation_loss"] for r in self.records if "validation_loss" in r]
        # The last record has no loss if a finished run was resumed: it is the note of that.
        losses = [r["loss"] for r in self.records if "loss" in r]
        last = self.records[-1] if self.records else {}
        speed = self._timed_tokens / self._timed_seconds if self._timed_seconds else None
        return {
            "status": status,
            "algorithm": self._config.algorithm,
            "seed": self._config.seed,
            "steps": last.get("step", 0),
            "loss": losses[-1] if losses else None,
            "validation_loss": validations[-1] if validations else None,
            "best_validation_loss": self.best.validation_loss,
            "best_step": self.best.step,
            "stopped_early": status == "finished" and self.is_patience_over,
            "bytes_sent": self._ledger.sent,
            **self._last_scale(),
            "tokens_per_second": speed,
            "seconds": time.perf_counter() - self._began,
        }

    def _last_scale(self) -> dict[str, Any]:
        """Return the last recorded loss scale and skipped updates; {} without a loss scale."""
        last = next((r for r in reversed(self.records) if "loss_scale" in r), {})
        return {name: last[name] for name in ("loss_scale", "skipped_updates") if name in last}

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
        self._timed_tokens += tokens
        self._timed_seconds += seconds
        return tokens / seconds

    def _restart_clock(self) -> None:
        self._steps_since, self._compiled_since = 0, False
        self._since = time.perf_counter()

    def _keep(self, record: dict[str, Any]) -> None:
        self._files.write_record(record)
        self._reporter.show(record)


def _mean_of_all(losses: jax.Array) -> float:
    """Return the mean over the replicas of all processes, so that all decide alike."""
    return float(np.mean(_gathered(losses).astype(np.float64)))


def _scale_entries(metrics: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the entries of a record about the loss scale, which may differ between replicas."""
    if "loss_scale" not in metrics:
        return {}
    scales, skipped = (_gathered(metrics[name]) for name in ("loss_scale", "skipped_updates"))
    return {"loss_scale": float(scales.min()), "skipped_updates": int(skipped.sum())}


def _gathered(values: jax.Array) -> np.ndarray:
    """Return a metric of the replicas of all processes.

    Communication: with several processes one all-gather of 4 bytes per replica.
    """
    if not values.is_fully_addressable:
        values = multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)
