"""The result of measuring steps: times, buckets, and what they are about."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..._support.files import write_atomic
from ...tree import Bucket
from ..communication import align_columns
from ._times import StepTimes


@dataclass(frozen=True)
class KindOfStep:
    """The times of a kind of step, such as "local" or "average", named by `js.spec.phase_name`.

    Attributes:
      steps: number of steps of this kind so far, measured or not.
      measured: number of them that were measured.
      times: means over the measured ones.
    """

    steps: int
    measured: int
    times: StepTimes


@dataclass(frozen=True)
class StepReport:
    """The times of a `js.reports.MeasuredStep`; `str(report)` is a table.

    Attributes:
      iteration: number of steps so far.
      rate: after the first ten, every so many steps one is measured.
      measured: numbers, from 1, of the steps that were measured.
      missed: numbers of the steps that were due and could not be measured, because another trace
        was running or the profiler recorded no operations.
      last: times of the last measured step; None before the first.
      average: means over all measured steps; None before the first. Kinds of step are not measured
        equally often: to see the cost of a synchronisation, compare `kinds`.
      kinds: maps a kind of step to its times; without a parameter transform there is one, "every".
      buckets: the gradient buckets in the order in which they are reduced; empty where the step
        reduces no gradients, or was compiled before it was measured.
      sync_buckets: the buffers in which parameters are exchanged, of the kinds of step that were
        measured; as stored: slow steps exchange float32.
      ready_order: names of the parameters in the order in which the backward pass finishes their
        gradients; None if it is unknown.
      parameter_bytes: bytes of the parameters of one replica.
      num_parameter_tensors: number of leaves of the parameters.
      dtypes: dtypes of the parameters, in order of first appearance.
      backend: the backend of jax, such as "cpu" or "gpu".
      num_devices: number of devices of this process that ran the last measured step.
    """

    iteration: int
    rate: int
    measured: tuple[int, ...]
    missed: tuple[int, ...]
    last: StepTimes | None
    average: StepTimes | None
    kinds: dict[str, KindOfStep]
    buckets: tuple[Bucket, ...]
    sync_buckets: tuple[Bucket, ...]
    ready_order: tuple[str, ...] | None
    parameter_bytes: int
    num_parameter_tensors: int
    dtypes: tuple[str, ...]
    backend: str
    num_devices: int

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Bytes of the gradient buckets, in the order in which they are reduced."""
        return tuple(bucket.size_bytes for bucket in self.buckets)

    def to_json(self) -> str:
        """Return the report as a JSON object with the attributes as keys; times in seconds."""
        return json.dumps(asdict(self) | {"bucket_sizes": self.bucket_sizes}, indent=2)

    def write(self, path: str | Path) -> None:
        """Write `to_json()` to a file."""
        write_atomic(path, self.to_json() + "\n")

    def __str__(self) -> str:
        counts = f"{self.iteration} steps, {len(self.measured)} measured"
        lines = [f"{counts}; {self.num_devices} {self.backend} devices"]
        if self.missed:
            lines.append(f"due but not measured: {len(self.missed)}")
        if self.last is not None and self.average is not None:
            lines += ["", *align_columns(_times(self.last, self.average))]
        if self.kinds:
            lines += ["", *align_columns(_kinds(self.kinds))]
        dtypes = ", ".join(self.dtypes) or "no dtype"
        size = _mib(self.parameter_bytes)
        lines += ["", f"{self.num_parameter_tensors} parameters, {size}, {dtypes}"]
        buckets = self.buckets + self.sync_buckets
        for exchange in dict.fromkeys(bucket.exchange for bucket in buckets):
            sizes = Counter(_mib(b.size_bytes) for b in buckets if b.exchange == exchange)
            shown = (size if count == 1 else f"{count} x {size}" for size, count in sizes.items())
            lines.append(f"buckets of {exchange}: {', '.join(shown)}")
        return "\n".join(lines)


_ROWS = {
    "step": "step_time", "forward compute": "forward_compute_time",
    "backward compute": "backward_compute_time", "other compute": "other_compute_time",
    "communication": "communication_time", "  while computing": "overlap_time",
    "  exposed": "exposed_communication_time",
}  # fmt: skip


def _times(*times: StepTimes) -> list[list[str]]:
    rows = [["ms", "last", "mean"]]
    rows += [[text, *(_ms(getattr(t, name)) for t in times)] for text, name in _ROWS.items()]
    for name in times[-1].communication:
        rows.append([f"  of {name}", *(_ms(t.communication.get(name, 0.0)) for t in times)])
    return rows


def _kinds(kinds: dict[str, KindOfStep]) -> list[list[str]]:
    rows = [["kind of step", "steps", "measured", "step, ms", "communication", "exposed"]]
    for name, kind in kinds.items():
        times = kind.times
        cells = [times.step_time, times.communication_time, times.exposed_communication_time]
        shown = [_ms(cell) if kind.measured else "-" for cell in cells]
        rows.append([name, str(kind.steps), str(kind.measured), *shown])
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 / 100 else f"{size} B"
