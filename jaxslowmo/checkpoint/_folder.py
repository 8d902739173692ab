"""The folder of a run: where it is, and what is complete in it."""

import itertools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from errno import ETIMEDOUT
from os import PathLike
from pathlib import PurePath
from typing import Any

import jax

from .._support.checks import warn_user
from .._support.extras import needed_by
from .._support.files import can_rename

# All of which the extra `train` brings; the other files of this package take them from here.
with needed_by("jaxslowmo.checkpoint"):
    import orbax.checkpoint as ocp
    import tensorstore as ts  # noqa: F401
    from etils import epath

ARRAYS, RECORD = "state", "record"  # the two items of a checkpoint
# What orbax calls a checkpoint that is not complete: its own tools leave such folders alone.
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used: which one, what is wrong, and what can be done.

    Attributes:
      errno: the number of the operating system's error that it came from, on whichever process;
        None if of none.
      reason: what went wrong, without what it means and what can be done.
      older_step: of a checkpoint that cannot be read, the step of the one before it, which
        `fallback=True` takes; None without one.
    """

    def __init__(
        self,
        message: str,
        errno: int | None = None,
        reason: str | None = None,
        older_step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno, self.reason = errno, message if reason is None else reason
        self.older_step = older_step


class UnreadableError(CheckpointError):
    """Files are missing, cut short or not of this library: an older checkpoint may do."""


class UnansweredError(CheckpointError):
    """Another process did not answer in time: what became of the checkpoint is not known."""

    def __init__(
        self, message: str, errno: int | None = ETIMEDOUT, reason: str | None = None
    ) -> None:
        super().__init__(message, errno, reason)


def resolved(folder: str | PathLike[str]) -> epath.Path:
    """An absolute path, or an address such as `gs://...` as it is."""
    path = epath.Path(folder)
    return path if "://" in str(folder) else epath.Path(os.path.abspath(path.expanduser()))


def processes() -> ocp.options.MultiprocessingOptions:
    """All processes, by number."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jaxslowmo"
    )


def set_aside(folder: epath.Path, steps: Iterable[int]) -> None:
    """Rename checkpoints, so that nothing takes them for one."""
    for step in sorted(steps):
        path = folder / str(step)
        names = (f"{step}.set-aside{n or ''}" for n in itertools.count())
        target = next(folder / name for name in names if not (folder / name).exists())
        if path.exists():
            path.rename(target)


def put_away(path: epath.Path) -> epath.Path:
    """Rename what is to be removed: removed by half, it must not be taken for a checkpoint.

    Returns:
      Where it is.
    """
    if not can_rename(path):
        return path
    names = (f"{path.name}.removed{n or ''}{UNFINISHED}" for n in itertools.count())
    return path.rename(
        next(path.parent / name for name in names if not (path.parent / name).exists())
    )


def remove(path: epath.Path) -> None:
    """Remove a checkpoint; one that is removed by half is not taken for a whole one."""
    put_away(path).rmtree()


def remove_unfinished(folder: epath.Path, prefix: str = "") -> None:
    """Remove what writing and removing have left that were interrupted.

    What cannot be removed, as files that another program reads on a file server, is a warning: it
    is in nobody's way.
    """
    for path in folder.iterdir() if folder.exists() else ():
        if path.name.startswith(prefix) and path.name.endswith(UNFINISHED):
            try:
                path.rmtree()
            except OSError as error:
                warn_user(f"{path}, of no use any more, could not be removed: {error}.")


def files_below(path: epath.Path) -> Iterator[tuple[str, int]]:
    """Path relative to this one, and bytes, of every file; those that vanish are left out."""
    try:
        children = sorted(path.iterdir())
    except OSError:
        return
    for child in children:
        try:
            if child.is_dir():
                yield from ((f"{child.name}/{name}", size) for name, size in files_below(child))
            else:
                yield child.name, child.stat().length
        except OSError:
            continue


def _is_foreign(record: logging.LogRecord) -> bool:
    return "orbax" not in PurePath(record.pathname).parts


def _is_not_about_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()


def quiet_orbax() -> None:
    """Drop what orbax logs: it names every file that it touches, which no terminal needs.

    Other users of the same logger keep theirs. Its errors go, too: a save that fails in the
    background is logged with its stack, and raised by the next `save`, `wait` or `close`. And where
    one array of several cannot be written, the others answer to nobody, each with a stack.
    """
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_foreign in logger.filters:
        return
    logger.addFilter(_is_foreign)
    logging.getLogger("asyncio").addFilter(_is_not_about_orbax)
    before = sys.unraisablehook

    def all_but_late_answers(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = all_but_late_answers
