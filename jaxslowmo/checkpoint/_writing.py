"""Folders that all processes write together, and the notes by which they agree.

Notes go through the coordinator and have a time limit. With collectives or barriers all others
would wait for a process that fails. (`orbax.checkpoint.CheckpointManager` waits: if one process
cannot write its part, all of them raise an error about a barrier when `timeout_secs` are over, ten
minutes by default, and none but that process knows the reason. So this package does not use it.)
"""

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ETIMEDOUT
from typing import Any

import jax

from .._support.checks import warn_user
from .._support.coordinator import NoNoteError, delete_notes, gather_notes
from .._support.files import COMMITTED, can_rename, io_errno
from ._record import (
    ARRAYS,
    RECORD,
    CheckpointError,
    UnansweredError,
    epath,
    first_line,
    make_handler,
    ocp,
)

# Orbax's suffix of incomplete checkpoints: its tools ignore such folders.
UNFINISHED = ".orbax-checkpoint-tmp"
# The interval at which a waiting process checks whether anything is being written.
_LOOK_SECONDS = 5.0
# How often, and at which interval, the processes list files until all see the same: together longer
# than an NFS client caches a listing by default.
_LISTINGS, _LISTING_SECONDS = 100, 0.7
_numbers = itertools.count()
Failure = Sequence[Any] | None
"""A failure in a note: the reason in words, and the operating system's error number or None."""


# What processes tell each other.


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
            raise CheckpointError(*found)


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


# A folder that appears complete or not at all.


class FolderWrite:
    """A folder that is being written, in a thread that the constructor starts.

    The constructor returns when the arrays may be changed or donated. All processes must construct
    it with the same arguments. Process 0 makes the folder, under another name; each process writes
    its parts with orbax; when all processes see all files, process 0 renames the folder.

    Args:
      target: path of the folder; an existing folder is replaced when the new one is complete.
      arrays: dict of jax arrays.
      record: plain JSON to write next to the arrays; process 0's is written.
      notes: the notes by which the processes agree.
      on_start: function that process 0 calls before it makes the folder.
      on_complete: function that process 0 calls once the folder has its name; its errors become
        warnings.

    Raises:
      CheckpointError: the folder cannot be made; on all processes.
      UnansweredError: a process does not answer.

    Communication: with several processes four exchanges of notes, or more on file servers.
    """

    def __init__(
        self,
        target: epath.Path,
        arrays: dict[str, Any],
        record: dict[str, Any],
        notes: Notes,
        *,
        on_start: Callable[[], None],
        on_complete: Callable[[], None],
    ) -> None:
        self._target, self._record, self._notes = target, record, notes
        self._on_complete = on_complete
        self._folder = unfinished_path(target, notes.count)
        self._handler = make_handler((jax.Array, ocp.type_handlers.ArrayHandler()))
        self._is_first = jax.process_index() == 0
        with self._explain_errors():
            notes.raise_on_all(
                catch_failure(self._make_folder, on_start) if self._is_first else None
            )
        copied = threading.Event()
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._run = pool.submit(self._write, arrays, copied)
        pool.shutdown(wait=False)
        atexit.register(self._at_exit)
        copied.wait()

    @property
    def failure(self) -> Any:
        """The error of the write; None without one, or while it is in progress."""
        return self._run.exception() if self._run.done() else None

    def bytes_written(self) -> int:
        """Return how many bytes all processes have written to the unfinished folder."""
        return sum(size for _, size in files_below(self._folder))

    def result(self) -> None:
        """Wait until the folder is complete.

        Raises:
          CheckpointError: it could not be written; on all processes.
          UnansweredError: another process does not answer.
        """
        atexit.unregister(self._at_exit)
        self._run.result()

    def _explain_errors(self) -> contextlib.AbstractContextManager[None]:
        what = f"the checkpoint of step {self._target.name}"
        return explain_write_errors(self._target.parent, what, "; those before it are as they were")

    def _make_folder(self, on_start: Callable[[], None]) -> None:
        on_start()
        if self._folder.exists():
            self._folder.rmtree()
        (self._folder / ARRAYS).mkdir(parents=True)

    def _write(self, arrays: dict[str, Any], copied: threading.Event) -> None:
        try:
            with self._explain_errors():
                num_bytes = self.bytes_written if can_rename(self._target) else lambda: 0
                failures = self._notes.gather(
                    catch_failure(self._write_part, arrays, copied), num_bytes
                )
                failure = next(filter(None, failures), None) or self._wait_for_listing()
                if self._is_first:
                    failure = failure or catch_failure(self._commit)
                    if failure:
                        remove(self._folder)
                self._notes.raise_on_all(failure, num_bytes)
                if self._is_first:
                    self._run_on_complete()
        finally:
            copied.set()

    def _write_part(self, arrays: dict[str, Any], copied: threading.Event) -> None:
        args = ocp.args.PyTreeSave(arrays)
        for part in asyncio.run(self._handler.async_save(self._folder / ARRAYS, args=args)) or ():
            copied.set()
            part.result()

    def _wait_for_listing(self) -> Failure:
        """Wait until all processes see the same files; all call it, and return the same.

        Orbax lists the folder to find the parts, and would leave out, silently, what is not listed.
        The client of a file server may return a listing that is a minute old, and a process may
        write to a folder that is not shared.
        """
        different: list[int] = []
        for _ in range(_LISTINGS):
            files = sorted(files_below(self._folder / ARRAYS))
            seen = self._notes.gather(zlib.crc32(json.dumps(files).encode()))
            different = [i for i, one in enumerate(seen) if one != seen[0]]
            if not different:
                return None
            time.sleep(_LISTING_SECONDS)
        return [
            f"process {different[0]} sees other files in {self._folder} than process 0: do all "
            "processes write to one folder?",
            None,
        ]

    def _commit(self) -> None:
        """Make one checkpoint from the parts."""
        self._handler.finalize(self._folder / ARRAYS)
        (self._folder / RECORD).mkdir()
        (self._folder / RECORD / "metadata").write_text(json.dumps(self._record))
        commit_folder(self._folder, self._target)

    def _run_on_complete(self) -> None:
        try:
            self._on_complete()
        except OSError as error:
            warn_user(f"{self._target.parent}: old checkpoints could not be removed: {error}.")

    def _at_exit(self) -> None:
        """Warn of a save that fails because the program ends without waiting for it.

        Orbax needs threads, and Python starts none at that point.
        """
        try:
            self._run.result()
        except Exception as error:  # any kind: nothing else has reported it
            warn_user(f"{error} Call `wait()` or `close()` before a program ends.")


def resolve_path(folder: str | os.PathLike[str]) -> epath.Path:
    """Return an absolute path, or an address such as `gs://...` unchanged."""
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
