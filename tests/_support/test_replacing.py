"""Files that are written anew are whole at every moment."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jaxslowmo._support.files import is_unfinished, replacing, write_anew


def test_the_new_content_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "summary.json"
    for text in ("first", "sécond"):
        write_anew(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]
    with replacing(tmp_path / "picture.png") as temporary:
        assert (temporary.parent, temporary.suffix) == (tmp_path, ".png")
        assert is_unfinished(temporary)
        temporary.write_bytes(b"png")
    assert (tmp_path / "picture.png").read_bytes() == b"png"
    assert not is_unfinished(path)


def test_after_an_error_it_is_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("old")

    def interrupted(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        interrupted(temporary)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_anew(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(os.fstat(number).st_size))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("replace"), replace(self, to))
    )
    write_anew(tmp_path / "a", "four")
    assert calls == [4, "replace"]


def test_links_and_devices(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_anew(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    write_anew(os.devnull, "nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_kill_leaves_the_old_content(tmp_path):
    path = tmp_path / "statistics.json"
    path.write_text("old")
    program = (
        "import os, signal, sys\n"
        "from jaxslowmo._support.files import replacing\n"
        "with replacing(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = (other for other in tmp_path.iterdir() if other != path)
    assert is_unfinished(left)
