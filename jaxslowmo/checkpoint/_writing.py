"""`FolderWrite`: all processes write a folder together, which appears complete or not at all."""

import asyncio
import atexit
import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from .._support.checks import warn_user
from .._support.files import can_rename
from ._arrays import make_handler
from ._folder import (
    ARRAYS,
    RECORD,
    commit_folder,
    epath,
    files_below,
    ocp,
    remove,
    unfinished_path,
)
from ._notes import Failure, Notes, catch_failure, explain_write_errors

# How often, and at which interval, the processes list files until all see the same: together longer
# than an NFS client caches a listing by default.
_LISTINGS, _LISTING_SECONDS = 100, 0.7


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
