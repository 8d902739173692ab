"""Splits: disjoint, complete, balanced, the same every time."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxslowmo.data import Corpus, Document, split_corpus


def folder(sizes: list[int]) -> Corpus:
    # Every document has its own bytes, so that mixed-up text would show.
    rng = np.random.default_rng(0)
    return Corpus(
        "folder", tuple(Document(f"{i:03}", rng.bytes(size)) for i, size in enumerate(sizes))
    )


def single_file(size: int) -> Corpus:
    text = np.random.default_rng(0).bytes(size)
    return Corpus("f", (Document("f", text),), is_single_file=True)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=40),
    replicas=st.integers(1, 8),
    every=st.integers(2, 12),
)
def test_files_are_divided_and_none_twice(sizes, replicas, every):
    hypothesis.assume(len(sizes) > replicas)
    corpus = folder(sizes)
    split = split_corpus(corpus, replicas, validation_every=every)
    given = [name for names in split.share_documents for name in names]
    given += split.validation_documents
    assert sorted(given) == [document.name for document in corpus.documents]
    # One file of every so many, the middle one of each group.
    names = [document.name for document in corpus.documents]
    held_out = names[min(every, len(names)) // 2 :: every]
    assert list(split.validation_documents) == held_out[: max(1, len(names) - replicas)]
    assert split_corpus(corpus, replicas, validation_every=every).share_documents == (
        split.share_documents
    )
    assert len(split.shares) == replicas
    assert all(split.share_documents)
    text = {document.name: document.text for document in corpus.documents}
    for share, names in zip(split.shares, split.share_documents, strict=True):
        assert share.tobytes() == b"".join(text[name] for name in names)
    # Largest first: no share exceeds another by more than its smallest (last) document.
    lengths = [share.size for share in split.shares]
    last = [len(text[names[-1]]) for names in split.share_documents]
    assert all(a - b <= min(lengths) for a, b in zip(lengths, last, strict=True))


@hypothesis.given(size=st.integers(20, 2000), replicas=st.integers(1, 8), every=st.integers(2, 12))
def test_a_file_is_cut_into_disjoint_parts(size, replicas, every):
    corpus = single_file(size)
    split = split_corpus(corpus, replicas, validation_every=every)
    parts = [share.tobytes() for share in split.shares] + [split.validation.tobytes()]
    assert b"".join(parts) == corpus.documents[0].text
    lengths = [share.size for share in split.shares]
    assert min(lengths) > 0
    assert split.validation.size == max(1, size // every)
    assert max(lengths) - min(lengths) <= 1
