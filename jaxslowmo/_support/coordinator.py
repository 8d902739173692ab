"""Notes that processes leave for each other at the coordinator of `jax.distributed`.

An exchange between devices waits for all of them, and for ever where one does not come. A note does
not: who reads it says how long it waits. So what goes wrong on one process travels by notes.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import jax

# A call into the runtime that is never returned from would abort the process at its end.
_SLICE_SECONDS = 1.0


class NoNoteError(RuntimeError):
    """A note that somebody waited for did not come in time."""


def tell(key: str, text: str) -> bool:
    """Leave a note for all processes; the first under a key stays.

    Args:
      key: of the note; parts are divided by "/".
      text: at most some 100 kB.

    Returns:
      Whether there was none yet.

    Communication: one message to the coordinator, of the note's length.
    """
    try:
        _client().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def told(key: str) -> str | None:
    """The note under a key; None where there is none yet.

    Communication: one message to the coordinator and its answer.
    """
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait_for(key: str, seconds: float) -> str:
    """The note under a key, once it is there.

    Raises:
      NoNoteError: it has not come in time.

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
            raise NoNoteError(f"no note {key} within {seconds:g} s")


def gather_notes(key: str, text: str, processes: Sequence[int], seconds: float) -> list[str]:
    """What each of some processes has to say, in their order, on all of them.

    Args:
      key: of this occasion.
      text: of this process, at most some kB.
      processes: their numbers, alike on all of them.
      seconds: how long to wait for each.

    Raises:
      NoNoteError: one has not said anything in time.

    Communication: two messages of each process to the coordinator, and the answer.
    """
    first, here = processes[0], jax.process_index()
    if here != first:
        tell(f"{key}/{here}", text)
        return json.loads(wait_for(f"{key}/all", seconds))
    found = [text if i == here else wait_for(f"{key}/{i}", seconds) for i in processes]
    tell(f"{key}/all", json.dumps(found))
    return found


def forget(key: str) -> None:
    """Remove the note under a key, and all below it.

    Communication: one message to the coordinator.
    """
    _client().key_value_delete(key)


def _client() -> Any:
    # jax has no public name for it; orbax takes it from here, too.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "processes that train together must be joined by jax.distributed.initialize() first"
        )
    return client
