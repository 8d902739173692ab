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

_FIRST = 10  # steps that are measured one after the other


def measured(step: Callable[..., Any], *, rate: int = 100) -> "MeasuredStep":
    """A step that is measured at its calls 1 to 10 and then at every `rate`-th.

    A measured call runs the real step under the jax profiler and reads off the trace what each
    device did when: forward pass, backward pass, communication, and which of it at the same time.
    It waits for the steps before and for its own end. Other calls cost nothing.

    Parameters may be exchanged seldom: of the steps that do so (by `js.phase_name`) those numbered
    1 to 10 and every `rate`-th among them are measured too.

    Args:
      step: of `js.make_train_step`, or any function made by `jax.jit` that is called with arrays.
      rate: of which calls one is measured, after the first ten.

    Returns:
      A `MeasuredStep`, which is called as `step` is and stands in its place in `js.train_loop`.

    Raises:
      ValueError: rate < 1, or a step that is neither of these.

    Example:
      step = js.measured(step, rate=100)
      for result in js.train_loop(step, state, batches): ...
      print(step.report())

    Communication: none beside the step's.

    Source: torch 2.13, `Logger` of `DistributedDataParallel`; FairScale's `profile_mode`.
    """
    return MeasuredStep(step, rate)


class MeasuredStep:
    """A step that is measured now and then; made by `js.measured`.

    It has the attributes of the step it measures. What several processes measure is each one's own.
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
        """Calls the step, and measures it if it is due."""
        return self._call(self._step, args, kwargs)

    @property
    def ahead(self) -> Callable[..., "MeasuredAhead"]:
        """`step.ahead`, whose updates are measured as those of the step."""
        ahead = self._step.ahead
        return lambda *args, **kwargs: MeasuredAhead(ahead(*args, **kwargs), self._call)

    def _call(self, step: Any, args: Any, kwargs: Any, static: Hashable = None) -> Any:
        """Calls `step`; `static` tells its programs apart where shapes of arguments do not."""
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
        """As the step's own; for `js.train_loop`."""
        return self._step.next_phase(state)

    def report(self) -> StepReport:
        """What was measured so far.

        Returns:
          A `StepReport`.

        Communication: none.
        """
        every = [times for found in self._times.values() for times in found]
        # Without parameter transform all steps are alike, and none is local.
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
        """What this call runs: compiled now if it was not, and read once."""
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
            found = (Bucket(b.role, b.size_bytes, b.dtype, b.leaves) for b in buffers)
            self._buckets.update(dict.fromkeys(found))
            if self._facts is None:
                self._facts = _facts(self._step, args)
        return self._programs[key]


class MeasuredAhead:
    """A `js.AheadStep` of a measured step, with whose updates its own are counted.

    Args:
      ahead: of `step.ahead`.
      call: `(step, args, kwargs, static)`, of the measured step.
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
    ) -> Any:
        """As the step's; batches that are only collected are not measured."""
        args = state, batch, asked, next_batch, weight, window
        if collect:
            return self._ahead(*args, collect)
        return self._call(self._ahead, args, {}, self._ahead.asks_for(next_batch))


class Sampling:
    """Steps 1 to 10 and every `rate`-th, as torch's logger; the same among those of each exchange.

    Without the latter, parameters exchanged every 48 steps would be measured once in 1,200.

    Raises:
      ValueError: rate < 1.
    """

    def __init__(self, rate: int) -> None:
        self.rate = checked_int("`rate` counts steps and", rate, 1)
        self.steps = 0
        self._exchanges: Counter[str] = Counter()

    def next(self, kind: str) -> bool:
        """Counts a step of a kind ("local": nothing but gradients) and tells whether it is due."""
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
    """What stays the same from step to step, of a step with a `TrainState`."""
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
