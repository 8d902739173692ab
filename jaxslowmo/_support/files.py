"""Files that are replaced as a whole, complete checkpoints, and the operating system's errors."""

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A disk that is full or a file server that does not answer may be well again in a minute.
PASSING = frozenset({errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT})
# As tensorstore writes it, which raises errors without a number.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def io_errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error that an error is, or came from; None if of none.

    An error may tell its number itself, by an attribute `errno`.
    """
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(number, int):
            return number
        if found := _OS_ERROR.search(str(error)):
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None


_BEFORE, _AFTER = ".writing-", "-"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to: what is there takes the place of `path` at the end, at once.

    It lies in the same folder and ends as `path` does. After an error it is removed, and `path` is
    what it was. What is no regular file, as /dev/stdout, is written to as it is.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()  # a link keeps pointing to the file
    temporary = path.with_name(f"{_BEFORE}{uuid.uuid4().hex[:8]}{_AFTER}{path.name}")
    try:
        yield temporary
        # Else the name could be on disk before the bytes are, and a loss of power leave it empty.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_anew(path: str | os.PathLike[str], text: str) -> None:
    """Writes a whole file, as UTF-8: afterwards it holds `text`, or after an error what it held."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_unfinished(path: Path) -> bool:
    """Whether a file was left by a writer that was killed."""
    return path.name.startswith(_BEFORE)


# In a folder of an object store, which cannot be renamed: a checkpoint that has it is complete.
COMMITTED = "commit_success.txt"
MAX_STEP = 2**31 - 1


def complete_steps(folder: Any) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints in a folder, ascending; () where there is none.

    One that is being written has another name until all of it is there.

    Args:
      folder: a `pathlib.Path`, or an `epath.Path`, which may be an address such as `gs://...`.
    """
    if not folder.exists():
        return ()
    return tuple(sorted(int(path.name) for path in folder.iterdir() if _is_complete(path)))


def _is_complete(path: Any) -> bool:
    name = path.name
    # As `str` writes a number: "007" and "²" are digits, too, and nobody's checkpoints.
    if not (name.isascii() and name.isdigit() and len(name) < 11 and str(int(name)) == name):
        return False
    if int(name) > MAX_STEP or not path.is_dir():
        return False
    return can_rename(path) or (path / COMMITTED).exists()


def can_rename(path: Any) -> bool:
    """Whether a folder can get its name when it is complete; object stores have no folders."""
    return "://" not in str(path)
