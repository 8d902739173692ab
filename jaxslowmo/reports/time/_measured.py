"""A step that is measured now and then."""

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from ..._support.checks import checked_int, warn_once
from ..._support.scopes import GRADIENTS
from ..._support.types import Phase, PyTree
from ...transform import phase_name
from ...tree import leaf_names, noted_buffers
from ._step_program import StepProgram
from ._step_report import Bucket, KindOfStep, StepReport
from ._times import DeviceOp, StepTimes, mean_times, step_times
from ._trace import CannotTrace, traced_call

_FIRST = 10  # so many steps are measured one after the other


def measured(step: Callable[..., Any], *, rate: int = 100) -> "MeasuredStep":
    """Return the step such that its calls 1 to 10 and then every `rate`-th are measured.

    A measured call runs the real step under the jax profiler. The trace says when each device
    computed the forward pass, the backward pass and the rest, when it communicated, and what of
    this overlapped. The call waits for the steps before it and for its own end. Other calls cost
    nothing.

    Parameters may be exchanged rarely. Of the steps that exchange them (by `js.phase_name`), the
    first ten and every `rate`-th among them are measured too.

    Args:
      step: a step of `js.make_train_step`, or any function made by `jax.jit` that takes arrays.
      rate: after the first ten calls, every so many calls one is measured.

    Returns:
      A `MeasuredStep`, which is called as `step` is and replaces it in `js.train_loop`.

    Raises:
      ValueError: `rate` < 1, or a step of another kind.

    Example:
      step = js.measured(step, rate=100)
      for result in js.train_loop(step, state, batches): ...
      print(step.report())

    Communication: that of the step.

    Source: torch 2.13, `Logger` of `DistributedDataParallel`; FairScale's `profile_mode`.
    """
    return MeasuredStep(step, rate)


class MeasuredStep:
    """A step of which some calls are measured; made by `js.measured`.

    It has the attributes of the step that it measures. Each process measures its own devices.
    """

    def __init__(self, step: Any, rate: int) -> None:
        if not callable(step) or not (hasattr(step, "compiled") or hasattr(step, "lower")):
            raise ValueError(
                "`step` must be made by js.make_train_step or jax.jit, got "
                f"{getattr(step, '__name__', type(step).__name__)}."
            )
        self._step: Any = step
        self._sampling = Sampling(rate)
        self._warn = warn_once()
        self._programs: dict[Any, StepProgram] = {}
        self._facts: dict[str, Any] | None = None
        self._buckets: dict[Bucket, None] = {}  # in order, without duplicates
        self._steps_by_kind: Counter[str] = Counter()
        self._times: dict[str, list[StepTimes]] = {}
        self._measured: list[int] = []
        self._missed: list[int] = []
        self._last: StepTimes | None = None
        self._num_devices = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
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

    def _call(self, step: Any, args: Any, kwargs: Any, static: Hashable = None) -> Any:
        """Call `step`; `static` distinguishes programs whose arguments have equal shapes."""
        has_phases = hasattr(self._step, "next_phase")
        kind = phase_name(self._step.next_phase(args[0])) if has_phases else "local"
        self._steps_by_kind[kind] += 1
        if not self._sampling.next(kind):
            return step(*args, **kwargs)
        program = self._program(step, kind, args, kwargs, static)
        jax.block_until_ready((args, kwargs))
        try:
            result, ops, seconds = traced_call(lambda: step(*args, **kwargs), program.name)
        except CannotTrace as error:
            self._miss(str(error))
            return step(*args, **kwargs)
        self._take(kind, ops, program, seconds)
        return result

    def next_phase(self, state: Any) -> Phase:
        """Return the phase of the next update, as the step does; for `js.train_loop`."""
        return self._step.next_phase(state)

    def report(self) -> StepReport:
        """Return what was measured so far.

        Returns:
          A `StepReport`.

        Communication: none.
        """
        every = [times for times_of_kind in self._times.values() for times in times_of_kind]
        # Without a parameter transform all steps are of one kind, "every".
        alike = set(self._steps_by_kind) == {"local"}
        buckets = list(self._buckets)
        gradients = tuple(b for b in buckets if b.exchange == GRADIENTS)
        # A step of the user's own may keep its parameters anywhere; each has a gradient.
        facts = self._facts or _facts_of_gradients(gradients)
        return StepReport(
            iteration=self._sampling.steps,
            rate=self._sampling.rate,
            measured=tuple(self._measured),
            missed=tuple(self._missed),
            last=self._last,
            average=mean_times(every) if every else None,
            kinds={
                "every" if alike else kind: KindOfStep(
                    steps=count,
                    measured=len(self._times.get(kind, [])),
                    times=mean_times(self._times.get(kind, [])),
                )
                for kind, count in self._steps_by_kind.items()
            },
            buckets=gradients,
            sync_buckets=tuple(b for b in buckets if b.exchange != GRADIENTS),
            backend=jax.default_backend(),
            num_devices=self._num_devices,
            **facts,
        )

    def _take(self, kind: str, ops: list[DeviceOp], program: StepProgram, seconds: float) -> None:
        if not any(program.work(op.name) for op in ops):
            self._missed.append(self._sampling.steps)
            self._warn(
                "js.measured: the jax profiler recorded no operation of the step, so it is not "
                "measured."
            )
            return
        self._last = step_times(ops, program, seconds)
        self._times.setdefault(kind, []).append(self._last)
        self._measured.append(self._sampling.steps)
        self._num_devices = len({op.device for op in ops})

    def _miss(self, why: str) -> None:
        self._missed.append(self._sampling.steps)
        self._warn(f"js.measured: {why}, so steps are not measured meanwhile.")

    def _program(
        self, step: Any, kind: str, args: Any, kwargs: Any, static: Hashable
    ) -> StepProgram:
        """Return the program that this call runs; it is compiled and read at its first call."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        by_host = getattr(self._step, "mode", None) == "host"
        key = (
            kind if by_host else None,
            static,
            treedef,
            tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves),
        )
        if key not in self._programs:
            with noted_buffers() as buffers:
                if hasattr(step, "compiled"):
                    compiled = step.compiled(*args, **kwargs)
                else:
                    compiled = step.lower(*args, **kwargs).compile()
            self._programs[key] = StepProgram(compiled.as_text() or "")
            noted = (Bucket(b.role, b.size_bytes, b.dtype, b.leaves) for b in buffers)
            self._buckets.update(dict.fromkeys(noted))
            if self._facts is None:
                self._facts = _facts(self._step, args)
        return self._programs[key]


class MeasuredAhead:
    """A `js.train.AheadStep` of a measured step, whose updates count as those of that step.

    Args:
      ahead: the step that `step.ahead` returned.
      call: `call(step, args, kwargs, static)` of the measured step, which measures.
    """

    def __init__(self, ahead: Any, call: Callable[..., Any]) -> None:
        self._ahead, self._call = ahead, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_ahead" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._ahead, name)

    def __call__(
        self,
        state: Any,
        batch: PyTree,
        asked: Any,
        next_batch: PyTree | None,
        weight: Any = None,
        window: Any = None,
        collect: bool = False,
        num_batches: int = 0,
    ) -> Any:
        """Call the step; batches that are only collected are not measured."""
        args = state, batch, asked, next_batch, weight, window
        if collect:
            return self._ahead(*args, collect, num_batches)
        return self._call(self._ahead, args, {}, self._ahead.asks_for(next_batch))


class Sampling:
    """The choice of the steps to measure: 1 to 10 and every `rate`-th, as torch's logger does.

    The same rule holds among the steps of each exchange. Without it, an exchange of parameters
    every 48 steps would be measured once in 1,200 steps.

    Raises:
      ValueError: rate < 1.
    """

    def __init__(self, rate: int) -> None:
        self.rate = checked_int("`rate` counts steps and", rate, 1)
        self.steps = 0
        self._exchanges: Counter[str] = Counter()

    def next(self, kind: str) -> bool:
        """Count a step of a kind ("local": gradients alone), and return whether to measure it."""
        self.steps += 1
        due = self._among(self.steps)
        if kind != "local":
            self._exchanges[kind] += 1
            due |= self._among(self._exchanges[kind])
        return due

    def _among(self, count: int) -> bool:
        return count <= _FIRST or count % self.rate == 0


def _facts_of_gradients(buckets: tuple[Bucket, ...]) -> dict[str, Any]:
    return {
        "ready_order": None,
        "parameter_bytes": sum(bucket.size_bytes for bucket in buckets),
        "num_parameter_tensors": len({name for bucket in buckets for name in bucket.leaves}),
        "dtypes": tuple(dict.fromkeys(bucket.dtype for bucket in buckets)),
    }


def _facts(step: Any, args: Any) -> dict[str, Any] | None:
    """Return facts that are equal in all steps; None for a step without a `TrainState`."""
    if not args or not hasattr(step, "ready_order"):
        return None
    params = args[0].params
    leaves: list[Any] = jax.tree.leaves(params)
    return {
        "ready_order": _names(step.ready_order(*args[:2]), params),
        "parameter_bytes": sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in leaves),
        "num_parameter_tensors": len(leaves),
        "dtypes": tuple(dict.fromkeys(str(x.dtype) for x in leaves)),
    }


def _names(order: tuple[int, ...] | None, params: PyTree) -> tuple[str, ...] | None:
    names = leaf_names(params)
    return None if order is None else tuple(names[i] for i in order)
