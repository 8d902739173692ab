"""A step that is measured now and then, and the report on its times: `measured`."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from .._support.checks import checked_int, warn_once
from .._support.files import write_atomic
from .._support.scopes import GRADIENTS
from ..transform import phase_name
from ..tree import Bucket, leaf_names, noted_buffers
from ._comm_report import align_columns
from ._step_times import StepProgram, StepTimes, TraceError, mean_times, profile_call, step_times


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


# The measured step.


def measured(step: Callable[..., Any], *, rate: int = 100) -> "MeasuredStep":
    """Wrap a step so that its calls 1 to 10, and then every `rate`-th call, are measured.

    A measured call runs the real step under the jax profiler. The trace says when each device
    computed the forward pass, the backward pass and the rest, when it communicated, and what of
    this overlapped. The call waits for the steps before it and for its own end. Other calls cost
    nothing.

    Parameters may be exchanged rarely. Of the steps that exchange them (by `js.spec.phase_name`),
    the first ten and every `rate`-th among them are measured too.

    Args:
      step: a step of `js.make_train_step`, or any function made by `jax.jit` that takes arrays.
      rate: after the first ten calls, every so many calls one is measured.

    Returns:
      A `MeasuredStep`, which is called as `step` is and replaces it in `js.train_loop`.

    Raises:
      ValueError: `rate` < 1, or a step of another kind.

    Example:
      step = js.reports.measured(step, rate=100)
      for result in js.train_loop(step, state, batches): ...
      print(step.report())

    Communication: that of the step.

    Source: torch 2.13, `Logger` of `DistributedDataParallel`; FairScale's `profile_mode`.
    """
    return MeasuredStep(step, rate)


class MeasuredStep:
    """A step of which some calls are measured; made by `js.reports.measured`.

    It has the attributes of the step that it measures. Each process measures its own devices.
    """

    def __init__(self, step: Any, rate: int) -> None:
        if not callable(step) or not (hasattr(step, "compiled") or hasattr(step, "lower")):
            name = getattr(step, "__name__", type(step).__name__)
            raise ValueError(f"`step` must be made by js.make_train_step or jax.jit, got {name}.")
        self._step: Any = step
        self._rate = checked_int("`rate` counts steps and", rate, 1)
        self._counts: Counter[str] = Counter()
        self._warn = warn_once()
        self._programs: dict[Any, StepProgram] = {}
        self._facts: dict[str, Any] | None = None
        self._buckets: dict[Bucket, None] = {}  # in order, without duplicates
        self._measured: list[tuple[int, str, StepTimes]] = []  # number from 1, kind
        self._num_devices = 0
        self._missed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in vars(self):
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step, and measure it if that is due."""
        return self._call(self._step, args, kwargs)

    @property
    def ahead(self) -> Callable[..., "MeasuredAhead"]:
        """The method `step.ahead`, whose updates are measured like those of the step."""
        ahead = self._step.ahead
        return lambda *args, **kwargs: MeasuredAhead(ahead(*args, **kwargs), self._call)

    def _call(self, step: Any, args: Any, kwargs: Any) -> Any:
        has_phases = hasattr(self._step, "next_phase")
        kind = phase_name(self._step.next_phase(args[0])) if has_phases else "local"
        self._counts[kind] += 1
        if not is_due(kind, self._counts, self._rate):
            return step(*args, **kwargs)
        number, program = self._counts.total(), self._program(step, args, kwargs)
        jax.block_until_ready((args, kwargs))
        why = "the jax profiler recorded no operation of the step"
        try:
            result, ops, seconds = profile_call(lambda: step(*args, **kwargs), program.name)
        except TraceError as error:
            why, result, ops, seconds = str(error), step(*args, **kwargs), [], 0.0
        if any(program.work(op.name) for op in ops):
            self._measured.append((number, kind, step_times(ops, program, seconds)))
            self._num_devices = len({op.device for op in ops})
        else:
            self._missed.append(number)
            self._warn(f"js.reports.measured: {why}, so it is not measured.")
        return result

    def report(self) -> StepReport:
        """Return what was measured so far.

        Returns:
          A `StepReport`.

        Communication: none.
        """
        # Without a parameter transform all steps are of one kind, "every".
        one_kind = {*self._counts} == {"local"}
        kinds = dict[str, KindOfStep]()
        for kind, count in self._counts.items():
            times = [times for _, of_kind, times in self._measured if of_kind == kind]
            kinds["every" if one_kind else kind] = KindOfStep(count, len(times), mean_times(times))
        every = [times for *_, times in self._measured]
        gradients = tuple(b for b in self._buckets if b.exchange == GRADIENTS)
        # A step of the user's own may keep its parameters anywhere; each has a gradient.
        facts = self._facts or {
            "ready_order": None,
            "parameter_bytes": sum(bucket.size_bytes for bucket in gradients),
            "num_parameter_tensors": len({name for bucket in gradients for name in bucket.leaves}),
            "dtypes": tuple(dict.fromkeys(bucket.dtype for bucket in gradients)),
        }
        return StepReport(
            iteration=self._counts.total(),
            rate=self._rate,
            measured=tuple(number for number, *_ in self._measured),
            missed=tuple(self._missed),
            last=every[-1] if every else None,
            average=mean_times(every) if every else None,
            kinds=kinds,
            buckets=gradients,
            sync_buckets=tuple(b for b in self._buckets if b.exchange != GRADIENTS),
            backend=jax.default_backend(),
            num_devices=self._num_devices,
            **facts,
        )

    def _program(self, step: Any, args: Any, kwargs: Any) -> StepProgram:
        """Return the program that this call runs; jax compiles it, and it is read, only once."""
        make = getattr(step, "compiled", lambda *a, **k: step.lower(*a, **k).compile())
        with noted_buffers() as buffers:
            compiled = make(*args, **kwargs)
        self._buckets.update(dict.fromkeys(buffers))
        if self._facts is None and hasattr(self._step, "ready_order"):
            self._facts = _facts(self._step, args)
        executable = compiled.runtime_executable()
        if executable not in self._programs:
            self._programs[executable] = StepProgram(compiled.as_text() or "")
        return self._programs[executable]


class MeasuredAhead:
    """A `js.train.AheadStep` of a measured step, whose updates count as those of that step.

    Args:
      ahead: the step that `step.ahead` returned.
      call: `call(step, args, kwargs)` of the measured step, which measures.
    """

    def __init__(self, ahead: Any, call: Callable[..., Any]) -> None:
        self._ahead, self._call = ahead, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_ahead" not in vars(self):
            raise AttributeError(name)
        return getattr(self._ahead, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step; batches that are only collected are not measured."""
        if kwargs.get("collect"):
            return self._ahead(*args, **kwargs)
        return self._call(self._ahead, args, kwargs)


def is_due(kind: str, counts: Counter[str], rate: int) -> bool:
    """Return whether to measure a step: 1 to 10 and every `rate`-th, as torch's logger does.

    The same rule holds among the steps of each exchange. Without it, an exchange of parameters
    every 48 steps would be measured once in 1,200 steps.

    Args:
      kind: kind of the step ("local": gradients alone).
      counts: number of steps so far by kind, this one included.
      rate: `rate` of `measured`.
    """
    own = [counts.total()] if kind == "local" else [counts.total(), counts[kind]]
    return any(count <= 10 or count % rate == 0 for count in own)


def _facts(step: Any, args: Any) -> dict[str, Any]:
    """Return facts that are equal in all steps of a step with a `TrainState`."""
    params = args[0].params
    leaves: list[Any] = jax.tree.leaves(params)
    order, names = step.ready_order(*args[:2]), leaf_names(params)
    return {
        "ready_order": None if order is None else tuple(names[i] for i in order),
        "parameter_bytes": sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in leaves),
        "num_parameter_tensors": len(leaves),
        "dtypes": tuple(dict.fromkeys(str(x.dtype) for x in leaves)),
    }
