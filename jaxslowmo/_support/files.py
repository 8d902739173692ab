"""Atomic replacement of files, complete checkpoints, and errors of the operating system."""

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Errors that may pass in a minute: a full disk, or a file server that does not answer.
TRANSIENT_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT})
# tensorstore raises errors without an `errno`, and writes the number into the text.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def io_errno(error: BaseException | None) -> int | None:
    """Return the number of the operating system's error that caused `error`; None without one.

    The number comes from the attribute `errno` or from the text, of `error` or of its causes.
    """
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(number, int):
            return number
        if match := _OS_ERROR.search(str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None


_BEFORE, _AFTER = ".writing-", "-"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; its file atomically replaces `path` at the end.

    It is in the same folder and has the same suffix as `path`. After an error it is removed, and
    `path` is unchanged. If `path` is no regular file, such as /dev/stdout, it is yielded itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()  # a link keeps pointing to the file
    temporary = path.with_name(f"{_BEFORE}{uuid.uuid4().hex[:8]}{_AFTER}{path.name}")
    try:
        yield temporary
        # Without this the name could be on disk before the bytes, and a power loss leave it empty.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as a whole file in UTF-8; after an error the file is unchanged."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_temporary_file(path: Path) -> bool:
    """Return whether a file was left behind by a writer that was killed."""
    return path.name.startswith(_BEFORE)


# Object stores cannot rename folders: there a checkpoint is complete when it holds this file.
COMMITTED = "commit_success.txt"
MAX_STEP = 2**31 - 1
EXPORT_ARRAYS, EXPORT_RECORD = "model.safetensors", "jaxslowmo.json"  # files of an exported model


def complete_steps(folder: Any) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints in a folder, in ascending order.

    A checkpoint that is being written has another name until it is complete.

    Args:
      folder: a `pathlib.Path`, or an `epath.Path`, which may be an address such as `gs://...`.
    """
    if not folder.exists():
        return ()
    return tuple(sorted(int(path.name) for path in folder.iterdir() if _is_complete(path)))


def _is_complete(path: Any) -> bool:
    # The name must be what `str` writes: "007" and "²" are digits too, but no steps.
    is_number = re.fullmatch("0|[1-9][0-9]{0,9}", path.name)
    if not is_number or int(path.name) > MAX_STEP or not path.is_dir():
        return False
    return can_rename(path) or (path / COMMITTED).exists()


def is_export(folder: Path) -> bool:
    """Return whether a folder looks like a model that `export_consensus` has written."""
    return all((folder / name).is_file() for name in (EXPORT_ARRAYS, EXPORT_RECORD))


def can_rename(path: Any) -> bool:
    """Return whether a folder can be renamed once it is complete; object stores have no folders."""
    return "://" not in str(path)
