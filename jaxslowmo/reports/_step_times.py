"""The times that a step spent on computing and communicating, from a trace of the jax profiler.

The operations of each device, the work of each by the step's compiled program, and their times.
"""

import re
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from .._support import scopes
from .._support.private_jax import has_libtpu_without_tpu
from ._hlo import COLLECTIVES, Instruction, parse_module, parse_phase, parse_scope

_DEVICE = re.compile(r"/device:\w+:\d+$")  # not its helpers, such as "/device:TPU:0 SparseCore 1"
# One line of each on TPU. On GPU a line is a stream, besides lines that sum up others.
_OP_LINES = {"XLA Ops", "Async XLA Ops"}
_SUMMARIES = {"XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code"}
_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")  # TPU names an event by the whole instruction


class DeviceOp(NamedTuple):
    """One operation that a device ran."""

    device: str
    start: int  # nanoseconds
    end: int
    name: str  # of the HLO instruction, or of what ran without one
    is_ours: bool = True  # known to belong to the step's program, whether or not it has that name


class TraceError(RuntimeError):
    """The error that a trace cannot start now; its text says why."""


def profile_call(call: Callable[[], Any], module: str) -> tuple[Any, list[DeviceOp], float]:
    """Call a step under the profiler and wait for it.

    Args:
      call: a function that runs the step and returns its results.
      module: name of the step's compiled module.

    Returns:
      The results, the operations that this process's devices ran for it, and its seconds.

    Raises:
      TraceError: another trace is running, or libtpu is loaded without a TPU; nothing was called.
    """
    if has_libtpu_without_tpu():  # a trace would be a segmentation fault
        raise TraceError("the jax profiler would crash: libtpu is loaded, and there is no TPU")
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # holds the operations of CPU devices
    options.enable_hlo_proto = False  # the program is known
    with tempfile.TemporaryDirectory(prefix="jaxslowmo-", ignore_cleanup_errors=True) as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise TraceError("another trace of the jax profiler is running") from error
        try:
            began = time.perf_counter()
            results = jax.block_until_ready(call())
            seconds = time.perf_counter() - began
        finally:
            jax.profiler.stop_trace()
        with warnings.catch_warnings():
            # Under Python 3.12 jaxlib's own types give one; as an error it would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            traces = [ProfileData.from_file(str(p)) for p in Path(folder).rglob("*.xplane.pb")]
            return results, [op for trace in traces for op in device_ops(trace, module)], seconds


def device_ops(data: Any, module: str) -> Iterator[DeviceOp]:
    """Yield the operations in a trace that belong to a module, or to no module that it names.

    Args:
      data: a `jax.profiler.ProfileData`.
      module: name of the module.
    """
    for plane in data.planes:
        # CPU devices have no planes; their operations name the device.
        is_host = plane.name == "/host:CPU"
        if not is_host and not _DEVICE.match(plane.name):
            continue
        lines = [line for line in plane.lines if line.name not in _SUMMARIES]
        chosen = [line for line in lines if line.name in _OP_LINES] or lines
        events = [(event, dict(event.stats)) for line in chosen for event in line.events]
        # On CPU an operation that goes on in other threads ends later than the call that began it.
        ends = {stats.get("_c"): e.start_ns for e, stats in events if e.name.startswith("end: ")}
        for event, stats in events:
            names_module = "hlo_module" in stats
            if stats.get("hlo_module", module) != module or (is_host and "hlo_op" not in stats):
                continue
            match = _INSTRUCTION.match(event.name)
            name = str(stats.get("hlo_op") or (match[1] if match else event.name))
            device = f"cpu:{stats.get('device_ordinal', 0)}" if is_host else plane.name
            end = max(event.end_ns, ends.get(stats.get("_p"), 0))
            yield DeviceOp(device, int(event.start_ns), int(end), name, names_module)


# The work of operations.

_PASSES = FORWARD, BACKWARD, OTHER = "forward", "backward", "other"


class Work(NamedTuple):
    """The work of an instruction."""

    compute: str = ""  # "forward", "backward" or "other"; "" if it computes nothing itself
    communication: str = ""  # what is exchanged; "" if nothing is
    started_by: str = ""  # the instruction that began what this one waits for


# Scopes of the library around its exchanges, and the names of these in reports.
_SCOPES = {
    scopes.ALL_REDUCE_GRADIENTS: scopes.GRADIENTS,
    scopes.ALL_REDUCE_ROWS: scopes.GRADIENTS,
    scopes.SKIP_UNUSED: "unused",
    scopes.MODEL_STATE: scopes.MODEL_STATE,
    scopes.METRICS: scopes.METRICS,
    scopes.LOSS_SCALE: scopes.LOSS_SCALE,
    scopes.TIED: scopes.GRADIENTS,
    scopes.CLIP: "norm",
}
_COLLECTIVE = re.compile(rf"[ )](?:{'|'.join(COLLECTIVES)})(?:-start|-done)?\(")
_SUFFIX = re.compile(r"-(start|update|done)$")
_PRODUCT = re.compile(r"[ )](?:dot|convolution|fusion)\(")


class StepProgram:
    """The instructions of a compiled step by name.

    Args:
      text: `compiled.as_text()`.

    Attributes:
      name: name of the module.
    """

    def __init__(self, text: str) -> None:
        self._module = parse_module(text)
        self.name = "".join(re.findall(r"^HloModule ([^\s,]+)", self._module.header))
        computations = self._module.computations.values()
        self._home = {name: home for home in computations for name in home.lines}
        self._work_by_name: dict[str, Work] = {}

    def work(self, name: str, seen: Collection[str] = ()) -> Work | None:
        """Return the work of an instruction; None for a name that the program does not have.

        Args:
          name: name of the instruction.
          seen: names of the instructions that were observed to run. A call whose callees ran is
            not counted in addition to them.
        """
        if name in self._home and name not in self._work_by_name:
            self._work_by_name[name] = self._work(self._home[name].instruction(name), seen)
        return self._work_by_name.get(name)

    def _work(self, op: Instruction, seen: Collection[str]) -> Work:
        if op.opcode in ("while", "conditional"):
            return Work()  # lasts as long as the operations that it runs, which have events
        homes = (self._module.computations[name] for name in op.callees)
        inner = {name: line for home in homes for name, line in home.lines.items()}
        if op.opcode == "call" and any(name in seen for name in inner):
            return Work()
        counts = Counter(filter(None, map(parse_scope, inner.values())))
        scope = parse_scope(op.attributes) or "".join(name for name, _ in counts.most_common(1))
        carried = [line for line in inner.values() if _COLLECTIVE.search(line)]
        # Of what goes on, the instruction that began it says what it is.
        ends = op.opcode.endswith("-done") or op.name.startswith("async-collective-done")
        begun = self.work(op.operands[0]) if ends or op.opcode.endswith("-update") else None
        exchange = begun.communication if begun else ""
        is_collective = _SUFFIX.sub("", op.opcode) in COLLECTIVES
        to_host = ", is_host_transfer=true" in op.attributes
        if not (exchange or carried or (is_collective and not to_host)):
            return Work(compute=_pass_name(scope))
        # TPU spreads a collective over fusions that compute; others only wrap one.
        computes = op.opcode == "fusion" and any(map(_PRODUCT.search, inner.values()))
        return Work(
            compute=_pass_name(scope) if computes else "",
            communication=exchange or self._exchange(op, [*map(parse_scope, carried), scope]),
            started_by=op.operands[0] if ends else "",
        )

    def _exchange(self, op: Instruction, candidates: list[str]) -> str:
        scope = next(filter(None, candidates), "")
        phase, home = parse_phase(scope), self._home[op.name]
        if not scope and home.name != self._module.entry:
            # Compilers insert collectives without a scope; in a branch of one phase they are its.
            phase = home.only_phase()
        if phase is not None:
            return scopes.MODEL_STATE if phase == scopes.EVERY_PHASE else phase
        return next((name for part, name in _SCOPES.items() if part in scope), _pass_name(scope))


def _pass_name(scope: str) -> str:
    """Forward or backward pass: jax names the transformations that made an operation."""
    if "transpose(" in scope:
        return BACKWARD
    return FORWARD if "jvp(" in scope else OTHER


# Times.

# Half-open: start and end, in nanoseconds.
Interval = tuple[int, int]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, or their means over steps.

    Times of operations are means over the devices. An instant with several operations of one sort
    counts once. On CPU, operations that wait for a core last longer.

    Attributes:
      step_time: time between the call of the step and its end, as the host sees it.
      forward_compute_time: operations of the forward pass.
      backward_compute_time: operations of the backward pass.
      other_compute_time: all other operations: the optimizer, packing, copies.
      communication_time: collectives, including the time to wait for other devices.
      overlap_time: communication while the same device computes.
      backward_overlap_time: communication while it computes the backward pass.
      communication: maps what is exchanged to its `communication_time`: `"gradients"`; for
        parameters the phase (`"average"`, `"slow"`, `"round 0"`, ...); `"model_state"`,
        `"metrics"`; `"forward"` and `"backward"` for collectives of the model itself; `"other"`.
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
        """The time of communication that no computation of its device hides."""
        return self.communication_time - self.overlap_time


def step_times(ops: Iterable[DeviceOp], program: StepProgram, step_time: float) -> StepTimes:
    """Return the times of one step.

    Args:
      ops: the operations that the devices ran.
      program: the compiled program of the step.
      step_time: seconds of the step, as the host measured them.
    """
    by_device = groupby(sorted(ops), lambda op: op.device)
    every = [_device_times(list(of_device), program) for _, of_device in by_device]
    return replace(mean_times(every), step_time=step_time)


def mean_times(times: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of every time; an exchange that a step did not make counts as 0."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(1, len(times))

    names = dict.fromkeys(name for t in times for name in t.communication)
    parts = [f.name for f in fields(StepTimes) if f.name != "communication"]
    return StepTimes(
        **{part: mean(getattr(t, part) for t in times) for part in parts},
        communication={n: mean(t.communication.get(n, 0.0) for t in times) for n in names},
    )


def _device_times(ops: list[DeviceOp], program: StepProgram) -> StepTimes:
    """Return the times of one device from its operations, by their starts."""
    compute: dict[str, list[Interval]] = defaultdict(list)
    exchange: dict[str, list[Interval]] = defaultdict(list)
    begun: dict[str, int] = {}
    seen = {op.name for op in ops}
    for op in ops:
        # Of operations without an instruction NCCL's kernels have its name.
        unknown = (
            Work("", OTHER) if op.name.startswith("nccl") else Work(OTHER if op.is_ours else "")
        )
        work = program.work(op.name, seen) or unknown
        if work.compute:
            compute[work.compute].append((op.start, op.end))
        if work.communication:
            # From the start of an asynchronous exchange to the end of the wait for it; where only
            # one of the two has an event, that one lasts as long as the exchange.
            start = begun.pop(work.started_by, op.start)
            exchange[work.communication].append((start, op.end))
            if not work.started_by:
                begun[op.name] = op.start
    all_compute, all_exchange = ([*chain(*spans.values())] for spans in (compute, exchange))
    return StepTimes(
        **{f"{name}_compute_time": length(compute[name]) / 1e9 for name in _PASSES},
        communication_time=length(all_exchange) / 1e9,
        overlap_time=overlap(all_exchange, all_compute) / 1e9,
        backward_overlap_time=overlap(all_exchange, compute[BACKWARD]) / 1e9,
        communication={name: length(each) / 1e9 for name, each in exchange.items()},
    )


def length(intervals: Iterable[Interval]) -> int:
    """Return how long at least one of the intervals lasts."""
    total = until = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Return how long an interval of the first and one of the second overlap."""
    return length(first) + length(second) - length([*first, *second])
