"""How commands end: exit codes, and one line that says what to do about a wrong call.

Everything of the command line imports this file, which needs nothing that is installed.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .._support.files import PASSING, io_errno

FAILED = DIVERGED = 1
USAGE_ERROR = 2
LOST_A_PROCESS = TRY_AGAIN = 75  # EX_TEMPFAIL
INTERRUPTED = 130  # as shells say of a program that SIGINT ended
TERMINATED = 143  # likewise of SIGTERM
# A start after one of these would end like it, or was not asked for.
FINAL = frozenset({0, FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED})
# By how a run ended; SIGTERM, which preempts, lets it end well.
EXIT_CODES = {"finished": 0, "preempted": 0, "diverged": DIVERGED, "interrupted": INTERRUPTED}

# Arguments of the library whose options are called otherwise.
_OPTIONS = {
    "batch_size": "batch", "bucket_bytes": "bucket_mib", "num_nodes": "replicas",
    "num_stages": "mesh", "num_microbatches": "microbatches", "num_chunks": "chunks",
}  # fmt: skip


class CommandError(Exception):
    """Ends the command with its message as the only line on stderr.

    Attributes:
      code: the exit code.
    """

    def __init__(self, message: str, code: int = USAGE_ERROR):
        super().__init__(" ".join(message.split()))
        self.code = code


def code_of(error: BaseException) -> int:
    """The exit code for an error that nothing has handled.

    75 for a disk or a file server that does not answer or is full (EIO, ENOSPC, ESTALE, ETIMEDOUT),
    that of a `CommandError`, 1 for all others.
    """
    if isinstance(error, CommandError):
        return error.code
    return TRY_AGAIN if io_errno(error) in PASSING else FAILED


def describe(error: BaseException) -> str:
    """One line on an error that is no wrong call: what it is and what it says."""
    number = io_errno(error)
    said = " ".join(str(error).split())[:300]
    if number is not None and os.strerror(number) not in said:
        said = f"{os.strerror(number)} ({said})"
    return said if isinstance(error, OSError) else f"{type(error).__name__}: {said}"


@contextlib.contextmanager
def usage_errors(**own: str) -> Iterator[None]:
    """Turns a `ValueError` of the library about an argument into a `CommandError`.

    Only around set-up: a `ValueError` during training is a bug and keeps its traceback.

    Args:
      **own: as for `in_options`.
    """
    try:
        yield
    except ValueError as error:
        raise CommandError(in_options(str(error), **own)) from error


def in_options(text: str, **own: str) -> str:
    """What the library says of its arguments, said of options: `num_rounds` is --num-rounds.

    Args:
      text: names arguments in backticks.
      **own: by arguments, the options of the command where they are called otherwise.
    """
    names = _OPTIONS | own
    return re.sub(r"`(\w+)`", lambda match: as_flag(names.get(match[1], match[1])), text)


def as_flag(name: str) -> str:
    """Return the option of a name: --num-rounds of "num_rounds"."""
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def file_errors(flag: str, verb: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` about the file that an option names into a `CommandError`.

    Args:
      flag: the option.
      verb: "read" or "write".
      path: of the file.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(f"{flag}: cannot {verb} {path}: {error.strerror}") from None


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn an `OSError` about the folder for results into a `CommandError` that names it."""
    try:
        yield
    except OSError as error:
        code = TRY_AGAIN if error.errno in PASSING else USAGE_ERROR
        what = f"--out must be a folder to write to, {out}: {error.strerror}"
        raise CommandError(what, code) from None
