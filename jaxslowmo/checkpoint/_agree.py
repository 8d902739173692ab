"""What the processes of a run tell each other about a checkpoint: by notes, with a limit.

Not by exchanges of devices or barriers: a process that fails on the way to one would leave all
others waiting there, and a note says what went wrong besides.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from .._coordinator import NoNoteError, forget, tell, wait_for
from ._folder import UnansweredError

Waiting = Callable[[str], str]
"""Gives the note under a key."""

_numbers = itertools.count()
_PREFIX = "jaxslowmo/checkpoint"


def new_topic() -> str:
    """A key for notes of one occasion; all processes ask in the same order."""
    number = next(_numbers)
    if number >= 2 and jax.process_count() > 1 and jax.process_index() == 0:
        # All that are asking for this one have read what came before the last.
        forget(f"{_PREFIX}/{number - 2}")
    return f"{_PREFIX}/{number}"


def waiting(seconds: float) -> Waiting:
    """Waits so long for a note.

    It raises `UnansweredError`.
    """

    def wait(key: str) -> str:
        try:
            return wait_for(key, seconds)
        except NoNoteError as error:
            raise unanswered(seconds) from error

    return wait


def unanswered(seconds: float) -> UnansweredError:
    """No process has told anything, nor written, for so long."""
    return UnansweredError(f"another process has not answered for {seconds:g} s.")


def gather(own: Any, seconds: float) -> list[Any]:
    """Plain JSON of every process, by its number.

    Raises:
      UnansweredError: one does not answer for so many seconds.

    Communication: none with one process; else two messages of each process to the coordinator, and
      the answer.
    """
    if jax.process_count() == 1:
        return [own]
    return gather_notes(new_topic(), own, waiting(seconds))


def gather_notes(topic: str, own: Any, wait: Waiting) -> list[Any]:
    """As `gather`, about a topic that all know."""
    index, count = jax.process_index(), jax.process_count()
    tell(f"{topic}/{index}", json.dumps(own))
    if index == 0:
        found = [json.loads(wait(f"{topic}/{i}")) for i in range(count)]
        tell(f"{topic}/all", json.dumps(found))
        return found
    return json.loads(wait(f"{topic}/all"))


def of_first_process(value: Any, seconds: float) -> Any:
    """Process 0's plain JSON, on all processes.

    Process 0 waits, too: if it ran ahead, it would forget notes that others have not read.

    Raises:
      UnansweredError: one does not answer for so many seconds.

    Communication: that of `gather`.
    """
    return gather(value if jax.process_index() == 0 else None, seconds)[0]
