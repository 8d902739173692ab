"""Files that are written anew are whole at every moment; errors of the operating system."""

import os
import stat

import pytest

from jaxslowmo._support.files import atomic_path, is_temporary_file, write_atomic


def test_the_new_content_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "summary.json"
    for text in ("first", "sécond"):
        write_atomic(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]
    with atomic_path(tmp_path / "picture.png") as temporary:
        assert (temporary.parent, temporary.suffix) == (tmp_path, ".png")
        assert is_temporary_file(temporary)
        temporary.write_bytes(b"png")
    assert (tmp_path / "picture.png").read_bytes() == b"png"
    assert not is_temporary_file(path)


def test_after_an_error_it_is_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("old")

    def interrupted(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        interrupted(temporary)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_devices(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    write_atomic(os.devnull, "nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
