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
    corpus = read_corpus(tmp_path)
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
    assert corpus == read_corpus(tmp_path)


FILES = {"a.txt": b"one", "b/c.txt": b"two", "twin.txt": b"one", "image.png": b"\x89\0"}
CHANGES = [
    {"a.txt": b"One"},
    {"a.txt": None},
    {"d.txt": b"three"},
    {"a.txt": b"\0"},
    {"image.png": b"text"},
    {"a.txt": b"two", "b/c.txt": b"one"},
]


def test_the_fingerprint_tells_of_every_change_and_not_of_the_place(tmp_path):
    before, there = (read_corpus(write(tmp_path / name, FILES)) for name in ("x", "y/z"))
    assert before.fingerprint == there.fingerprint
    for i, change in enumerate(CHANGES):
        changed = {name: text for name, text in (FILES | change).items() if text is not None}
        after = read_corpus(write(tmp_path / f"after{i}", changed)).fingerprint
        assert after != before.fingerprint, change
    files = write(tmp_path, {"one.txt": b"text", "two.txt": b"text"})
    one, two = (read_corpus(files / f"{n}.txt") for n in ("one", "two"))
    assert one.is_single_file
    assert [(d.name, d.text) for d in one.documents] == [("one.txt", b"text")]
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    ("number", "where"),
    [(errno.EIO, "read_bytes"), (errno.EACCES, "read_bytes"), (errno.EACCES, "scandir")],
)
def test_what_cannot_be_read_is_skipped_unless_it_may_pass(tmp_path, monkeypatch, number, where):
    """A file server that does not answer is no reason to skip a file, or a folder."""
    write(tmp_path, {"a.txt": b"text", "b/b.txt": b"other"})
    holder = os if where == "scandir" else Path
    usual, name = getattr(holder, where), "b" if where == "scandir" else "b.txt"

    def failing(path, *args, **kwargs):
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(holder, where, failing)
    if number == errno.EIO:
        with pytest.raises(OSError, match="b") as raised:
            read_corpus(tmp_path)
        assert raised.value.errno == number
    else:
        skipped = "b/" if where == "scandir" else "b/b.txt"
        found = dict(read_corpus(tmp_path).skipped)
        assert found == {skipped: "unreadable (Permission denied)"}
