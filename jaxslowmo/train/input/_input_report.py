"""What the stages of an input pipeline took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


class Clock:
    """Counts and times calls; in a trace of the jax profiler they are `jaxslowmo.input/NAME`.

    Args:
      name: of the stage.

    Attributes:
      name: of the stage.
      count: calls that returned.
      seconds: of all calls together.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seconds = 0.0

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, timed.

        Raises:
          RuntimeError: for a StopIteration, which would look like the end of the batches.
        """
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(f"jaxslowmo.input/{self.name}"):
                found = fn(*args)
        except StopIteration as error:
            raise RuntimeError(f"{self.name} of a pipeline raised StopIteration") from error
        finally:
            self.seconds += time.perf_counter() - began
        self.count += 1
        return found


@dataclass(frozen=True)
class InputStageTimes:
    """One stage of a pipeline, in seconds of the host.

    Attributes:
      name: "load", "place", the name of a stage of the user's, or "step".
      batches: that went through it.
      busy_seconds: in the iterator for "load"; for the others in the call, which starts the work on
        the devices and need not wait for it.
      idle_seconds: the rest of the time since the pipeline began.
    """

    name: str
    batches: int
    busy_seconds: float
    idle_seconds: float


@dataclass(frozen=True)
class InputPipelineReport:
    """What a pipeline did since its first call, in seconds of the host.

    The thread that trains is in the stages (but for "load"), waits for a batch, or is the caller's.

    Attributes:
      stages: in their order, "load" first and "step" last.
      batches: that came out of it.
      held: that are prepared and wait for their turn.
      seconds: from the first call to the end of the last.
      waiting_seconds: calls waited for a batch to be loaded.
      caller_seconds: between calls. Where the caller reads a result, that waits for the devices.
      resent_share: with `mode="patched"`, of the rows that batches asked the tables for the part
        that was sent again, since the step before has changed them; None without.
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
        """What most of the time went to: "load", the name of a later stage, or "caller"."""
        spent = {s.name: s.busy_seconds for s in self.stages if s.name != "load"}
        spent |= {"load": self.waiting_seconds, "caller": self.caller_seconds}
        return max(spent, key=lambda name: spent[name])

    def __str__(self) -> str:
        """As a table."""
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
