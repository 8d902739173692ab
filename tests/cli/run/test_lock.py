"""The lock of a folder: held by one process, free again when that one has ended or was killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run._run_folder import locked_folder

HOLD = """
import sys, time
from pathlib import Path
from jaxslowmo.cli.run._run_folder import locked_folder
with locked_folder(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def takes(folder):
    with locked_folder(folder, "train") as held:
        return held.holding_token() == held.token


def test_it_is_held_and_given_back(tmp_path):
    with locked_folder(tmp_path, "train") as held:
        facts = json.loads((tmp_path / "lock.json").read_text())
        assert (facts["pid"], facts["token"]) == (os.getpid(), held.token)
        with pytest.raises(CommandError, match=f"--out {tmp_path} .* process {os.getpid()} on"):
            takes(tmp_path)
        assert held.holding_token() == held.token
        (tmp_path / "lock.json").write_text("[1]")  # damaged
        with pytest.raises(CommandError, match="in use by another process"):
            takes(tmp_path)
        (tmp_path / "lock.json").write_text(json.dumps(facts))
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    """The parent has not even taken note of the death."""
    with holder(tmp_path) as process:
        with pytest.raises(
            CommandError, match=rf"--out {tmp_path} .* {process.pid} on .* since 20"
        ):
            takes(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert takes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_many_processes_one_takes_the_lock_of_a_process_that_was_killed(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "lock.json").write_text('{"pid": 1, "host": "gone", "since": "2026", "token": ""}')
    inside, most, refused, errors = [], [], [], []
    start = threading.Barrier(8)

    def come():
        start.wait()
        try:
            with locked_folder(tmp_path, "train"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
        except CommandError as error:
            refused.append(error)
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


def test_the_lock_of_another_run_in_a_folder_that_was_deleted_stays(tmp_path):
    folder = tmp_path / "out"
    with locked_folder(folder, "train"):
        for name in ("lock", "lock.json"):
            (folder / name).unlink()
        folder.rmdir()
        with holder(folder):
            pass  # it is killed, which leaves its files
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "lock.json"]
