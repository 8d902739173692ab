"""The ends of commands: exit codes, and errors that print one line about a wrong call.

Every file of the command line may import this one, since it needs no installed package.
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
INTERRUPTED = 130  # the code that shells report for a program that SIGINT ended
TERMINATED = 143  # the code that shells report for SIGTERM
# After one of these another start would end in the same way, or is not wanted.
FINAL = frozenset({0, FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED})
# Exit codes by the status of a run; a run that SIGTERM preempts ends well.
EXIT_CODES = {"finished": 0, "preempted": 0, "diverged": DIVERGED, "interrupted": INTERRUPTED}

# Arguments of the library whose options have other names.
_OPTIONS = {
    "batch_size": "batch", "bucket_bytes": "bucket_mib", "num_nodes": "replicas",
    "num_stages": "mesh", "num_microbatches": "microbatches", "num_chunks": "chunks",
    "rules": "mesh", "num_heads": "preset", "url": "islands",
}  # fmt: skip


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
    return TRY_AGAIN if io_errno(error) in PASSING else FAILED


def describe(error: BaseException) -> str:
    """Return one line about an error that is no `CommandError`: its type and its message."""
    number = io_errno(error)
    text = " ".join(str(error).split())[:300]
    if number is not None and os.strerror(number) not in text:
        text = f"{os.strerror(number)} ({text})"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def usage_errors(**options: str) -> Iterator[None]:
    """Run the block, and turn a `ValueError` about an argument into a `CommandError`.

    Its message has options for arguments of the library: --num-rounds for `num_rounds`. Use it only
    for set-up: a `ValueError` during training is a bug and keeps its traceback.

    Args:
      **options: maps an argument to its option, where their names differ.
    """
    names = _OPTIONS | options
    try:
        yield
    except ValueError as error:
        text = re.sub(r"`(\w+)`", lambda match: as_flag(names.get(match[1], match[1])), str(error))
        raise CommandError(text) from error


@contextlib.contextmanager
def island_errors() -> Iterator[None]:
    """Run the block, and turn an error about the run of islands into a `CommandError`."""
    from jaxslowmo.islands import IslandsError, StoreError  # needs an extra

    try:
        yield
    except IslandsError as error:
        code = TRY_AGAIN if isinstance(error, StoreError) else USAGE_ERROR
        raise CommandError(str(error).replace("`sync_every`", "--slow-every"), code) from error


def as_flag(name: str) -> str:
    """Return the option for a name, such as --num-rounds for "num_rounds"."""
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def file_errors(flag: str, verb: str, path: Path) -> Iterator[None]:
    """Run the block, and turn an `OSError` about the file of an option into a `CommandError`.

    Args:
      flag: option that names the file.
      verb: "read" or "write".
      path: path of the file.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(f"{flag}: cannot {verb} {path}: {error.strerror}") from None
    except UnicodeError:
        raise CommandError(f"{flag}: {path} is no text") from None


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Run the block, and turn an `OSError` about the folder for results into a `CommandError`."""
    try:
        yield
    except OSError as error:
        code = TRY_AGAIN if error.errno in PASSING else USAGE_ERROR
        what = f"--out must be a folder to write to, {out}: {error.strerror}"
        raise CommandError(what, code) from None
