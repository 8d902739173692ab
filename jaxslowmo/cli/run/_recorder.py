"""Metrics of a run as it goes: a record per logged step, the best evaluation, bytes sent."""

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
    """The evaluation with the smallest validation loss so far; an early one where two are equal.

    Attributes:
      step: after which it was; None before the first.
      validation_loss: what it found.
      since: evaluations after it.
    """

    step: int | None = None
    validation_loss: float | None = None
    since: int = 0

    def after(self, step: int, validation_loss: float) -> "Best":
        """With one more evaluation; a loss that is NaN is no better than any."""
        if self.validation_loss is None or validation_loss < self.validation_loss:
            return Best(step, validation_loss)
        return dataclasses.replace(self, since=self.since + 1)

    def has_lasted(self, patience: int) -> bool:
        """Whether to wait no longer; never with a patience of 0."""
        return 0 < patience <= self.since


class ByteLedger:
    """Bytes that a replica has sent so far.

    The report counts the collectives that the programs emit over the axis "replica", as rings: an
    all-reduce of N bytes between R replicas sends 2 (R - 1) / R N. With several devices per
    replica, what all of them send is added up, for all_reduce also what stays inside the replica
    (its one collective spans both axes). Evaluation on the consensus is not counted. Under
    virtual replicas nothing is sent: the report is of the same programs on a mesh of as many
    devices, so the numbers are those that the run would send there.

    Attributes:
      by_kind: bytes per replica of one step of each kind.
      sent: bytes per replica.
    """

    def __init__(self, by_kind: dict[str, int], sent: int = 0):
        self.by_kind = by_kind
        self.sent = sent

    @classmethod
    def of_step(cls, step: js.TrainStep, state: Any, batch: Any, *, sent: int = 0) -> "ByteLedger":
        """Reads the step's programs without compiling or running them."""
        report = emitted(step, state, batch)
        inner = math.prod(size for name, size in step.mesh.shape.items() if name != "replica")
        if "replica" not in report.axes:  # one replica: nobody to talk to
            return cls(dict.fromkeys(report.kinds, 0), sent)
        by_kind = {
            kind: inner * report.wire_bytes(axis="replica", kind=kind) for kind in report.kinds
        }
        return cls(by_kind, sent)

    def add(self, phase: tuple[str, ...]) -> int:
        """Counts one step and returns the bytes so far."""
        self.sent += self._of_phase(set(phase) or {"local"})
        return self.sent

    def _of_phase(self, events: set[str]) -> int:
        if set(self.by_kind) == {"every"}:  # no parameter transform
            return self.by_kind["every"]
        for kind, sent in self.by_kind.items():
            if set(kind.split("+")) == events:
                return sent
        # Events in separate conditionals of one program are no kind of their own; each kind holds
        # what all steps send ("local") and its event's part.
        always = self.by_kind.get("local", 0)
        return always + sum(self._of_event(event) - always for event in events)

    def _of_event(self, event: str) -> int:
        if event in self.by_kind:
            return self.by_kind[event]
        # "any round": which one, only the state tells, since one that was refused comes again.
        return max(sent for kind, sent in self.by_kind.items() if kind.startswith("round "))


def emitted(step: js.TrainStep, state: Any, batch: Any) -> js.CommReport:
    """Return the collectives of a step's programs, which are traced and neither compiled nor run.

    Emitted collectives are what the algorithm asks for; compiling every program a second time to
    read what a backend made of them would cost more than it tells here.
    """

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    # The batch as it is: of several processes each has a part, and shapes would be of the whole.
    programs = step.traced_by_phase(jax.tree.map(shape_of, state), batch)
    lowered: Any = {kind: traced.lower() for kind, traced in programs.items()}
    mesh = step.mesh if isinstance(step.mesh, jax.sharding.Mesh) else None
    return js.comm_report_of(lowered.get(None, lowered), mesh=mesh, compile=False)


class Recorder:
    """Collects records and passes them on.

    A record has `step`, `loss` (mean over replicas, of that step's batches), `learning_rate` (of
    that step's update), `tokens_per_second` (since the last record; null where a program was
    compiled in between), `bytes_sent` (per replica, so far), and `validation_loss` where the
    consensus model was evaluated; with a loss scale also `loss_scale`, the smallest of the replicas
    in that step, and `skipped_updates`, of all of them so far. The record of step 0 has
    `bytes_sent` and `validation_loss` alone.

    Args:
      config: of the run.
      ledger: counts the bytes.
      schedule: learning rate of the 0-based update count.
      files: take each record, and may hold those of before the run was resumed.
      reporter: shows the progress.

    Attributes:
      records: those of before and those of this run.
      best: evaluation so far; of a resumed run it is to be set.
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
        """Per replica, so far."""
        return self._ledger.sent

    def start(self, reports: Mapping[str, float]) -> None:
        """Records the evaluation before the first step."""
        self._keep({"step": 0, "bytes_sent": 0, **reports})
        self.best = self.best.after(0, reports["validation_loss"])
        self._restart_clock()

    def step(
        self,
        result: js.StepResult,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        now: bool = False,
    ) -> bool:
        """Counts a step and records it if it is due, to be evaluated, or `now`.

        Returns:
          Whether to go on: False if its loss was read and is not finite.
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
            **_of_scale(result.metrics),
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
        """Whether the validation loss has not improved for as long as the run has patience."""
        return self.best.has_lasted(self._config.patience)

    def summary(self, status: str) -> dict[str, Any]:
        """The run in a few numbers, as summary.json has them."""
        validations = [r["validation_loss"] for r in self.records if "validation_loss" in r]
        # Of a finished run that was started again the last record is the note of that.
        losses = [r["loss"] for r in self.records if "loss" in r]
        last = self.records[-1] if self.records else {}
        speed = self._timed_tokens / self._timed_seconds if self._timed_seconds else None
        return {
            "status": status,
            "algorithm": self._config.algorithm.algorithm,
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
        """The last that was recorded of the loss scale, if there is one."""
        last = next((r for r in reversed(self.records) if "loss_scale" in r), {})
        return {name: last[name] for name in ("loss_scale", "skipped_updates") if name in last}

    def note(self, step: int, **facts: Any) -> None:
        """Records something else than a step: where a run was resumed or rolled back."""
        self._keep({"step": step, "bytes_sent": self.bytes_sent, **facts})
        self._restart_clock()

    def _lap(self) -> float | None:
        """Tokens per second of all replicas since the clock was restarted."""
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
    """The mean over the replicas of all processes, so that all decide alike."""
    return float(np.mean(_of_all(losses).astype(np.float64)))


def _of_scale(metrics: Mapping[str, jax.Array]) -> dict[str, Any]:
    """What a record tells of the loss scale, if there is one; a replica may have its own."""
    if "loss_scale" not in metrics:
        return {}
    scales, skipped = (_of_all(metrics[name]) for name in ("loss_scale", "skipped_updates"))
    return {"loss_scale": float(scales.min()), "skipped_updates": int(skipped.sum())}


def _of_all(values: jax.Array) -> np.ndarray:
    """A metric of the replicas of all processes.

    Communication: with several processes one all-gather of 4 bytes per replica.
    """
    if not values.is_fully_addressable:
        values = multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)
