"""The folder of a run: names of its files, its lock, and what it holds. No jax."""

import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .._support.files import complete_steps, is_export, is_temporary_file, write_atomic
from ._errors import CommandError, write_errors

# What a run leaves in folders of its own, by their names; checkpoints with a suffix are incomplete.
_IN_FOLDERS = {
    "checkpoints": r"\d+(\..+)?",
    "logs": r"(process-\d+|killed-.+)\.txt",
    "tensorboard": r"events\.out\.tfevents\..+",
}
_FILES = (
    "config.json", "metrics.jsonl", "summary.json", "statistics.json", "loss.png",
    "compare.json", "compare.png",
)  # fmt: skip
_RUN_OF_A_COMPARISON = re.compile(r".+-seed\d+")
# Bytes at the end of metrics.jsonl that are read: more than its longest line.
_TAIL_BYTES = 2**16


class RunFolder:
    """A folder that holds a run, or a comparison of several runs; it may not exist.

    Args:
      path: path of the folder.
      token: token of its lock, if this process holds it.

    Attributes:
      path: path of the folder; `folder / name` is that of a file in it.
      token: token of its lock; "" if this process does not hold it.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path, self.token = path, token

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a file of JSON; {} if it is missing or damaged."""
        path = self / name
        return _parse_object(path.read_bytes()) if path.exists() else {}

    def newest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint; None without one."""
        with contextlib.suppress(OSError):
            return max(complete_steps(self / "checkpoints"), default=None)
        return None

    def describe_checkpoint(self) -> str:
        """Return a sentence on the step from which a run that starts again goes on."""
        step, path = self.newest_step(), self / "checkpoints"
        return (
            f"no checkpoint in {path}"
            if step is None
            else f"the last saved step is {step}, in {path}"
        )

    def newest_record_step(self) -> int | None:
        """Return the last step in metrics.jsonl; None without one."""
        try:
            with (self / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return None
        # Lines that are cut off or damaged are skipped.
        steps = (_parse_object(line).get("step") for line in reversed(lines))
        return next((step for step in steps if isinstance(step, int)), None)

    def check_no_earlier_run(self, *, resumes: bool | None) -> None:
        """Raise `CommandError` if the folder holds a run with which the command does not go on.

        Args:
          resumes: whether the command goes on with a run; None: it cannot.
        """
        is_comparison, newest = self._is_comparison(), self.newest_step()
        status = self.read_json("summary.json").get("status", "not finished")
        # A finished run without checkpoints cannot go on: it would train a new model.
        can_go_on = not is_comparison and (status != "finished" or newest is not None)
        signs = ("config.json", "metrics.jsonl", "summary.json", "compare.json")
        is_empty = newest is None and not any((self / name).exists() for name in signs)
        if is_empty or (resumes and can_go_on):
            return
        saved = "no checkpoint" if newest is None else f"a checkpoint of step {newest}"
        what = f"a run ({status}, last step {self.newest_record_step() or 0}, {saved})"
        what = "a comparison" if is_comparison else what
        resume = "--resume to go on with it, " if can_go_on and resumes is not None else ""
        raise CommandError(
            f"--out {self.path} holds {what}: give {resume}another folder, or --overwrite to "
            "delete it first"
        )

    def _is_comparison(self) -> bool:
        return "algorithms" in self.read_json("config.json") or (self / "compare.json").exists()

    def delete_run_files(self) -> None:
        """Delete the files of an earlier run or comparison, and nothing else; the lock stays."""
        # Checkpoints first: if this is killed, files that show that there was a run remain.
        for name, pattern in _IN_FOLDERS.items():
            _delete_matching(self / name, pattern)
        if is_export(self / "model"):
            shutil.rmtree(self / "model")
        # Only in a comparison: elsewhere a folder with such a name is another run.
        for path in sorted(self.path.iterdir()) if self._is_comparison() else ():
            if path.is_dir() and _RUN_OF_A_COMPARISON.fullmatch(path.name):
                RunFolder(path).delete_run_files()
                with contextlib.suppress(OSError):  # it holds something else, too
                    path.rmdir()
        for path in sorted(self.path.iterdir()):
            if path.name in _FILES or is_temporary_file(path):
                path.unlink()


@contextlib.contextmanager
def lock_folder(out: Path | None, command: str) -> Iterator[RunFolder]:
    """Run the block while the folder for results, made if missing, belongs to this process.

    It holds the lock of the folder, and says so in lock.json. After a `CommandError` a new folder
    is removed again if it is empty.

    Raises:
      CommandError: another process holds the lock, or the files cannot be made.
    """
    existed = out is not None and out.exists()
    folder = RunFolder(make_folder(out, command), uuid.uuid4().hex)
    try:
        with contextlib.ExitStack() as stack:
            with write_errors(folder.path):
                # The operating system frees the lock of a process that is gone.
                try:
                    stack.enter_context(FileLock(folder / "lock", timeout=0))
                except Timeout:
                    facts = folder.read_json("lock.json")
                    who = f"process {facts.get('pid')} on {facts.get('host')}"
                    who = f"{who} since {facts.get('since')}" if facts else "another process"
                    raise CommandError(
                        f"--out {folder.path} is in use by {who}: take another folder, or end "
                        "that run"
                    ) from None
                stack.callback(_remove_lock, folder)  # while it is held
                since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
                own = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
                write_atomic(folder / "lock.json", json.dumps(own | {"token": folder.token}))
            yield folder
    except CommandError:
        if not existed:
            with contextlib.suppress(OSError):
                folder.path.rmdir()
        raise


def _remove_lock(folder: RunFolder) -> None:
    # After the folder was deleted during the run, its lock may be that of another run.
    if folder.read_json("lock.json").get("token") == folder.token:
        (folder / "lock").unlink(missing_ok=True)
        (folder / "lock.json").unlink(missing_ok=True)


def make_folder(out: Path | None, command: str) -> Path:
    """Return the folder for results, made if missing; the default is runs/COMMAND-DATE-TIME.

    Raises:
      CommandError: it cannot be made or written to; with code 75 if a disk is full or a file
        server does not answer.
    """
    if out is None:
        # With microseconds: scripts start several runs within one second.
        out = Path("runs") / f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # several processes may try at once
            pass
    return out


def _delete_matching(folder: Path, names: str) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not re.fullmatch(names, path.name):
            continue
        if path.is_dir():
            # Renamed first, so that no half deleted folder looks like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}")))
        else:
            path.unlink()
    with contextlib.suppress(OSError):  # it holds something else, too
        folder.rmdir()


def _parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a text; {} if it is damaged or not an object."""
    try:
        facts = json.loads(content)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
