"""What the processes of a run tell each other about a checkpoint: by notes, with a limit.

Not by exchanges of devices or barriers: a process that fails on the way to one would leave all
others waiting there, and a note says what went wrong besides.
"""

import itertools
import json
from typing import Any

import jax

from .._support.coordinator import NoNoteError, forget, gather_notes, wait_for
from ._folder import UnansweredError

_numbers = itertools.count()
_PREFIX = "jaxslowmo/checkpoint"


def new_topic() -> str:
    """A key for notes of one occasion; all processes ask in the same order."""
    number = next(_numbers)
    if number >= 2 and jax.process_count() > 1 and jax.process_index() == 0:
        # All that are asking for this one have read what came before the last.
        forget(f"{_PREFIX}/{number - 2}")
    return f"{_PREFIX}/{number}"


def answer(key: str, seconds: float) -> str:
    """The note under a key, once it is there.

    Raises:
      UnansweredError: it has not come within so many seconds.
    """
    try:
        return wait_for(key, seconds)
    except NoNoteError as error:
        raise unanswered(seconds) from error


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
    everyone = range(jax.process_count())
    try:
        notes = gather_notes(new_topic(), json.dumps(own), everyone, seconds)
    except NoNoteError as error:
        raise unanswered(seconds) from error
    return [json.loads(note) for note in notes]


def of_first_process(value: Any, seconds: float) -> Any:
    """Process 0's plain JSON, on all processes.

    Process 0 waits, too: if it ran ahead, it would forget notes that others have not read.

    Raises:
      UnansweredError: one does not answer for so many seconds.

    Communication: that of `gather`.
    """
    return gather(value if jax.process_index() == 0 else None, seconds)[0]
