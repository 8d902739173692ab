"""Folders of checkpoints: paths, unfinished and removed ones, errors, and orbax's logging."""

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import PurePath
from typing import Any

from .._support.checks import warn_user
from .._support.extras import needed_by
from .._support.files import COMMITTED, can_rename

# The extra `train` installs all of these; the other files of this package import them from here.
with needed_by("jaxslowmo.checkpoint"):
    import orbax.checkpoint as ocp  # noqa: F401
    from etils import epath
    from safetensors import deserialize  # noqa: F401
    from safetensors import numpy as safetensors  # noqa: F401

ARRAYS, RECORD = "state", "record"  # the two items of a checkpoint
# Orbax's suffix of incomplete checkpoints: its tools ignore such folders.
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or used; the message says what can be done.

    Attributes:
      errno: number of the operating system's error that caused it, on any process; None if there
        was none.
      reason: the cause alone, without its consequences and what can be done.
      older_step: step of an older checkpoint that `fallback=True` would restore, if this one cannot
        be read; None otherwise.
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
    """Raised if files are missing, truncated or from another library; an older one may be whole."""


class UnansweredError(CheckpointError):
    """Raised if another process did not answer in time; the checkpoint may be complete or not."""


def resolve_path(folder: str | PathLike[str]) -> epath.Path:
    """Return an absolute path, or an address such as `gs://...` unchanged.

    Raises:
      ValueError: something else.
    """
    if not isinstance(folder, str | PathLike):
        raise ValueError(f"`folder` must be a path or an address, got {folder!r}.")
    path = epath.Path(folder)
    return path if "://" in str(folder) else epath.Path(os.path.abspath(path.expanduser()))


def unfinished_path(target: epath.Path, number: int) -> epath.Path:
    """Return the path of a folder until it is complete; on object stores it is `target` itself.

    Threads of a failed write may still be writing, so each write needs another `number`.
    """
    if not can_rename(target):
        return target
    return target.parent / f"{target.name}.{number}{UNFINISHED}"


def commit_folder(folder: epath.Path, target: epath.Path) -> None:
    """Make a complete folder visible as `target`, and remove the folder that it replaces."""
    if not can_rename(target):
        (target / COMMITTED).write_text("")
        return
    # Removed before the other has its name, a kill in between would leave neither.
    replaced = rename_unique(target, "removed", UNFINISHED) if target.exists() else None
    folder.rename(target)
    if replaced is not None:
        remove(replaced)


def rename_unique(path: epath.Path, what: str, end: str = "") -> epath.Path:
    """Rename a folder to its name, `what`, a number if needed, and `end`; return the new path."""
    paths = (path.parent / f"{path.name}.{what}{n or ''}{end}" for n in itertools.count())
    return path.rename(next(new for new in paths if not new.exists()))


def remove(path: epath.Path) -> None:
    """Remove a folder, under the name of an unfinished one: a part of it must be no checkpoint.

    A folder that cannot be removed, for example because another program reads its files on a file
    server, does no harm, so it is only a warning.
    """
    try:
        if can_rename(path) and not path.name.endswith(UNFINISHED):
            path = rename_unique(path, "removed", UNFINISHED)
        path.rmtree()
    except OSError as error:
        warn_user(f"{path}, of no use any more, could not be removed: {error}.")


def remove_partial_writes(folder: epath.Path, prefix: str = "") -> None:
    """Remove folders that interrupted saves and removals have left."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.name.startswith(prefix) and path.name.endswith(UNFINISHED):
            remove(path)


def files_below(path: epath.Path) -> Iterator[tuple[str, int]]:
    """Yield path and size in bytes of every file; files that vanish are left out."""
    for folder, _, names in path.walk():
        for file in (folder / name for name in names):
            with contextlib.suppress(OSError):
                yield os.fspath(file), file.stat().length


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in PurePath(record.pathname).parts


def _is_not_about_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()


def quiet_orbax() -> None:
    """Drop what orbax logs: it logs every file that it touches.

    Records of other users of the same logger are kept. Orbax's errors are dropped, too: it logs a
    save that fails in the background with its stack, and the next `save`, `wait` or `close` raises
    it anyway. If one of several arrays cannot be written, each of the others reports, with its
    stack, that the event loop is closed. These reports are dropped as well.
    """
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_not_from_orbax in logger.filters:
        return
    logger.addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_about_orbax)
    previous_hook = sys.unraisablehook

    def ignore_closed_loops(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    sys.unraisablehook = ignore_closed_loops
