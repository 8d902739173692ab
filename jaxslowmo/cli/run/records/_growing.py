"""A file that grows while a run goes on, whatever becomes of its disk and its folder meanwhile."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

from ...._support.files import replacing
from ...._support.warnings import warn_user

# The disk is full; or somebody is deleting the folder just now, and the next record makes it anew.
_WAITED_FOR = (errno.ENOSPC, errno.ENOENT)


class GrowingFile:
    """A file that is written anew, and then added to, on disk at once.

    Should it or its folder be deleted meanwhile, the next addition brings all of it back.

    Args:
      path: of the file.
      whole: all that it should hold by now.
      besides: what else stands in a folder that has to be made anew.
    """

    def __init__(
        self, path: Path, whole: Callable[[], bytes], besides: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._whole, self._besides = path, whole, besides
        self._unwritten, self._is_behind = b"", False
        self._file = self._write_all()

    def add(self, data: bytes) -> None:
        """Adds to the file what `whole` holds by now.

        What a full disk, or a folder that is being deleted, does not take waits until it does,
        until the end at the latest.

        Raises:
          OSError: it cannot be written; a part of it may be there.
        """
        try:
            self._add(data)
            self._is_behind = False
        except OSError as error:
            if error.errno not in _WAITED_FOR:
                raise
            if not self._is_behind:
                self._is_behind = True
                warn_user(f"{self._path} does not grow: {error.strerror}; its lines are kept.")

    def bring_back(self) -> None:
        """Writes it anew where it is gone; after `close`, too."""
        if not self._path.exists():
            self._write_all().close()

    def close(self, *, complete: bool) -> None:
        """Ends it; if `complete`, with what waits.

        Raises:
          OSError: that still cannot be written.
        """
        try:
            if complete:
                self._add(b"")
        finally:
            self._file.close()

    def _add(self, data: bytes) -> None:
        if not self._is_there():
            old, self._file = self._file, self._write_all()
            old.close()
            return
        self._unwritten += data
        while self._unwritten:  # a disk that fills up may take a part
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _is_there(self) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _write_all(self) -> io.FileIO:
        """The whole file anew, to be added to."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._besides()
        with replacing(self._path) as temporary:
            temporary.write_bytes(self._whole())
        self._unwritten = b""
        # Without a buffer: what could not be written must not come a second time.
        return io.FileIO(self._path, "a")
