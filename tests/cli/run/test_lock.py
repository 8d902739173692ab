"""The lock of a folder: held by one, given back, taken over from who is gone, by one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run import _lock
from jaxslowmo.cli.run._lock import FolderLock, sees_lock

HOLD = """
import sys, time
from pathlib import Path
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run._lock import FolderLock
try:
    with FolderLock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(600)
except CommandError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Watching a lock would take longer than any test: it is done only where a test says so."""

    def watching_for(seconds):
        monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", seconds)

    watching_for(600.0)
    return watching_for


def write_lock(folder, **changes):
    facts = _lock._this_process() | {"token": "stale"} | changes
    (folder / "lock").write_text(json.dumps(facts))


def takes(folder):
    with FolderLock(folder) as lock:
        return sees_lock(folder, lock.token, 0)


def test_it_is_held_and_given_back(tmp_path):
    with FolderLock(tmp_path) as lock:
        facts = json.loads((tmp_path / "lock").read_text())
        assert (facts["pid"], facts["token"]) == (os.getpid(), lock.token)
        assert sees_lock(tmp_path, lock.token, 0)
        assert not sees_lock(tmp_path, "another", 0)
        with pytest.raises(CommandError, match=f"process {os.getpid()}"):
            takes(tmp_path)
        assert (tmp_path / "lock").exists()
    assert list(tmp_path.iterdir()) == []
    assert not sees_lock(tmp_path, lock.token, 0.3)


def test_a_second_process_is_told_by_whom_until_that_is_killed(tmp_path):
    """Nothing needs to be watched, though the parent has not even taken note of the death."""
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(
            CommandError, match=rf"--out {tmp_path} .* {process.pid} on .* since 20"
        ):
            takes(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert takes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_who_is_alive_is_known_without_proc_and_by_the_start(tmp_path, monkeypatch):
    write_lock(tmp_path, started="1")  # this process, had it begun with the machine
    assert takes(tmp_path)
    monkeypatch.setattr(_lock, "_started", lambda pid: None)
    monkeypatch.setattr(_lock, "_namespace", lambda: None)
    write_lock(tmp_path)
    with pytest.raises(CommandError, match="in use"):
        takes(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_lock(tmp_path, pid=ended.pid)
    assert takes(tmp_path)


@pytest.mark.parametrize("content", [{"host": "elsewhere"}, {"namespace": "other"}, b"", b"[1]"])
def test_a_silent_holder_elsewhere_is_waited_for(tmp_path, patience, content):
    patience(0.3)
    if isinstance(content, bytes):
        (tmp_path / "lock").write_bytes(content)
    else:
        write_lock(tmp_path, **content)
    before = time.monotonic()
    assert takes(tmp_path)
    assert time.monotonic() - before >= 0.3


def test_a_holder_elsewhere_that_ends_meanwhile_or_touches_its_lock(tmp_path, monkeypatch):
    write_lock(tmp_path, host="elsewhere")
    threading.Timer(0.5, (tmp_path / "lock").unlink).start()
    assert takes(tmp_path)
    monkeypatch.setattr(_lock, "_TOUCH_SECONDS", 0.2)
    here = _lock._this_process()
    monkeypatch.setattr(_lock, "_this_process", lambda: here | {"host": "elsewhere"})
    with FolderLock(tmp_path):
        # A clock that differs by an hour says nothing.
        os.utime(tmp_path / "lock", (0, 0))
        monkeypatch.setattr(_lock, "_this_process", lambda: here)
        with pytest.raises(CommandError, match="on elsewhere since"):
            takes(tmp_path)


def test_of_many_newcomers_one_takes_a_stale_lock(tmp_path):
    for _ in range(10):
        write_lock(tmp_path, started="1")
        inside, most, errors, refused = [], [], [], []
        start = threading.Barrier(8)

        def come(start=start, inside=inside, most=most, errors=errors, refused=refused):
            try:
                lock = FolderLock(tmp_path)
                start.wait()
                with lock:
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.05)
                    inside.pop()
            except CommandError:
                refused.append(1)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=come) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert set(most) == {1}
        assert len(most) + len(refused) == 8
        assert list(tmp_path.iterdir()) == []


def test_it_comes_back_with_a_folder_that_was_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_TOUCH_SECONDS", 0.02)
    folder = tmp_path / "out"
    folder.mkdir()
    with FolderLock(folder) as lock:
        (folder / "lock").unlink()
        folder.rmdir()
        time.sleep(0.1)
        assert not folder.exists()
        folder.mkdir()
        assert sees_lock(folder, lock.token, 60)
        with pytest.raises(CommandError, match="in use by process"):
            takes(folder)
        write_lock(folder)  # somebody else's, who made the folder again
    assert (folder / "lock").exists()
