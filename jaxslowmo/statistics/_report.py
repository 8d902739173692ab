"""The result of measuring steps: times, buckets, and what they are about."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ._table import table
from ._times import StepTimes


@dataclass(frozen=True)
class Bucket:
    """One flat buffer that is exchanged as a whole.

    Attributes:
      exchange: what for: `"gradients"`; of parameters `"average"`, `"slow"`, `"round"`.
      size_bytes: on one device.
      dtype: of its elements.
      leaves: names of what lies in it, in order.
    """

    exchange: str
    size_bytes: int
    dtype: str
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class KindOfStep:
    """Measured steps that exchanged the same, as `js.phase_name` calls it.

    Attributes:
      steps: steps of this kind so far, measured or not.
      measured: how many of them were measured.
      times: their means.
    """

    steps: int
    measured: int
    times: StepTimes


@dataclass(frozen=True)
class StepReport:
    """What a step spends its time on; of a `js.MeasuredStep`. `str(report)` is a table.

    Attributes:
      iteration: steps so far.
      rate: after the first ten, every so many steps are measured.
      measured: which steps were, by their number from 1.
      missed: which were due but could not be measured, because another trace was running or the
        profiler recorded no operations.
      last: times of the last measured step; None before the first.
      average: means over all measured steps; None before the first. Kinds of step are not measured
        equally often: for the cost of a synchronisation compare those.
      kinds: by kind of step; a step without parameter transform has the one kind "every".
      buckets: the gradient buckets in the order in which they are reduced; empty where the step
        reduces no gradients, or was compiled before it was measured.
      sync_buckets: the buffers in which parameters are exchanged, of the kinds of step that were
        measured; as stored: slow steps exchange float32.
      ready_order: names of the parameters in the order in which the backward pass finishes their
        gradients; None if it can't be told.
      parameter_bytes: of one replica.
      num_parameter_tensors: leaves of the parameters.
      dtypes: of the parameters, in order of first appearance.
      backend: such as "cpu" or "gpu".
      num_devices: devices of this process that ran the last measured step.
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
        """The report as a JSON object with the attributes as keys; times in seconds."""
        return json.dumps(asdict(self) | {"bucket_sizes": self.bucket_sizes}, indent=2)

    def write(self, path: str | Path) -> None:
        """Writes `to_json()` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return table(self)
