"""Text as bytes: a corpus of files, its division between replicas, and batches of windows."""

import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._support.checks import ArgumentError
from .._support.files import TRANSIENT_ERRORS

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


@dataclasses.dataclass(frozen=True)
class TextSplit:
    """A corpus divided between the replicas and validation.

    Attributes:
      shares: one uint8 vector per replica, its documents one after another.
      share_documents: names of the documents in each share.
      validation: uint8 vector of the held-out documents.
      validation_documents: their names.
    """

    shares: tuple[np.ndarray, ...]
    share_documents: tuple[tuple[str, ...], ...]
    validation: np.ndarray
    validation_documents: tuple[str, ...]


def split_corpus(corpus: Corpus, num_replicas: int, *, validation_every: int = 10) -> TextSplit:
    """Divide a corpus into disjoint parts: one share per replica, and a held-out part.

    Files stay whole: every `validation_every`-th one is held out, and the others are balanced by
    bytes. A corpus of one single file is cut into a share per replica, followed by the validation
    part (one `validation_every`-th). The same corpus and numbers give the same split.

    Args:
      corpus: corpus from `read_corpus`.
      num_replicas: number of shares, >= 1.
      validation_every: one file (or byte) in this many is held out, >= 2.

    Returns:
      The shares, one per replica, and the held-out part.

    Raises:
      ValueError: a number is out of range, or there are more replicas than files or bytes.
    """
    if num_replicas < 1:
        raise ArgumentError("replicas", f"`replicas` must be >= 1, got {num_replicas}.")
    if validation_every < 2:
        raise ValueError(f"`validation_every` must be >= 2, got {validation_every}.")
    if corpus.is_single_file:
        training, held_out = _cut(corpus.documents[0], num_replicas, validation_every)
    else:
        training, held_out = _deal(corpus, num_replicas, validation_every)
    return TextSplit(
        shares=tuple(_join(share) for share in training),
        share_documents=tuple(tuple(d.name for d in share) for share in training),
        validation=_join(held_out),
        validation_documents=tuple(d.name for d in held_out),
    )


def _cut(
    document: Document, num_replicas: int, validation_every: int
) -> tuple[list[list[Document]], list[Document]]:
    size = len(document.text)
    held_out = max(1, size // validation_every)
    if size - held_out < num_replicas:
        raise ArgumentError(
            "replicas",
            f"`replicas` must not exceed the bytes to share out, got {num_replicas} replicas for "
            f"{size} bytes.",
        )
    # Ends are rounded multiples, so that parts differ by at most one byte.
    ends = [(size - held_out) * i // num_replicas for i in range(num_replicas + 1)] + [size]
    parts = [
        Document(f"{document.name}[{start}:{end}]", document.text[start:end])
        for start, end in itertools.pairwise(ends)
    ]
    return [[part] for part in parts[:-1]], [parts[-1]]


def _deal(
    corpus: Corpus, num_replicas: int, validation_every: int
) -> tuple[list[list[Document]], list[Document]]:
    documents = corpus.documents
    if len(documents) == 1:
        raise ArgumentError(
            "data",
            f"`data` must hold at least two text files, got only {documents[0].name} in "
            f"{corpus.source}; pass that file itself, which is cut into parts.",
        )
    if len(documents) < num_replicas + 1:
        raise ArgumentError(
            "replicas",
            f"`replicas` must be at most {len(documents) - 1}, one less than the text files in "
            f"{corpus.source}, got {num_replicas}; or pass one file, which is cut into parts.",
        )
    # Hold out the middle file of each group, and at least one. A folder's first file is often
    # unusual (README, __init__), and validation should resemble the rest.
    offset = min(validation_every, len(documents)) // 2
    held_out = list(documents[offset::validation_every])
    while len(documents) - len(held_out) < num_replicas:
        held_out.pop()
    names = {document.name for document in held_out}
    # Assign the largest file first, each to the replica with the fewest bytes so far. The shares
    # then differ by at most one file.
    shares: list[list[Document]] = [[] for _ in range(num_replicas)]
    lightest = [(0, replica) for replica in range(num_replicas)]
    rest = (document for document in documents if document.name not in names)
    for document in sorted(rest, key=lambda d: (-len(d.text), d.name)):
        size, replica = heapq.heappop(lightest)
        shares[replica].append(document)
        heapq.heappush(lightest, (size + len(document.text), replica))
    return shares, held_out


def _join(documents: list[Document]) -> np.ndarray:
    return np.frombuffer(b"".join(d.text for d in documents), dtype=np.uint8)


class TextBatches(Iterator[np.ndarray]):
    """A resumable iterator over endless random windows, stacked over replicas.

    Batch i depends only on (seed, replica, i), so the windows of one replica depend neither on the
    other replicas nor on where a run resumed.

    Args:
      shares: one uint8 vector per replica (`TextSplit.shares`).
      batch_size: windows per replica, >= 1.
      window: bytes per window, >= 2: the model's context length + 1.
      seed: seed of the random positions, >= 0.
      replicas: indices of the replicas of `shares`, for a process that makes batches only for its
        local replicas; the default is 0, 1, ...

    Raises:
      ValueError: a number is out of range, `replicas` are not one per share, or a share is smaller
        than one batch.

    Example:
        >>> batches = TextBatches([np.arange(100, dtype=np.uint8)], batch_size=2, window=5, seed=0)
        >>> next(batches).shape, batches.get_state()["next_batch"]
        ((2, 5), 1)
    """

    def __init__(
        self,
        shares: Sequence[np.ndarray],
        *,
        batch_size: int,
        window: int,
        seed: int,
        replicas: Sequence[int] | None = None,
    ):
        _check_sizes(batch_size=batch_size, window=window)
        if seed < 0:
            raise ArgumentError("seed", f"`seed` must be >= 0, got {seed}.")
        replicas = tuple(range(len(shares)) if replicas is None else replicas)
        if len(replicas) != len(shares) or min(replicas, default=0) < 0:
            raise ArgumentError(
                "replicas",
                f"`replicas` must be one index >= 0 for each of the {len(shares)} shares, got "
                f"{replicas}.",
            )
        for replica, share in zip(replicas, shares, strict=True):
            if share.size < batch_size * window:
                raise ArgumentError(
                    "data",
                    f"`data` must hold a batch of {batch_size * window} bytes per replica; replica "
                    f"{replica} of {len(shares)} got {share.size}: use more text, fewer replicas, "
                    "a smaller batch or a shorter context.",
                )
        self._shares = tuple(shares)
        self._batch_size = batch_size
        self._window = window
        self._seed = seed
        self._replicas = replicas
        self._next_batch = 0

    def batch(self, index: int) -> np.ndarray:
        """Return batch `index`, 0, 1, ...: (replicas * batch_size, window) uint8, replica-major."""
        return np.concatenate([self._windows(i, index) for i in range(len(self._shares))])

    def __next__(self) -> np.ndarray:
        batch = self.batch(self._next_batch)
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position of the iterator as plain JSON values."""
        return {
            "next_batch": self._next_batch,
            "seed": self._seed,
            "replicas": list(self._replicas),
            "batch_size": self._batch_size,
            "window": self._window,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state from `get_state`.

        Raises:
          ValueError: the state is from an iterator that would give other batches.
        """
        current = self.get_state()
        for name in current.keys() - {"next_batch"}:
            if state.get(name) != current[name]:
                raise ValueError(
                    f"`state` must be of an iterator with {name}={current[name]}, "
                    f"got {state.get(name)}."
                )
        self._next_batch = state["next_batch"]

    def _windows(self, i: int, index: int) -> np.ndarray:
        share = self._shares[i]
        random = np.random.default_rng([self._seed, self._replicas[i], index])
        starts = random.integers(0, share.size - self._window + 1, size=self._batch_size)
        return share[starts[:, None] + np.arange(self._window)]


def validation_batches(
    text: np.ndarray, *, num_batches: int, batch_size: int, window: int
) -> np.ndarray:
    """Return evenly spaced windows of the held-out text, the same in every call.

    Args:
      text: uint8 vector (`TextSplit.validation`).
      num_batches: number of batches, >= 1.
      batch_size: windows per batch, >= 1.
      window: bytes per window, >= 2.

    Returns:
      uint8 (num_batches, batch_size, window). Windows overlap only if the text is too short for
      their number.

    Raises:
      ValueError: a number is out of range, or the text is shorter than one window.
    """
    _check_sizes(num_batches=num_batches, batch_size=batch_size, window=window)
    if text.size < window:
        raise ArgumentError(
            "data",
            f"`data` must leave at least one window of {window} bytes for validation, "
            f"got {text.size}: use more text or a shorter context.",
        )
    starts = np.linspace(0, text.size - window, num_batches * batch_size).astype(np.int64)
    windows = text[starts[:, None] + np.arange(window)]
    return windows.reshape(num_batches, batch_size, window)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 2 if name == "window" else 1
        if value < least:
            raise ArgumentError(name, f"`{name}` must be >= {least}, got {value}.")
