"""`Notes`: what the processes tell each other, so that a failure on one is raised on all.

Notes go through the coordinator and have a time limit. With collectives or barriers all others
would wait for a process that fails. (`orbax.checkpoint.CheckpointManager` waits: if one process
cannot write its part, all of them raise an error about a barrier when `timeout_secs` are over, ten
minutes by default, and none but that process knows the reason. So this package does not use it.)
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from errno import ETIMEDOUT
from typing import Any

import jax

from .._support.coordinator import NoNoteError, delete_notes, gather_notes
from .._support.files import io_errno
from ._arrays import first_line
from ._folder import CheckpointError, UnansweredError, epath

_numbers = itertools.count()
# The interval at which a waiting process checks whether anything is being written.
_LOOK_SECONDS = 5.0
Failure = Sequence[Any] | None
"""A failure in a note: the reason in words, and the operating system's error number or None."""


class Notes:
    """Values that all processes tell each other, one after the other.

    All processes call the methods of these objects in the same order. They need not make the same
    objects: one process alone may look into a folder.

    Args:
      seconds: time in seconds to wait for other processes while nothing is being written.

    Attributes:
      count: number of exchanges so far.
    """

    def __init__(self, seconds: float) -> None:
        self._key, self._seconds = "", seconds
        self.count = 0

    def gather(self, value: Any, bytes_written: Callable[[], int] = lambda: 0) -> list[Any]:
        """Return the `value`, plain JSON, of every process in the order of their numbers.

        Args:
          value: value of this process, of at most a few kB as JSON.
          bytes_written: returns the bytes that are written so far; while they change, this waits.

        Raises:
          UnansweredError: a process does not answer.

        Communication: none with one process; else two messages of each process to the coordinator,
          and the answer.
        """
        self.count += 1
        if jax.process_count() == 1:
            return [value]
        # Numbered at the first exchange, which all processes make.
        self._key = self._key or f"jaxslowmo/checkpoint/{next(_numbers)}"
        if self.count > 2 and jax.process_index() == 0:
            # Every process that took part in the last exchange has read all notes before it.
            delete_notes(f"{self._key}/{self.count - 2}")
        processes, text = range(jax.process_count()), json.dumps(value)
        seconds = min(_LOOK_SECONDS, self._seconds)
        before, since = -1, time.monotonic()
        while True:
            try:
                notes = gather_notes(f"{self._key}/{self.count}", text, processes, seconds)
                return [json.loads(note) for note in notes]
            except NoNoteError as error:
                if (now := bytes_written()) != before:
                    before, since = now, time.monotonic()
                elif time.monotonic() - since > self._seconds:
                    raise UnansweredError(
                        f"another process has not answered for {self._seconds:g} s.", ETIMEDOUT
                    ) from error

    def raise_on_all(self, failure: Failure, bytes_written: Callable[[], int] = lambda: 0) -> None:
        """Raise process 0's failure, if it has one, on all processes.

        Raises:
          CheckpointError: the failure.
          UnansweredError: a process does not answer.
        """
        if found := self.gather(failure, bytes_written)[0]:
            text, number = found
            raise CheckpointError(text, errno=number)


def catch_failure(work: Callable[..., Any], *args: Any) -> Failure:
    """Call `work`, and return its failure, which the other processes must learn."""
    try:
        work(*args)
    except Exception as error:  # tensorstore raises many kinds
        number = io_errno(error)
        if isinstance(error, CheckpointError):
            return [str(error), number]
        text = f"{type(error).__name__}: {first_line(error)}"
        if number is not None:
            file = getattr(error, "filename", None)
            text = os.strerror(number) + (f": {file}" if file else "")
        is_alone = jax.process_count() == 1
        return [text if is_alone else f"process {jax.process_index()}: {text}", number]
    return None


@contextlib.contextmanager
def explain_write_errors(path: epath.Path, what: str, rest: str = "") -> Iterator[None]:
    """Say in an error of this block what could not be written, why, and what can be done."""
    try:
        yield
    except Exception as error:
        kind, reason = CheckpointError, f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, CheckpointError):
            kind, reason = type(error), str(error)
        number, what = io_errno(error), f"{what} could not be written"
        advice = "" if number is None else " Is there space, and may this user write there?"
        message = f"{path}: {what} ({reason}){rest}.{advice}"
        raise kind(message, number, f"{what}: {reason}") from error
