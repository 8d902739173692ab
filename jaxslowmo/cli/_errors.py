"""The ends of commands: exit codes, and errors that print one line.

Every file of the command line may import this one, since it needs no installed package.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .._support.files import TRANSIENT_ERRORS, io_errno

FAILED = DIVERGED = 1
USAGE_ERROR = 2
LOST_A_PROCESS = TRY_AGAIN = 75  # EX_TEMPFAIL
TOO_LATE = 76  # tells the parent of a process that not all processes came together in time
INTERRUPTED = 130  # the code that shells report for a program that SIGINT ended
TERMINATED = 143  # the code that shells report for SIGTERM
# After one of these another start would end in the same way, or is not wanted.
FINAL = frozenset({0, FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED})
# Exit codes by the status of a run; a run that SIGTERM preempts ends well.
EXIT_CODES = {"finished": 0, "preempted": 0, "diverged": DIVERGED, "interrupted": INTERRUPTED}


class CommandError(Exception):
    """An error that ends the command, with its message as the only line on stderr.

    Attributes:
      code: the exit code.
    """

    def __init__(self, message: str, code: int = USAGE_ERROR):
        super().__init__(" ".join(message.split()))
        self.code = code


def code_of(error: BaseException) -> int:
    """Return the exit code for an error that nothing has handled.

    It is the code of a `CommandError`; 75 for a disk or a file server that does not answer or is
    full (EIO, ENOSPC, ESTALE, ETIMEDOUT); 1 for all others.
    """
    if isinstance(error, CommandError):
        return error.code
    return TRY_AGAIN if io_errno(error) in TRANSIENT_ERRORS else FAILED


def describe(error: BaseException) -> str:
    """Return one line about an error; its type, too, unless it is one for users."""
    if isinstance(error, CommandError):
        return str(error)
    number = io_errno(error)
    text = " ".join(str(error).split())[:300]
    if number is not None and os.strerror(number) not in text:
        text = f"{os.strerror(number)} ({text})"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def island_errors() -> Iterator[None]:
    """Run the block, and turn an error about the run of islands into a `CommandError`."""
    from jaxslowmo.islands import IslandsError, StoreError  # needs an extra

    try:
        yield
    except IslandsError as error:
        code = TRY_AGAIN if isinstance(error, StoreError) else USAGE_ERROR
        raise CommandError(f"--islands: {error}", code) from error


@contextlib.contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Run the block, and turn an `OSError` about the folder for results into a `CommandError`."""
    try:
        yield
    except OSError as error:
        code = TRY_AGAIN if error.errno in TRANSIENT_ERRORS else USAGE_ERROR
        what = f"--out must be a folder to write to, {out}: {error.strerror}"
        raise CommandError(what, code) from None
