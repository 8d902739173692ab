"""The lock of a folder: held by one, given back, taken over from who is gone, by one."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run import _lock
from jaxslowmo.cli.run._lock import FolderLock, sees_lock
from support.waiting import PATIENCE_SECONDS

HOLD = """
import sys, time
from pathlib import Path
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run._lock import FolderLock
try:
    with FolderLock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except CommandError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def holder(folder, seconds=600):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def write_lock(folder, **changes):
    facts = _lock._this_process() | {"token": "stale"} | changes
    (folder / "lock").write_text(json.dumps(facts))


def test_it_is_held_and_given_back(tmp_path):
    with FolderLock(tmp_path) as lock:
        facts = json.loads((tmp_path / "lock").read_text())
        assert (facts["pid"], facts["token"]) == (os.getpid(), lock.token)
        assert sees_lock(tmp_path, lock.token, 0)
        assert not sees_lock(tmp_path, "another", 0)
        with pytest.raises(CommandError, match="in use by process"), FolderLock(tmp_path):
            pass
        assert (tmp_path / "lock").exists()
    assert list(tmp_path.iterdir()) == []
    assert not sees_lock(tmp_path, lock.token, 0.3)


def test_a_second_process_is_told_by_whom_and_since_when(tmp_path, monkeypatch):
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        # It watches nothing.
        monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 2 * PATIENCE_SECONDS)
        before = time.monotonic()
        with pytest.raises(CommandError) as raised, FolderLock(tmp_path):
            pass
        assert time.monotonic() - before < PATIENCE_SECONDS
    message = str(raised.value)
    assert message.startswith(f"--out {tmp_path} is in use by process {process.pid} on ")
    assert message.endswith(": take another folder, or end that run")
    assert " since 20" in message


def test_a_killed_holder_is_recognised_at_once(tmp_path, monkeypatch):
    # Nothing needs to be watched, though the parent has not even taken note of the death.
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 600.0)
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        with FolderLock(tmp_path) as lock:
            assert sees_lock(tmp_path, lock.token, 0)
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_holder_elsewhere_that_ends_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 2 * PATIENCE_SECONDS)
    write_lock(tmp_path, host="elsewhere")
    threading.Timer(1.0, (tmp_path / "lock").unlink).start()
    before = time.monotonic()
    with FolderLock(tmp_path):
        assert 0.9 < time.monotonic() - before < PATIENCE_SECONDS


def test_a_number_that_another_process_has_by_now(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 600.0)
    write_lock(tmp_path, started="1")  # this process, had it begun with the machine
    with FolderLock(tmp_path) as lock:
        assert sees_lock(tmp_path, lock.token, 0)


def test_without_proc_the_number_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_started", lambda pid: None)
    monkeypatch.setattr(_lock, "_namespace", lambda: None)
    write_lock(tmp_path)
    with pytest.raises(CommandError, match="in use"), FolderLock(tmp_path):
        pass
    with holder(tmp_path / "missing") as process:
        process.kill()
        process.wait()
        write_lock(tmp_path, pid=process.pid)
        with FolderLock(tmp_path):
            pass


@pytest.mark.parametrize("content", [{"host": "elsewhere"}, {"namespace": "other"}, b"", b"[1]"])
def test_a_silent_holder_elsewhere_is_waited_for(tmp_path, monkeypatch, content):
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 1.0)
    if isinstance(content, bytes):
        (tmp_path / "lock").write_bytes(content)
    else:
        write_lock(tmp_path, **content)
    before = time.monotonic()
    with FolderLock(tmp_path) as lock:
        assert time.monotonic() - before >= 1
        assert sees_lock(tmp_path, lock.token, 0)


def test_a_holder_elsewhere_that_touches_its_lock_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_TOUCH_SECONDS", 0.2)
    here = _lock._this_process()
    monkeypatch.setattr(_lock, "_this_process", lambda: here | {"host": "elsewhere"})
    with FolderLock(tmp_path):
        # A clock that differs by an hour says nothing.
        os.utime(tmp_path / "lock", (0, 0))
        monkeypatch.setattr(_lock, "_this_process", lambda: here)
        with pytest.raises(CommandError, match="on elsewhere since"), FolderLock(tmp_path):
            pass


def test_of_many_newcomers_one_takes_a_stale_lock(tmp_path):
    for _ in range(20):
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


def test_processes_that_come_at_once(tmp_path):
    write_lock(tmp_path, started="1")
    with contextlib.ExitStack() as stack:
        all_of = [stack.enter_context(holder(tmp_path)) for _ in range(4)]
        lines = sorted(process.stdout.readline() for process in all_of)
    assert [line for line in lines if line == "held\n"] == ["held\n"]
    assert all("is in use by process" in line for line in lines if line != "held\n")


def test_a_newcomer_that_was_killed_while_it_took_over(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 0.5)
    write_lock(tmp_path, started="1")
    dies = "import os\nfrom pathlib import Path\nPath.replace = lambda *_: os._exit(9)\n"
    ended = subprocess.run([sys.executable, "-c", dies + HOLD, str(tmp_path), "0"], check=False)
    assert ended.returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 2), (errno.EIO, 75)])
def test_a_file_system_that_takes_no_files(tmp_path, monkeypatch, number, code):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    said = f"{tmp_path}: {os.strerror(number)}"
    with pytest.raises(CommandError, match=re.escape(said)) as raised, FolderLock(tmp_path):
        pass
    assert raised.value.code == code


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
        with pytest.raises(CommandError, match="in use by process"), FolderLock(folder):
            pass
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_deleted_meanwhile(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with FolderLock(folder):
        (folder / "lock").unlink()
        folder.rmdir()
    with FolderLock(tmp_path):
        write_lock(tmp_path)  # somebody else's, who made the folder again
    assert (tmp_path / "lock").exists()
