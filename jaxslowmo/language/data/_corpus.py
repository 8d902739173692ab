"""Byte corpora from files: the source of the standard library, or any file or folder."""

import dataclasses
import functools
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from ..._support.checks import ArgumentError
from ..._support.files import TRANSIENT_ERRORS

# Folders that are no typical source: installed packages, caches, and test suites, which would be
# more than half of the bytes.
_STDLIB_LEAVES_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\b\x1b")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text file.

    Attributes:
      name: path relative to the corpus, with forward slashes.
      text: bytes of the file, not decoded; at least one.
    """

    name: str
    text: bytes

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the bytes, as hexadecimal digits."""
        return hashlib.sha256(self.text).hexdigest()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus of text files in a fixed order.

    Attributes:
      source: the path that was read.
      documents: the text files, sorted by name; no two have the same bytes.
      skipped: (name, reason) of every file that was skipped, sorted by name.
      is_single_file: whether `source` is a file, which may be cut into parts.
    """

    source: str
    documents: tuple[Document, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    is_single_file: bool = False

    @property
    def num_bytes(self) -> int:
        """The number of bytes in all documents."""
        return sum(len(document.text) for document in self.documents)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of names, texts and skipped files: equal corpora give equal batches.

        It does not depend on the place of the files: a single file has no name.
        """
        texts = {
            "" if self.is_single_file else document.name: f"{len(document.text)} {document.sha256}"
            for document in self.documents
        }
        lines = json.dumps(sorted((texts | dict(self.skipped)).items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def default_corpus_path() -> Path:
    """Return the folder of the running interpreter's standard library.

    Returns:
      An absolute path.
    """
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """Read a text corpus, which is the same every time for the same files.

    Args:
      path: a text file, or a folder that is searched for text files. Hidden and cache folders are
        not entered; binary, empty, unreadable and duplicate files are skipped and listed. None is
        the .py source of the running interpreter's standard library without its tests and installed
        packages (about 12 MB; it differs between Python versions).

    Returns:
      A `Corpus` with at least one document. Everything is read into memory.

    Raises:
      ValueError: the path is empty or does not exist, or holds no text.
      OSError: a disk or a file server does not answer (EIO, ESTALE, ETIMEDOUT, ENOSPC). Skipping
        such files would give another corpus each time.
    """
    if path is None:
        return _read_folder(default_corpus_path(), is_stdlib=True)
    if not os.fspath(path):
        raise ArgumentError("data", "`data` must be a file or a folder, got an empty path.")
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, is_stdlib=False)
    if not path.is_file():
        raise ArgumentError(
            "data", f"`data` must be an existing file or folder, got {str(path)!r}."
        )
    text, reason = _read_text(path)
    if reason:
        raise ArgumentError("data", f"`data` must be a text file, but {str(path)!r} is {reason}.")
    return Corpus(str(path), (Document(path.name, text),), is_single_file=True)


def _read_folder(folder: Path, *, is_stdlib: bool) -> Corpus:
    documents: list[Document] = []
    skipped: list[tuple[str, str]] = []
    first_with: dict[str, str] = {}

    def unreadable(error: OSError) -> None:
        reason = _why_unreadable(error)
        skipped.append((Path(error.filename).relative_to(folder).as_posix() + "/", reason))

    names = _file_names(folder, is_stdlib=is_stdlib, unreadable=unreadable)
    for name in sorted(names):
        text, reason = _read_text(folder / name)
        document = Document(name, text)
        if not reason:
            # With duplicates the shares of replicas, or the validation part, would not be disjoint.
            twin = first_with.setdefault(document.sha256, name)
            reason = "" if twin == name else f"a duplicate of {twin}"
        if reason:
            skipped.append((name, reason))
        else:
            documents.append(document)
    if not documents:
        what = f"all {len(skipped)} files are binary, empty or unreadable" if skipped else "no file"
        raise ArgumentError(
            "data", f"`data` must hold at least one text file; found {what} in {folder}."
        )
    return Corpus(str(folder), tuple(documents), tuple(sorted(skipped)))


def _file_names(
    folder: Path, *, is_stdlib: bool, unreadable: Callable[[OSError], None]
) -> Iterator[str]:
    for root, folders, files in os.walk(folder, onerror=unreadable):
        # Changed in place, so that os.walk does not enter the other folders.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and not (is_stdlib and name in _STDLIB_LEAVES_OUT)
        ]
        for name in files:
            if not name.startswith(".") and (name.endswith(".py") or not is_stdlib):
                yield Path(root, name).relative_to(folder).as_posix()


def _read_text(path: Path) -> tuple[bytes, str]:
    """Return the file's bytes, and the reason to skip it ("" to keep it)."""
    try:
        # Opening a pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            return b"", "not a regular file"
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):  # a broken link
        return b"", "not a regular file"
    except OSError as error:
        return b"", _why_unreadable(error)
    if not text:
        return b"", "empty"
    return text, "binary" if _is_binary(text) else ""


def _why_unreadable(error: OSError) -> str:
    """Return why a file or folder is skipped; raise an error that may pass with another attempt."""
    if error.errno in TRANSIENT_ERRORS:
        raise error
    return f"unreadable ({error.strerror})"


def _is_binary(text: bytes) -> bool:
    """Return whether bytes hold a NUL, or are invalid UTF-8 with many control characters."""
    if b"\0" in text:
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        controls = sum(text.count(c) for c in range(32) if c not in _TEXT_CONTROLS)
        return controls > 0.02 * len(text)  # random or compressed bytes: 10 %; Latin-1: none
    return False
