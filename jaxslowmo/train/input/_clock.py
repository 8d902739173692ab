"""How long the host spends on a stage, and where a profiler finds it."""

import time
from collections.abc import Callable
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
