"""Corpora: what is read, what is skipped, and what is refused."""

import errno
import os
import zlib
from pathlib import Path

import pytest

from jaxslowmo.data import default_corpus_path, read_corpus


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_default_is_the_standard_library_without_tests_and_packages():
    corpus = read_corpus()
    names = [document.name for document in corpus.documents]
    assert corpus.source == str(default_corpus_path())
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
            "latin.txt": "naïve café\n".encode("latin-1") * 20,
            ".hidden": b"hidden",
            ".git/config": b"hidden",
            "__pycache__/x.txt": b"hidden",
        },
    )
    corpus = read_corpus(tmp_path)
    assert [d.name for d in corpus.documents] == ["a/z.md", "b.txt", "latin.txt"]
    assert dict(corpus.skipped) == {
        "copy.txt": "a duplicate of b.txt",
        "empty.txt": "empty",
        "image.png": "binary",
        "packed.bin": "binary",
    }
    assert corpus.num_bytes == len(b"firstsecond") + 11 * 20
    assert corpus == read_corpus(tmp_path)


def test_a_broken_link_is_skipped(tmp_path):
    write(tmp_path, {"a.txt": b"text"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert dict(read_corpus(tmp_path).skipped) == {"gone.txt": "not a regular file"}


def test_a_file_is_a_corpus_of_one_document(tmp_path):
    corpus = read_corpus(write(tmp_path, {"book.txt": b"text"}) / "book.txt")
    assert corpus.is_single_file
    assert [(d.name, d.text) for d in corpus.documents] == [("book.txt", b"text")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "`data` must be a file or a folder, got an empty path"),
        ("missing", "`data` must be an existing file or folder, got '.*missing'"),
        ("none", "`data` must hold at least one text file; found no file in .*none"),
        ("binary", "found all 2 files are binary, empty or unreadable in .*binary"),
        ("binary/a.bin", "`data` must be a text file, but '.*a.bin' is binary"),
        ("binary/b.txt", "`data` must be a text file, but '.*b.txt' is empty"),
    ],
)
def test_what_holds_no_text_is_refused(tmp_path, path, message):
    write(tmp_path, {"binary/a.bin": b"\0", "binary/b.txt": b""})
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=message):
        read_corpus(tmp_path / path if path else "")


FILES = {"a.txt": b"one", "b/c.txt": b"two", "twin.txt": b"one", "image.png": b"\x89\0"}


@pytest.mark.parametrize(
    "change",
    [
        {"a.txt": b"One"},
        {"a.txt": None},
        {"d.txt": b"three"},
        {"a.txt": b"\0"},
        {"image.png": b"text"},
        {"a.txt": b"two", "b/c.txt": b"one"},
    ],
    ids=["replaced", "removed", "added", "binary", "text", "swapped"],
)
def test_the_fingerprint_tells_of_every_change(tmp_path, change):
    before = read_corpus(write(tmp_path / "before", FILES)).contents.fingerprint
    changed = {name: text for name, text in (FILES | change).items() if text is not None}
    assert read_corpus(write(tmp_path / "after", changed)).contents.fingerprint != before


def test_the_same_content_elsewhere_has_the_same_fingerprint(tmp_path):
    here = read_corpus(write(tmp_path / "here", FILES))
    there = read_corpus(write(tmp_path / "there" / "deep", FILES))
    assert here.contents.fingerprint == there.contents.fingerprint
    assert here.contents.listing == there.contents.listing
    assert set(here.contents.listing) == set(FILES)
    assert here.contents.listing["a.txt"].startswith("3 7692c3ad3540bb803c020b3aee66cd88")
    assert here.contents.listing["twin.txt"] == "a duplicate of a.txt"
    files = write(tmp_path, {"one.txt": b"text", "two.txt": b"text", "other.txt": b"texts"})
    one, two, other = (
        read_corpus(files / f"{n}.txt").contents.fingerprint for n in ("one", "two", "other")
    )
    assert one == two != other


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("where", ["stat", "read_bytes"])
def test_a_file_server_that_does_not_answer_is_no_reason_to_skip(
    tmp_path, monkeypatch, number, where
):
    write(tmp_path, {"a.txt": b"text", "b.txt": b"other"})
    usual = getattr(Path, where)

    def failing(self, *args, **kwargs):
        if self.name == "b.txt":
            raise OSError(number, os.strerror(number), str(self))
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(Path, where, failing)
    with pytest.raises(OSError, match=r"b\.txt") as raised:
        read_corpus(tmp_path)
    assert raised.value.errno == number


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch, number):
    write(tmp_path, {"a.txt": b"text", "sub/b.txt": b"other"})
    usual = os.scandir

    def failing(path):
        if Path(path).name == "sub":
            raise OSError(number, os.strerror(number), str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", failing)
    if number == errno.EIO:
        with pytest.raises(OSError, match="sub"):
            read_corpus(tmp_path)
    else:
        assert dict(read_corpus(tmp_path).skipped) == {"sub/": "unreadable (Permission denied)"}


def test_a_file_that_may_not_be_read_is_skipped(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": b"text", "b.txt": b"other"})
    usual = Path.read_bytes

    def failing(self):
        if self.name == "b.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return usual(self)

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert dict(read_corpus(tmp_path).skipped) == {"b.txt": "unreadable (Permission denied)"}
