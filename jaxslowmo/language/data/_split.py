"""Who reads what: a held-out part, and one disjoint share per replica."""

import dataclasses
import heapq
import itertools

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
