"""A folder that all processes write together: it appears whole, or not at all.

Orbax writes the files. When a part is done, and what became of the whole, the processes tell each
other by notes with a limit, so that a disk which fails for one of them fails the save on all, at
once. Exchanges of devices or barriers would leave all others waiting for a process that fails.
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
    """A key for notes of one occasion; all processes ask in the same order."""
    number = next(_numbers)
    if number >= 2 and jax.process_count() > 1 and jax.process_index() == 0:
        # All that are asking for this one have read what came before the last.
        forget(f"{_PREFIX}/{number - 2}")
    return f"{_PREFIX}/{number}"


def unanswered(seconds: float) -> UnansweredError:
    """No process has told anything, nor written, for so long."""
    return UnansweredError(f"another process has not answered for {seconds:g} s.")


def gather(own: Any, seconds: float) -> list[Any]:
    """Plain JSON of every process, by its number.

    Raises:
      UnansweredError: one does not answer for so many seconds.

    Communication: none with one process; else two messages of each process to the coordinator, and
      the answer.
    """
    if jax.process_count() == 1:
        return [own]
    everyone = range(jax.process_count())
    try:
        notes = gather_notes(new_topic(), json.dumps(own), everyone, seconds)
    except NoNoteError as error:
        raise unanswered(seconds) from error
    return [json.loads(note) for note in notes]


def of_first_process(value: Any, seconds: float) -> Any:
    """Process 0's plain JSON, on all processes.

    Process 0 waits, too: if it ran ahead, it would forget notes that others have not read.

    Raises:
      UnansweredError: one does not answer for so many seconds.

    Communication: that of `gather`.
    """
    return gather(value if jax.process_index() == 0 else None, seconds)[0]


# How often a process that waits looks whether anything is being written.
_LOOK_SECONDS = 5.0
_LISTING_SECONDS = 70.0  # more than what a client of NFS remembers by default
_STEP_METADATA = "_CHECKPOINT_METADATA"  # by which orbax's own tools know what is in the folder
_HANDLERS = {
    ARRAYS: "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    RECORD: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
Failure = list[Any] | None
"""Why, in words, and the operating system's number for it; as it travels in notes."""


class FolderWrite:
    """One folder that is being written. Returns when the arrays may be changed or donated.

    All processes make it alike. Process 0 makes the folder, under another name; each writes its
    parts; process 0 looks whether all of them are there and gives the folder its name.

    Args:
      target: the folder; one that is there is replaced when the new one is complete.
      arrays: tree of arrays, of NumPy or jax.
      record: plain JSON to put beside them; process 0's is kept.
      seconds: how long to wait for other processes while nothing is being written.
      before: what process 0 does before the folder is made.
      after: what it does once the folder has its name; where it fails, that is a warning.

    Raises:
      CheckpointError: the folder cannot be made; on all processes alike.
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
            # Of this write alone: what is still writing after one that failed writes elsewhere.
            number = self._topic.rpartition("/")[2]
            self._folder = target.parent / f"{target.name}.{number}{UNFINISHED}"
        self._handler = _handler()
        self._replaced: epath.Path | None = None
        self._error: Exception | None = None
        self._begin(before)
        copied = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(arrays, copied), name="checkpoint")
        self._thread.start()
        _unasked.add(self)
        copied.wait()

    @property
    def is_done(self) -> bool:
        """Whether it is known what became of it."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> Exception | None:
        """What went wrong, as far as is known."""
        return self._error

    def written(self) -> int:
        """Bytes in the unfinished folder, of all processes."""
        return sum(size for _, size in files_below(self._folder))

    def result(self) -> None:
        """Wait until it is complete.

        Raises:
          CheckpointError: it could not be written; on all processes alike.
          UnansweredError: another process does not answer.
        """
        self._thread.join()
        _unasked.discard(self)
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
            except Exception as error:  # the others must hear of it, whatever it is
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
            failure, files = self._own_part(arrays, copied)
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

    def _own_part(
        self, arrays: Any, copied: threading.Event
    ) -> tuple[Failure, list[tuple[str, int]]]:
        """Writes what this process has; what went wrong, and the files."""
        path = self._folder / ARRAYS
        try:
            saving = self._handler.async_save(path, args=ocp.args.PyTreeSave(arrays))
            for part in asyncio.run(saving) or ():
                copied.set()
                part.result()
            own = f"ocdbt.process_{self._index}/"
            found = [(f"{own}{name}", size) for name, size in files_below(path / own[:-1])]
            return None, found
        except Exception as error:  # tensorstore raises many kinds
            return self._failure(error), []

    def _finish(self, parts: Sequence[tuple[Failure, Sequence[Any]]]) -> Failure:
        """On process 0: makes one checkpoint of the parts, or removes them."""
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
        except Exception as error:  # the others must hear of it, whatever it is
            failure = self._failure(error)
            with contextlib.suppress(OSError):
                self._folder.rmtree()
            return failure
        return None

    def _check_files(
        self, path: epath.Path, parts: Sequence[tuple[Failure, Sequence[Any]]]
    ) -> None:
        """Whether all that was written is there: someone may have deleted it, or not share it.

        Files are asked for by name. The client of a file server may list a folder as it was a
        minute ago, and orbax lists it to find the parts: so it must list them all.
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
        # Removed later: that takes time, in which a kill would leave neither.
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
        """A note, for which a process waits as long as something is being written."""
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
        """What goes into a note."""
        number = io_errno(error)
        if isinstance(error, CheckpointError):
            return [str(error), number]
        text = f"{type(error).__name__}: {first_line(error)}"
        if number is not None:
            file = getattr(error, "filename", None)
            text = os.strerror(number) + (f": {file}" if file else "")
        return [f"process {self._index}: {text}" if self._count > 1 else text, number]


def _handler() -> ocp.PyTreeCheckpointHandler:
    """What writes the parts. Its store of shapes would wait ten minutes for process 0's folder."""
    types = ocp.type_handlers
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=processes(),
        type_handler_registry=types.create_type_handler_registry(
            (jax.Array, types.ArrayHandler()), (np.ndarray, types.NumpyHandler())
        ),
    )


def _size(path: epath.Path) -> int | None:
    """Bytes of a file; None where it is not."""
    try:
        return path.stat().length
    except OSError:
        return None


def _raise(failure: Failure) -> None:
    if failure:
        text, number = failure
        raise CheckpointError(text, errno=number)


_unasked: weakref.WeakSet[FolderWrite] = weakref.WeakSet()
"""Those whose result nobody has asked for."""


@atexit.register
def _at_exit() -> None:
    """A program that does not wait at its end may lose what is being written: not silently.

    Python starts no threads by then, which orbax needs.
    """
    for writing in list(_unasked):
        try:
            writing.result()
        except Exception as error:  # whatever it is, nobody has heard of it
            warn_user(
                f"a checkpoint could not be written: {error}. `wait()` or `close()` before a "
                "program ends let it be completed."
            )
