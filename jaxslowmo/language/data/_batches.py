"""Who reads what: a held-out part, a share per replica, and batches of windows of them."""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._corpus import Corpus, Document


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
    """Divides a corpus: no byte of it goes to two places.

    Whole files are divided, every `validation_every`-th of them held out, the rest balanced by
    bytes. A corpus that is one single file is cut: a share per replica, then the validation part
    (one `validation_every`-th). The same corpus and numbers give the same split.

    Args:
      corpus: what `read_corpus` returned.
      num_replicas: shares to make, >= 1.
      validation_every: one file (or byte) in this many is held out, >= 2.

    Returns:
      The shares, one per replica, and the held-out part.

    Raises:
      ValueError: if a number is out of range, or there are more replicas than files or bytes.
    """
    if num_replicas < 1:
        raise ValueError(f"`replicas` must be >= 1, got {num_replicas}.")
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
        raise ValueError(
            f"`replicas` must not exceed the bytes to share out, got {num_replicas} replicas for "
            f"a file of {size} bytes; use a larger file."
        )
    # Rounded multiples, so that parts differ by at most one byte.
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
        raise ValueError(
            "`data` must hold at least two text files, one of them for validation, got only "
            f"{documents[0].name} in {corpus.source}; pass that file itself, it is cut into parts."
        )
    if len(documents) < num_replicas + 1:
        raise ValueError(
            f"`replicas` must leave one file for validation, got {num_replicas} replicas for "
            f"{len(documents)} text files in {corpus.source}; use at most {len(documents) - 1} "
            "replicas, add files, or pass one file, which is cut into parts."
        )
    # The middle of each group, and at least one: a folder's first file is often its longest
    # (README, __init__), and validation should look like the rest.
    offset = min(validation_every, len(documents)) // 2
    held_out = list(documents[offset::validation_every])
    while len(documents) - len(held_out) < num_replicas:
        held_out.pop()
    names = {document.name for document in held_out}
    # Largest first, each to the replica with the fewest bytes so far: never further from balance
    # than one file.
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
    """Endless random windows, stacked over replicas; resumable.

    Batch i depends only on (seed, replica, i): the windows of one replica are the same whatever
    the other replicas read and wherever a run resumed.

    Args:
      shares: one uint8 vector per replica (`TextSplit.shares`).
      batch_size: windows per replica, >= 1.
      window: bytes per window, >= 2: the model's context length + 1.
      seed: of the random positions, >= 0.
      replicas: which replicas the shares are of, for a process that makes only the batches of its
        own; default 0, 1, ...

    Raises:
      ValueError: for a number out of range, `replicas` that are not one per share, or a share
        smaller than one batch.

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
            raise ValueError(f"`seed` must be >= 0, got {seed}.")
        replicas = tuple(range(len(shares)) if replicas is None else replicas)
        if len(replicas) != len(shares) or min(replicas, default=0) < 0:
            raise ValueError(
                f"`replicas` must be one index >= 0 for each of the {len(shares)} shares, got "
                f"{replicas}."
            )
        for replica, share in zip(replicas, shares, strict=True):
            if share.size < batch_size * window:
                raise ValueError(
                    f"`data` must hold at least one batch per replica, {batch_size} windows of "
                    f"{window} bytes = {batch_size * window} bytes; replica {replica} of "
                    f"{len(shares)} got {share.size}: use more text, fewer replicas, "
                    "a smaller batch or a shorter context."
                )
        self._shares = tuple(shares)
        self._batch_size = batch_size
        self._window = window
        self._seed = seed
        self._replicas = replicas
        self._next_batch = 0

    def batch(self, index: int) -> np.ndarray:
        """Batch `index`, 0, 1, ...: (replicas * batch_size, window) uint8, replica-major."""
        return np.concatenate([self._of(which, index) for which in range(len(self._shares))])

    def __next__(self) -> np.ndarray:
        batch = self.batch(self._next_batch)
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is, as plain JSON values."""
        return {
            "next_batch": self._next_batch,
            "seed": self._seed,
            "replicas": list(self._replicas),
            "batch_size": self._batch_size,
            "window": self._window,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called.

        Raises:
          ValueError: if the state is of an iterator that would give other batches.
        """
        mine = self.get_state()
        for name in mine.keys() - {"next_batch"}:
            if state.get(name) != mine[name]:
                raise ValueError(
                    f"`state` must be of an iterator with {name}={mine[name]}, "
                    f"got {state.get(name)}."
                )
        next_batch = state.get("next_batch")
        if not isinstance(next_batch, int) or next_batch < 0:
            raise ValueError(f"`state['next_batch']` must be an int >= 0, got {next_batch!r}.")
        self._next_batch = next_batch

    def _of(self, which: int, index: int) -> np.ndarray:
        share = self._shares[which]
        random = np.random.default_rng([self._seed, self._replicas[which], index])
        starts = random.integers(0, share.size - self._window + 1, size=self._batch_size)
        return share[starts[:, None] + np.arange(self._window)]


def validation_batches(
    text: np.ndarray, *, num_batches: int, batch_size: int, window: int
) -> np.ndarray:
    """Evenly spaced windows of the held-out text, the same at every call and for every seed.

    Args:
      text: uint8 vector (`TextSplit.validation`).
      num_batches: batches to make, >= 1.
      batch_size: windows per batch, >= 1.
      window: bytes per window, >= 2.

    Returns:
      uint8 (num_batches, batch_size, window). Windows overlap only where the text is too short
      for that many.

    Raises:
      ValueError: for a number out of range, or a text shorter than one window.
    """
    _check_sizes(num_batches=num_batches, batch_size=batch_size, window=window)
    if text.size < window:
        raise ValueError(
            f"`data` must leave at least one window of {window} bytes for validation, "
            f"got {text.size}: use more text or a shorter context."
        )
    starts = np.linspace(0, text.size - window, num_batches * batch_size).astype(np.int64)
    windows = text[starts[:, None] + np.arange(window)]
    return windows.reshape(num_batches, batch_size, window)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 2 if name == "window" else 1
        if value < least:
            raise ValueError(f"`{name}` must be >= {least}, got {value}.")
