"""Splits: disjoint, complete, balanced, the same every time."""

import hypothesis
import numpy as np
import pytest
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
    assert split.validation_documents
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
    assert split.validation.size > 0
    assert max(lengths) - min(lengths) <= 1


def test_the_same_corpus_is_split_the_same_way():
    a, b = (split_corpus(folder([5, 9, 1, 7, 7, 3, 8]), 3) for _ in range(2))
    assert a.share_documents == b.share_documents
    assert a.validation_documents == b.validation_documents


@pytest.mark.parametrize(
    ("corpus", "replicas", "every", "message"),
    [
        (folder([9] * 4), 0, 10, "`replicas` must be >= 1, got 0"),
        (folder([9] * 4), 2, 1, "`validation_every` must be >= 2, got 1"),
        (folder([9]), 1, 10, "at least two text files.*pass that file itself"),
        (folder([9] * 4), 4, 10, "got 4 replicas for 4 text files in folder; use at most 3"),
        (single_file(8), 8, 10, "got 8 replicas for a file of 8 bytes"),
    ],
)
def test_more_replicas_than_text_is_refused(corpus, replicas, every, message):
    with pytest.raises(ValueError, match=message):
        split_corpus(corpus, replicas, validation_every=every)
