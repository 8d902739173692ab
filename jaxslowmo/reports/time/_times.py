"""How long a step spent on what, from the operations that its devices ran."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ._step_program import BACKWARD, FORWARD, OTHER, StepProgram, Work

# Half-open: start and end, in nanoseconds.
Interval = tuple[int, int]


class DeviceOp(NamedTuple):
    """One operation that a device ran."""

    device: str
    name: str  # of the HLO instruction, or of what ran without one
    start: int  # nanoseconds
    end: int
    is_ours: bool = True  # known to belong to the step's program, whether or not it has that name


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, or their means over steps; of operations, means over the devices.

    An instant with several operations of one sort counts once. On CPU, operations that wait for a
    core last longer.

    Attributes:
      step_time: from the call of the step to its end, as the host sees it.
      forward_compute_time: operations of the forward pass.
      backward_compute_time: operations of the backward pass.
      other_compute_time: all others: the optimizer, packing, copies.
      communication_time: collectives, waiting for other devices included.
      overlap_time: communication while the same device computes.
      backward_overlap_time: communication while it computes the backward pass.
      communication: `communication_time` by what is exchanged: `"gradients"`; of parameters the
        phase (`"average"`, `"slow"`, `"round 0"`, ...); `"model_state"`, `"metrics"`; `"forward"`
        and `"backward"` for collectives of the model itself; `"other"`.
    """

    step_time: float = 0.0
    forward_compute_time: float = 0.0
    backward_compute_time: float = 0.0
    other_compute_time: float = 0.0
    communication_time: float = 0.0
    overlap_time: float = 0.0
    backward_overlap_time: float = 0.0
    communication: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_communication_time(self) -> float:
        """Communication that no computation of its device hides."""
        return self.communication_time - self.overlap_time


def step_times(ops: Iterable[DeviceOp], program: StepProgram, step_time: float) -> StepTimes:
    """The times of one step.

    Args:
      ops: what the devices ran.
      program: what ran.
      step_time: seconds, as the host saw them.
    """
    by_device: dict[str, list[DeviceOp]] = defaultdict(list)
    for op in ops:
        by_device[op.device].append(op)
    every = [_device_times(found, program) for found in by_device.values()]
    return _mean(every, step_time=step_time)


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean of every time; what a step did not exchange took it no time."""
    return _mean(steps, step_time=sum(s.step_time for s in steps) / max(1, len(steps)))


def _mean(times: Sequence[StepTimes], *, step_time: float) -> StepTimes:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(1, len(times))

    names = dict.fromkeys(name for t in times for name in t.communication)
    parts = [f.name for f in fields(StepTimes) if f.name not in ("step_time", "communication")]
    return StepTimes(
        step_time=step_time,
        **{part: mean(getattr(t, part) for t in times) for part in parts},
        communication={n: mean(t.communication.get(n, 0.0) for t in times) for n in names},
    )


def _device_times(ops: list[DeviceOp], program: StepProgram) -> StepTimes:
    compute: dict[str, list[Interval]] = defaultdict(list)
    exchange: dict[str, list[Interval]] = defaultdict(list)
    begun: dict[str, int] = {}
    seen = {op.name for op in ops}
    for op in sorted(ops, key=lambda op: op.start):
        work = program.work(op.name, seen) or _unknown(op)
        if work.compute:
            compute[work.compute].append((op.start, op.end))
        if work.communication:
            # From the start of an asynchronous exchange to the end of the wait for it; where only
            # one of the two has an event, that one lasts as long as the exchange.
            start = begun.pop(work.ends, op.start)
            exchange[work.communication].append((start, op.end))
            if not work.ends:
                begun[op.name] = op.start
    all_compute = [interval for found in compute.values() for interval in found]
    all_exchange = [interval for found in exchange.values() for interval in found]
    return StepTimes(
        forward_compute_time=length(compute[FORWARD]) / 1e9,
        backward_compute_time=length(compute[BACKWARD]) / 1e9,
        other_compute_time=length(compute[OTHER]) / 1e9,
        communication_time=length(all_exchange) / 1e9,
        overlap_time=overlap(all_exchange, all_compute) / 1e9,
        backward_overlap_time=overlap(all_exchange, compute[BACKWARD]) / 1e9,
        communication={name: length(found) / 1e9 for name, found in exchange.items()},
    )


def _unknown(op: DeviceOp) -> Work:
    """What has no instruction: NCCL's kernels by their name, the rest if it is the step's."""
    if op.name.startswith("nccl"):
        return Work(communication=OTHER)
    return Work(compute=OTHER) if op.is_ours else Work()


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals in order, those that touch joined."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """How long at least one of the intervals lasts."""
    return sum(end - start for start, end in union(intervals))


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """How long an interval of the first and one of the second last at the same time."""
    return length(first) + length(second) - length([*first, *second])
