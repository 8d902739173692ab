"""Notes that processes leave for each other at the coordinator of `jax.distributed`.

An exchange between devices waits forever if one device does not take part. The reader of a note
sets a time limit instead. So processes report errors to each other by notes.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import jax

from .private_jax import coordinator_client

# A process that exits during a call into the runtime is aborted, so each call waits only this long.
_SLICE_SECONDS = 1.0


class NoNoteError(RuntimeError):
    """The error that a note did not arrive in time."""


def write_note(key: str, text: str) -> bool:
    """Leave a note for all processes, unless there is one under that key already.

    Args:
      key: key of the note; its parts are separated by "/".
      text: text of the note, at most about 100 kB.

    Returns:
      Whether the note was stored: False if there was one already.

    Communication: one message to the coordinator, of the note's length.
    """
    try:
        _client().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def read_note(key: str) -> str | None:
    """Return the note under a key, or None if there is none yet.

    Communication: one message to the coordinator and its answer.
    """
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait_for_note(key: str, seconds: float, process: int | None = None) -> str:
    """Wait for the note under a key, and return it.

    Args:
      key: key of the note.
      seconds: how long to wait.
      process: index of the process that leaves it, for the error; None: not known.

    Raises:
      NoNoteError: the note did not arrive in time.

    Communication: one message to the coordinator per second, and the note.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            milliseconds = max(1, int(1000 * min(left, _SLICE_SECONDS)))
            return _client().blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() >= deadline:
            who = f"note {key}" if process is None else f"answer of process {process}"
            raise NoNoteError(f"no {who} within {seconds:g} s")


def gather_notes(key: str, text: str, processes: Sequence[int], seconds: float) -> list[str]:
    """Return the notes of several processes, in the order of `processes`, on all of them.

    Args:
      key: key of this exchange of notes.
      text: note of this process, at most a few kB.
      processes: indices of the processes, equal on all of them.
      seconds: how long to wait for each note.

    Raises:
      NoNoteError: the note of a process did not arrive in time.

    Communication: two messages of each process to the coordinator, and the answer.
    """
    first, index = processes[0], jax.process_index()
    if index != first:
        write_note(f"{key}/{index}", text)
        return json.loads(wait_for_note(f"{key}/all", seconds, first))
    notes = [text if i == index else wait_for_note(f"{key}/{i}", seconds, i) for i in processes]
    write_note(f"{key}/all", json.dumps(notes))
    return notes


def delete_notes(key: str) -> None:
    """Remove the note under a key, and all notes under keys that start with it.

    Communication: one message to the coordinator.
    """
    _client().key_value_delete(key)


def _client() -> Any:
    client = coordinator_client()
    if client is None:
        raise RuntimeError(
            "processes that train together must be joined by jax.distributed.initialize() first"
        )
    return client
