"""Which process of a run was lost, read from what the runtime printed before it aborted."""

import itertools
import re
from collections.abc import Sequence

# The coordination service of jax lists the ids below this line.
_SILENT = "tasks are unhealthy"
_FATAL = "JAX distributed service detected fatal errors"


def lost_processes(lines: Sequence[str]) -> tuple[int, ...]:
    """Ids of the processes that stopped answering, ascending; () if the text tells of none.

    Process 0 serves the coordination: an error without a list means that it is the one.

    Args:
        lines: what a survivor wrote to stderr.
    """
    found: set[int] = set()
    for line, below in itertools.pairwise(lines):
        if _SILENT in line and re.fullmatch(r"[\s\d,]+", below):
            found.update(int(number) for number in re.findall(r"\d+", below))
    if not found and any(_FATAL in line for line in lines):
        found.add(0)
    return tuple(sorted(found))


def name_processes(ids: Sequence[int]) -> str:
    """As "process 2", "processes 1 and 3", "another process"."""
    if not ids:
        return "another process"
    if len(ids) == 1:
        return f"process {ids[0]}" + (" (the coordinator)" if ids[0] == 0 else "")
    return f"processes {', '.join(map(str, ids[:-1]))} and {ids[-1]}"
