"""Wait for events, not for time: a busy machine takes as long as it needs."""

import time
from collections.abc import Callable

# The limit for anything that must come at all: reached only where it never comes.
PATIENCE_SECONDS = 300.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Return once `condition()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still false after {seconds} s"
        time.sleep(0.005)
