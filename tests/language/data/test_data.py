"""Corpora, their split over replicas, and batches of windows."""

import errno
import json
import os
import zlib
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxslowmo import data


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_default_is_the_standard_library_without_tests_and_packages():
    corpus = data.read_corpus()
    names = [document.name for document in corpus.documents]
    assert corpus.source == str(data.default_corpus_path())
    assert corpus.num_bytes > 5_000_000
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    left_out = {"test", "tests", "site-packages", "__pycache__"}
    assert not [name for name in names if left_out & set(name.split("/"))]


def test_a_folder_is_read_in_order_and_what_is_no_text_is_listed(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": b"second",
            "a/z.md": b"first",
            "empty.txt": b"",
            "image.png": b"\x89PNG\0\0",
            "packed.bin": zlib.compress(bytes(range(1, 255)) * 9).replace(b"\0", b"\1"),
            "copy.txt": b"second",
            # Of what is no UTF-8 two of 100 may be control characters.
            "three.txt": b"\xff" + b"\x01" * 3 + b"\n" * 96,
            "two.txt": b"\xff" + b"\x01" * 2 + b"\n" * 97,
            "latin.txt": "naïve café\n".encode("latin-1") * 20,
            ".hidden": b"hidden",
            ".git/config": b"hidden",
            "__pycache__/x.txt": b"hidden",
        },
    )
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    corpus = data.read_corpus(tmp_path)
    assert [d.name for d in corpus.documents] == ["a/z.md", "b.txt", "latin.txt", "two.txt"]
    assert dict(corpus.skipped) == {
        "copy.txt": "a duplicate of b.txt",
        "empty.txt": "empty",
        "gone.txt": "not a regular file",
        "image.png": "binary",
        "packed.bin": "binary",
        "three.txt": "binary",
    }
    assert corpus.num_bytes == len(b"firstsecond") + 11 * 20 + 100
    assert corpus == data.read_corpus(tmp_path)


FILES = {"a.txt": b"one", "b/c.txt": b"two", "twin.txt": b"one", "image.png": b"\x89\0"}
CHANGES = [
    {"a.txt": b"One"},
    {"d.txt": b"three"},
    {"a.txt": b"\0"},
    {"image.png": b"text"},
    {"a.txt": b"two", "b/c.txt": b"one"},
]


def test_the_fingerprint_tells_of_every_change_and_not_of_the_place(tmp_path):
    before, there = (data.read_corpus(write(tmp_path / name, FILES)) for name in ("x", "y/z"))
    assert before.fingerprint == there.fingerprint
    for i, change in enumerate(CHANGES):
        after = data.read_corpus(write(tmp_path / f"after{i}", FILES | change)).fingerprint
        assert after != before.fingerprint, change
    files = write(tmp_path, {"one.txt": b"text", "two.txt": b"text"})
    one, two = (data.read_corpus(files / f"{n}.txt") for n in ("one", "two"))
    assert one.is_single_file
    assert [(d.name, d.text) for d in one.documents] == [("one.txt", b"text")]
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(("holder", "where"), [(Path, "read_bytes"), (os, "scandir")])
def test_what_cannot_be_read_is_skipped_unless_it_may_pass(tmp_path, monkeypatch, holder, where):
    """A file server that does not answer is no reason to skip a file, or a folder."""
    write(tmp_path, {"a.txt": b"text", "b/b.txt": b"other"})
    usual, name = getattr(holder, where), "b" if where == "scandir" else "b.txt"
    numbers = [errno.EACCES, errno.EIO]

    def failing(path, *args, **kwargs):
        if Path(path).name == name:
            raise OSError(numbers[0], os.strerror(numbers[0]), str(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(holder, where, failing)
    skipped = "b/" if where == "scandir" else "b/b.txt"
    assert dict(data.read_corpus(tmp_path).skipped) == {skipped: "unreadable (Permission denied)"}
    del numbers[0]
    with pytest.raises(OSError, match="b"):
        data.read_corpus(tmp_path)


def folder(sizes: list[int]) -> data.Corpus:
    # Every document has its own bytes, so that mixed-up text would show.
    rng = np.random.default_rng(0)
    return data.Corpus(
        "folder", tuple(data.Document(f"{i:03}", rng.bytes(size)) for i, size in enumerate(sizes))
    )


@hypothesis.given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=40),
    replicas=st.integers(1, 8),
    every=st.integers(2, 12),
)
def test_files_are_divided_and_none_twice(sizes, replicas, every):
    hypothesis.assume(len(sizes) > replicas)
    corpus = folder(sizes)
    split = data.split_corpus(corpus, replicas, validation_every=every)
    given = [name for names in split.share_documents for name in names]
    given += split.validation_documents
    assert sorted(given) == [document.name for document in corpus.documents]
    # One file of every so many, the middle one of each group.
    names = [document.name for document in corpus.documents]
    held_out = names[min(every, len(names)) // 2 :: every]
    assert list(split.validation_documents) == held_out[: max(1, len(names) - replicas)]
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
    text = np.random.default_rng(0).bytes(size)
    corpus = data.Corpus("f", (data.Document("f", text),), is_single_file=True)
    split = data.split_corpus(corpus, replicas, validation_every=every)
    parts = [share.tobytes() for share in split.shares] + [split.validation.tobytes()]
    assert b"".join(parts) == text
    lengths = [share.size for share in split.shares]
    assert min(lengths) > 0
    assert split.validation.size == max(1, size // every)
    assert max(lengths) - min(lengths) <= 1


def shares_of(*sizes: int) -> list[np.ndarray]:
    """Shares whose bytes tell the replica (high half) and count up (low half)."""
    return [(16 * i + np.arange(size) % 16).astype(np.uint8) for i, size in enumerate(sizes)]


def batches_of(
    *sizes: int, seed: int = 0, batch_size: int = 3, window: int = 5
) -> data.TextBatches:
    return data.TextBatches(shares_of(*sizes), batch_size=batch_size, window=window, seed=seed)


@hypothesis.given(
    sizes=st.lists(st.integers(20, 99), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
    index=st.integers(0, 10**6),
)
def test_windows_are_stretches_of_the_replica_s_own_share(sizes, seed, index):
    batch = batches_of(*sizes, seed=seed).batch(index)
    assert batch.shape == (3 * len(sizes), 5)
    assert batch.dtype == np.uint8
    assert (batch // 16 == np.repeat(np.arange(len(sizes)), 3)[:, None]).all()
    assert (np.diff(batch.astype(int) % 16, axis=1) % 16 == 1).all()


def test_batches_depend_on_seed_replica_and_index_alone():
    together, alone = batches_of(40, 50, 60), batches_of(40)
    np.testing.assert_array_equal(together.batch(7)[:3], alone.batch(7))
    assert not np.array_equal(alone.batch(7), alone.batch(8))
    assert not np.array_equal(alone.batch(7), batches_of(40, seed=1).batch(7))
    same = data.TextBatches([np.arange(99, dtype=np.uint8)] * 2, batch_size=9, window=5, seed=0)
    assert not np.array_equal(same.batch(0)[:9], same.batch(0)[9:])


def test_a_process_makes_the_batches_of_its_own_replicas():
    shares = shares_of(40, 50, 60)
    options = {"batch_size": 3, "window": 5, "seed": 0, "replicas": (0, 2)}
    own = data.TextBatches([shares[0], shares[2]], **options)
    every = batches_of(40, 50, 60).batch(7).reshape(3, 3, 5)
    np.testing.assert_array_equal(own.batch(7), every[[0, 2]].reshape(-1, 5))


def test_a_run_begins_with_batch_0_and_resumes_where_it_stopped():
    first, resumed = batches_of(40, 50), batches_of(40, 50)
    for index in range(4):
        np.testing.assert_array_equal(next(first), batches_of(40, 50).batch(index))
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    np.testing.assert_array_equal(next(resumed), next(first))


@hypothesis.given(size=st.integers(6, 500), count=st.integers(1, 9))
def test_validation_windows_cover_the_text_evenly(size, count):
    text = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    windows = data.validation_batches(text, num_batches=count, batch_size=2, window=6)
    assert windows.shape == (count, 2, 6)
    flat, last = windows.reshape(-1, 6), size - 6
    for i, window in enumerate(flat):
        start = last * i / (2 * count - 1)
        near = {int(start - 1e-9), int(start + 1e-9)}  # rounded as floats are
        assert any(np.array_equal(window, text[s : s + 6]) for s in near)
