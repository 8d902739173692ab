"""How long a step would take on described GPUs, by the estimates of XLA's own compiler.

XLA writes its "speed of light" estimate of each instruction into the scheduled program when it is
compiled with `xla_gpu_collect_cost_model_stats`. On an H100 a matrix product and a collective
inside one host are looked up in tables of measured times, a collective between hosts follows a
formula, and other fusions follow the arithmetic and the memory bandwidth. Nothing here was timed.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxslowmo.reports._hlo import HloModule, Instruction, shapes, trip_count
from support.gpu_schedule import schedule_of
from support.schedule_text import inside, instructions, scheduled_module

_COSTS = re.compile(r'"reification_cost":(\[[^\]]*\])')
# What XLA writes where it has no estimate: a hundredth of the scheduler's rough costs for kernels,
# the scheduler's rough latencies for collectives.
_NO_ESTIMATE = {0.0, 0.01, 10.0, 50.0}
_NO_LATENCY = {0.0, 0.01, 1.0, 5000.0, 50000.0}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


@dataclass(frozen=True)
class Estimate:
    """Estimated times of one run of a program, in microseconds.

    Attributes:
      kernels: time of all kernels, which run one after the other.
      collectives: time of all collectives, each as long as if it had its links alone.
      exposed: time for which the kernels wait for collectives.
      by_bytes: the part of `kernels` that XLA does not estimate, such as Triton's softmax; taken as
        the bytes that are read and written divided by the memory bandwidth.
    """

    kernels: float = 0.0
    collectives: float = 0.0
    exposed: float = 0.0
    by_bytes: float = 0.0

    @property
    def step(self) -> float:
        """The time of the whole program, without the launches of kernels."""
        return self.kernels + self.exposed

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(*(a + b for a, b in zip(self._times(), other._times(), strict=True)))

    def __mul__(self, times: int) -> "Estimate":
        return Estimate(*(times * a for a in self._times()))

    def _times(self) -> tuple[float, ...]:
        return self.kernels, self.collectives, self.exposed, self.by_bytes


def text_with_estimates(
    lowered: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None
) -> str:
    """Compile a program; return its scheduled text with XLA's estimates.

    `compiled.as_text()` leaves out the computations that asynchronous collectives wrap, and with
    them the estimates of reduce-scatters and all-to-alls; the compiler's dump has them.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_syntax_sugar_async_ops": False,
            "xla_gpu_collect_cost_model_stats": True,
        }
        lowered.compile(compiler_options={**(compiler_options or {}), **dump})
        # On a real GPU the compiler may also dump what it tunes, which is small.
        paths = Path(folder).glob("*gpu_after_optimizations.txt")
        return max((path.read_text("utf-8") for path in paths), key=len)


def read_estimate(text: str, memory_bandwidth: float) -> Estimate:
    """Return the estimate of a program from its text.

    The instructions run in the order of the schedule. A collective starts when the kernels before
    it have ended; the kernels after its end wait for it. Of the branches of a conditional the
    longest is taken. That kernels and collectives slow each other down is left out.

    Args:
      text: from `text_with_estimates`.
      memory_bandwidth: of the GPU, in bytes per second.

    Raises:
      AssertionError: XLA has estimated no time for a collective.
    """
    module = scheduled_module(text)
    return _Reader(module, memory_bandwidth).estimate(module.entry)


class _Reader:
    def __init__(self, module: HloModule, memory_bandwidth: float) -> None:
        self._module = module
        self._bandwidth = memory_bandwidth

    def estimate(self, computation: str) -> Estimate:
        """Return the estimate of one computation."""
        schedule = schedule_of(self._module, computation)
        starts = {transfer.start: transfer for transfer in schedule.transfers}
        total, ends = Estimate(), dict[int, float]()
        for place, op in enumerate(instructions(self._module, computation)):
            if place in starts:
                time = self._latency(op)
                total += Estimate(collectives=time)
                done = starts[place].done
                if done == place:
                    total += Estimate(exposed=time)
                else:
                    ends[done] = max(ends.get(done, 0.0), total.step + time)
            elif place in ends:
                total += Estimate(exposed=max(0.0, ends[place] - total.step))
            else:
                total += self._kernel(op, computation)
        return total

    def _latency(self, op: Instruction) -> float:
        """Return the time of a collective, which may be wrapped."""
        times = [_speed_of_light(inner) for inner in inside(self._module, op)]
        known = [time for time in times if time is not None and time not in _NO_LATENCY]
        assert known, f"XLA estimates no time for {op.name}"
        return max(known)

    def _kernel(self, op: Instruction, computation: str) -> Estimate:
        """Return the time of what is no collective."""
        if op.opcode in _FREE or op.opcode.endswith("-done"):
            return Estimate()
        if op.opcode == "while":
            times = trip_count(op, self._module.computations[computation], self._module)
            assert times is not None, f"the number of turns of {op.name} is not known"
            return self.estimate(op.callees[-1]) * times
        if op.opcode in ("conditional", "call", "async-start"):
            branches = [self.estimate(name) for name in op.callees]
            return max(branches, key=lambda branch: branch.step)
        time = _speed_of_light(op)
        if time is not None and time not in _NO_ESTIMATE:
            return Estimate(kernels=time)
        within = self._module.computations[computation]
        moved = [op.type, *(within.instruction(name).type for name in op.operands)]
        num_bytes = sum(size for each in moved for _, size in shapes(each))
        time = 1e6 * num_bytes / self._bandwidth
        return Estimate(kernels=time, by_bytes=time)


def _speed_of_light(op: Instruction) -> float | None:
    """Return the estimated microseconds of an instruction; None without an estimate."""
    match = _COSTS.search(op.attributes)
    costs = json.loads(match[1]) if match else []
    return next((cost["exec_time_us"] for cost in costs if cost["name"] == "sol"), None)
