"""What became of the other processes, read from what the runtime printed before it aborted."""

import itertools
import re
from collections.abc import Sequence

# The coordination service of jax lists the ids below this line.
_SILENT = "tasks are unhealthy"
# One that was started again before the others had noticed that it was gone.
_RESTARTED = re.compile(r"(\d+) unexpectedly tried to connect with a different incarnation")
_FATAL = "JAX distributed service detected fatal errors"
_JOINING = "CoordinationService/RegisterTask"


def describe_loss(lines: Sequence[str]) -> str | None:
    """What happened to the other processes, in words; None if the text tells of nothing.

    Args:
        lines: what a survivor wrote to stderr.
    """
    found: set[int] = set()
    for line, below in itertools.pairwise(lines):
        if _SILENT in line and re.fullmatch(r"[\s\d,]+", below):
            found.update(int(number) for number in re.findall(r"\d+", below))
    found.update(int(number) for line in lines for number in _RESTARTED.findall(line))
    if not found and not any(_FATAL in line for line in lines):
        return None
    if any(_JOINING in line for line in lines):
        return "not all processes came together within --startup-timeout"
    # Process 0 serves the coordination: an error without a list means that it is the one.
    return f"{_name(sorted(found) or [0])} died or cannot be reached"


def _name(ids: Sequence[int]) -> str:
    """As "process 2", "processes 1 and 3"."""
    if len(ids) == 1:
        return f"process {ids[0]}" + (" (the coordinator)" if ids[0] == 0 else "")
    return f"processes {', '.join(map(str, ids[:-1]))} and {ids[-1]}"
