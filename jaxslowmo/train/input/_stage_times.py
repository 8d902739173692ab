"""Clocks of the stages of an input pipeline, and a report of the time that each took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


class Clock:
    """A counter and timer of calls, which a jax profiler trace shows as `jaxslowmo.input/NAME`.

    Args:
      name: name of the stage.

    Attributes:
      name: name of the stage.
      count: number of calls that returned.
      seconds: total time of all calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seconds = 0.0

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return `fn(*args, **options)` and add the time of the call.

        Raises:
          RuntimeError: `fn` raised StopIteration, which would look like the end of the batches.
        """
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(f"jaxslowmo.input/{self.name}"):
                result = fn(*args, **options)
        except StopIteration as error:
            raise RuntimeError(f"{self.name} of a pipeline raised StopIteration") from error
        finally:
            self.seconds += time.perf_counter() - began
        self.count += 1
        return result


@dataclass(frozen=True)
class InputStageTimes:
    """The times of one stage of a pipeline, in seconds of host time.

    Attributes:
      name: "load", "place", the name of a function in `stages`, or "step".
      batches: number of batches that went through the stage.
      busy_seconds: time in the iterator for "load"; for other stages time in the call, which starts
        the work on the devices and need not wait for it.
      idle_seconds: the rest of the time since the first call of the pipeline.
    """

    name: str
    batches: int
    busy_seconds: float
    idle_seconds: float


@dataclass(frozen=True)
class InputPipelineReport:
    """The times of a pipeline since its first call, in seconds of host time.

    The thread that trains spends its time in the stages except "load", waiting for a batch, or in
    the caller's code.

    Attributes:
      stages: times of the stages in order, "load" first and "step" last.
      batches: number of batches that were used.
      held: number of batches that are prepared and wait for their turn.
      seconds: time from the first call to the end of the last call.
      waiting_seconds: time that calls waited for a batch to be loaded.
      caller_seconds: time between calls. If the caller reads a result, this includes waiting for
        the devices.
      resent_share: fraction of the requested table rows that were sent again because the previous
        step changed them, for `mode="patched"`; None for other modes.
    """

    stages: tuple[InputStageTimes, ...]
    batches: int
    held: int
    seconds: float
    waiting_seconds: float
    caller_seconds: float
    resent_share: float | None = None

    @property
    def slowest(self) -> str:
        """The name of what took most time: "load", a later stage, or "caller"."""
        spent = {s.name: s.busy_seconds for s in self.stages if s.name != "load"}
        spent |= {"load": self.waiting_seconds, "caller": self.caller_seconds}
        return max(spent, key=lambda name: spent[name])

    def __str__(self) -> str:
        """Return the report as a table of text."""
        lines = [
            f"{self.batches} batches in {self.seconds:.3f} s, {self.held} held; waited "
            f"{self.waiting_seconds:.3f} s for batches, {self.caller_seconds:.3f} s between calls",
            f"{'stage':<16}{'batches':>9}{'busy s':>10}{'idle s':>10}",
        ]
        lines += [
            f"{s.name:<16}{s.batches:>9}{s.busy_seconds:>10.3f}{s.idle_seconds:>10.3f}"
            for s in self.stages
        ]
        if self.resent_share is not None:
            lines.append(f"{self.resent_share:.1%} of the rows looked up ahead were sent again")
        return "\n".join(lines)
