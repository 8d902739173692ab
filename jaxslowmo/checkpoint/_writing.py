"""`FolderWrite`: all processes write a folder together, which appears complete or not at all.

Orbax writes the files. By notes through the coordinator, with a time limit, the processes report
when a part is written, and the outcome. So if a disk fails for one of them, the save fails on all
at once. With collectives or barriers all others would wait for a process that fails.
"""

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._support.checks import warn_user
from .._support.coordinator import NoNoteError, forget, gather_notes, tell, wait_for
from .._support.files import COMMITTED, can_rename, io_errno
from ._arrays import first_line
from ._folder import (
    ARRAYS,
    RECORD,
    UNFINISHED,
    CheckpointError,
    UnansweredError,
    epath,
    files_below,
    ocp,
    processes,
    put_away,
)

_numbers = itertools.count()
_PREFIX = "jaxslowmo/checkpoint"


def new_topic() -> str:
    """Return a new key for notes; all processes must call this in the same order."""
    number = next(_numbers)
    if number >= 2 and jax.process_count() > 1 and jax.process_index() == 0:
        # Every process that uses the previous key has read all notes of the one before it.
        forget(f"{_PREFIX}/{number - 2}")
    return f"{_PREFIX}/{number}"


def unanswered(seconds: float) -> UnansweredError:
    """Return the error for a process that has neither answered nor written for so many seconds."""
    return UnansweredError(f"another process has not answered for {seconds:g} s.")


def gather(value: Any, seconds: float) -> list[Any]:
    """Return the `value`, plain JSON, of every process in the order of their numbers.

    Raises:
      UnansweredError: a process does not answer for so many seconds.

    Communication: none with one process; else two messages of each process to the coordinator, and
      the answer.
    """
    if jax.process_count() == 1:
        return [value]
    numbers = range(jax.process_count())
    try:
        notes = gather_notes(new_topic(), json.dumps(value), numbers, seconds)
    except NoNoteError as error:
        raise unanswered(seconds) from error
    return [json.loads(note) for note in notes]


def of_first_process(value: Any, seconds: float) -> Any:
    """Return process 0's `value`, plain JSON, on all processes.

    Process 0 waits, too: if it ran ahead, it would delete notes that others have not read.

    Raises:
      UnansweredError: a process does not answer for so many seconds.

    Communication: that of `gather`.
    """
    return gather(value if jax.process_index() == 0 else None, seconds)[0]


# The interval at which a waiting process checks whether anything is being written.
_LOOK_SECONDS = 5.0
_LISTING_SECONDS = 70.0  # longer than an NFS client caches a listing by default
_STEP_METADATA = "_CHECKPOINT_METADATA"  # the file in which orbax's tools look up the items
_HANDLERS = {
    ARRAYS: "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    RECORD: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
Failure = list[Any] | None
"""A failure in a note: the reason in words, and the operating system's error number or None."""


class FolderWrite:
    """A folder that is being written, in a thread that the constructor starts.

    The constructor returns when the arrays may be changed or donated. All processes must construct
    it with the same arguments. Process 0 makes the folder, under another name; each process writes
    its parts; process 0 checks that all of them exist and renames the folder.

    Args:
      target: path of the folder; an existing folder is replaced when the new one is complete.
      arrays: tree of NumPy or jax arrays.
      record: plain JSON to write next to the arrays; process 0's is written.
      seconds: time in seconds to wait for other processes while nothing is being written.
      before: function that process 0 calls before it makes the folder.
      after: function that process 0 calls once the folder has its name; its errors become warnings.

    Raises:
      CheckpointError: the folder cannot be made; on all processes.
      UnansweredError: process 0 does not answer.

    Communication: with several processes three messages of each to the coordinator, and answers.
    """

    def __init__(
        self,
        target: epath.Path,
        arrays: Any,
        record: dict[str, Any],
        *,
        seconds: float,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._record, self._seconds, self._after = target, record, seconds, after
        self._index, self._count = jax.process_index(), jax.process_count()
        self._topic = new_topic()
        self._folder = target
        if can_rename(target):
            # Threads of a failed write may still be writing, so each write has a new folder.
            number = self._topic.rpartition("/")[2]
            self._folder = target.parent / f"{target.name}.{number}{UNFINISHED}"
        self._handler = _handler()
        self._replaced: epath.Path | None = None
        self._error: Exception | None = None
        self._begin(before)
        copied = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(arrays, copied), name="checkpoint")
        self._thread.start()
        _unjoined.add(self)
        copied.wait()

    @property
    def is_done(self) -> bool:
        """True if the write has ended, complete or with an error."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> Exception | None:
        """The error of the write; None without one, or while it is in progress."""
        return self._error

    def written(self) -> int:
        """Return how many bytes all processes have written to the unfinished folder."""
        return sum(size for _, size in files_below(self._folder))

    def result(self) -> None:
        """Wait until the folder is complete.

        Raises:
          CheckpointError: it could not be written; on all processes.
          UnansweredError: another process does not answer.
        """
        self._thread.join()
        _unjoined.discard(self)
        if self._error is not None:
            raise self._error

    def _begin(self, before: Callable[[], None]) -> None:
        failure: Failure = None
        if self._index == 0:
            try:
                before()
                if self._folder.exists():
                    self._folder.rmtree()
                (self._folder / ARRAYS).mkdir(parents=True)
            except Exception as error:  # any kind: the other processes must learn of it
                failure = self._failure(error)
            if self._count > 1:
                tell(f"{self._topic}/begun", json.dumps(failure))
        else:
            try:
                failure = json.loads(wait_for(f"{self._topic}/begun", self._seconds))
            except NoNoteError as error:
                raise unanswered(self._seconds) from error
        _raise(failure)

    def _run(self, arrays: Any, copied: threading.Event) -> None:
        try:
            failure, files = self._write_part(arrays, copied)
            if self._count > 1 and self._index > 0:
                tell(f"{self._topic}/{self._index}", json.dumps([failure, files]))
                _raise(json.loads(self._wait("outcome")))
                return
            parts = [(failure, files)]
            parts += [json.loads(self._wait(str(i))) for i in range(1, self._count)]
            failure = self._finish(parts)
            if self._count > 1:
                tell(f"{self._topic}/outcome", json.dumps(failure))
            _raise(failure)
            self._tidy()
        except Exception as error:  # raised by `result`
            self._error = error
        finally:
            copied.set()

    def _write_part(
        self, arrays: Any, copied: threading.Event
    ) -> tuple[Failure, list[tuple[str, int]]]:
        """Write the part of this process; return the failure and the files with their sizes."""
        path = self._folder / ARRAYS
        try:
            saving = self._handler.async_save(path, args=ocp.args.PyTreeSave(arrays))
            for part in asyncio.run(saving) or ():
                copied.set()
                part.result()
            folder = f"ocdbt.process_{self._index}"
            files = [(f"{folder}/{name}", size) for name, size in files_below(path / folder)]
            return None, files
        except Exception as error:  # tensorstore raises many kinds
            return self._failure(error), []

    def _finish(self, parts: Sequence[tuple[Failure, Sequence[Any]]]) -> Failure:
        """Make one checkpoint from the parts, or remove them; process 0 calls it."""
        try:
            _raise(next((failure for failure, _ in parts if failure), None))
            path = self._folder / ARRAYS
            self._check_files(path, parts)
            self._handler.finalize(path)
            (self._folder / RECORD).mkdir()
            (self._folder / RECORD / "metadata").write_text(json.dumps(self._record))
            about = {"item_handlers": _HANDLERS, "commit_timestamp_nsecs": time.time_ns()}
            (self._folder / _STEP_METADATA).write_text(json.dumps(about))
            self._give_name()
        except Exception as error:  # any kind: the other processes must learn of it
            failure = self._failure(error)
            with contextlib.suppress(OSError):
                self._folder.rmtree()
            return failure
        return None

    def _check_files(
        self, path: epath.Path, parts: Sequence[tuple[Failure, Sequence[Any]]]
    ) -> None:
        """Raise `CheckpointError` unless process 0 sees all files that were written.

        A file may have been deleted, or a process may write to a folder that is not shared. Files
        are looked up by name. But orbax lists the folder to find the parts, and the client of a
        file server may return a listing that is a minute old, so this waits until all are listed.
        """
        for index, (_, files) in enumerate(parts):
            lost = [name for name, size in files if _size(path / name) != size]
            if lost:
                raise CheckpointError(
                    f"{lost[0]} of process {index} is not in {path}: do all processes write to one "
                    "folder, and has nobody deleted there?"
                )
        wanted = {name.partition("/")[0] for _, files in parts for name, _ in files}
        deadline = time.monotonic() + _LISTING_SECONDS
        while unseen := wanted - {child.name for child in path.iterdir()}:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{path} does not list {min(unseen)}, which is there")
            time.sleep(_LISTING_SECONDS / 100)

    def _give_name(self) -> None:
        if not can_rename(self._target):
            (self._target / COMMITTED).write_text("")
            return
        # The old folder is removed later: a kill during the removal would leave neither.
        self._replaced = put_away(self._target) if self._target.exists() else None
        self._folder.rename(self._target)

    def _tidy(self) -> None:
        try:
            if self._replaced is not None:
                self._replaced.rmtree()
            self._after()
        except OSError as error:
            warn_user(f"{self._target.parent}: old checkpoints could not be removed: {error}.")

    def _wait(self, what: str) -> str:
        """Return a note; wait for it as long as something is being written."""
        written, since = -1, time.monotonic()
        while True:
            try:
                return wait_for(f"{self._topic}/{what}", min(_LOOK_SECONDS, self._seconds))
            except NoNoteError as error:
                now = self.written() if can_rename(self._target) else 0
                if now != written:
                    written, since = now, time.monotonic()
                elif time.monotonic() - since > self._seconds:
                    raise unanswered(self._seconds) from error

    def _failure(self, error: Exception) -> Failure:
        """Return the failure that other processes receive in a note."""
        number = io_errno(error)
        if isinstance(error, CheckpointError):
            return [str(error), number]
        text = f"{type(error).__name__}: {first_line(error)}"
        if number is not None:
            file = getattr(error, "filename", None)
            text = os.strerror(number) + (f": {file}" if file else "")
        return [f"process {self._index}: {text}" if self._count > 1 else text, number]


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return orbax's handler that writes the parts, without its store of array metadata.

    With that store, a process would wait ten minutes for process 0's folder.
    """
    types = ocp.type_handlers
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=processes(),
        type_handler_registry=types.create_type_handler_registry(
            (jax.Array, types.ArrayHandler()), (np.ndarray, types.NumpyHandler())
        ),
    )


def _size(path: epath.Path) -> int | None:
    """Return the size of a file in bytes; None if there is no such file."""
    try:
        return path.stat().length
    except OSError:
        return None


def _raise(failure: Failure) -> None:
    if failure:
        text, number = failure
        raise CheckpointError(text, errno=number)


_unjoined: weakref.WeakSet[FolderWrite] = weakref.WeakSet()
"""The writes whose `result` has not been called yet."""


@atexit.register
def _at_exit() -> None:
    """Warn of saves that fail because the program ends without waiting for them.

    Orbax needs threads, and Python starts none at that point.
    """
    for writing in list(_unjoined):
        try:
            writing.result()
        except Exception as error:  # any kind: nothing else has reported it
            warn_user(
                f"a checkpoint could not be written: {error}. `wait()` or `close()` before a "
                "program ends let it be completed."
            )
