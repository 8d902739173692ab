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
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ..._support.files import complete_steps, is_export, is_unfinished, write_anew
from .._errors import CommandError, writing_to

if TYPE_CHECKING:
    from jaxslowmo.data import Contents

_CHECKPOINT = re.compile(r"\d+(\..+)?")  # with a suffix: moved away, or incomplete
_LOG = re.compile(r"(process-\d+|killed-.+)\.txt")
_EVENTS = re.compile(r"events\.out\.tfevents\..+")
_RUN_OF_A_COMPARISON = re.compile(r".+-seed\d+")
_MOST_FILES = 100_000  # longer listings are not written
# Bytes at the end of metrics.jsonl that are read: more than its longest line.
_TAIL_BYTES = 2**16


class RunFolder:
    """A folder that holds a run, or a comparison of several runs; it may not exist.

    Args:
      path: path of the folder.
      token: token of its lock, if this process holds it.

    Attributes:
      path: path of the folder.
      token: token of its lock; "" if this process does not hold it.
      config, metrics, summary, statistics, corpus: paths of files of a run.
      comparison, picture: paths of files of a comparison.
      lock, holder: path of the lock of the folder, and of what is known about the process that
        holds it.
      checkpoints, model, logs, tensorboard: paths of folders of a run.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path, self.token = path, token
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.statistics = path / "statistics.json"
        self.corpus = path / "corpus.json"
        self.comparison = path / "compare.json"
        self.picture = path / "compare.png"
        self.lock, self.holder = path / "lock", path / "lock.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"

    def saved_steps(self) -> tuple[int, ...]:
        """Return the steps of complete checkpoints, ascending; () if the folder cannot be read."""
        try:
            return complete_steps(self.checkpoints)
        except OSError:
            return ()

    def newest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint; None without one."""
        return max(self.saved_steps(), default=None)

    def last_saved(self) -> str:
        """Return a sentence on the step from which a run that starts again goes on."""
        step = self.newest_step()
        if step is None:
            return f"no checkpoint in {self.checkpoints}"
        return f"the last saved step is {step}, in {self.checkpoints}"

    def last_recorded(self) -> int | None:
        """Return the last step in metrics.jsonl; None without one."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return None
        # Lines that are cut off or damaged are skipped.
        steps = (_facts_of(line).get("step") for line in reversed(lines))
        return next((step for step in steps if isinstance(step, int)), None)

    def holding_token(self) -> str | None:
        """Return the token of the process that holds the lock, or that has last held it."""
        return _facts(self.holder).get("token")

    def refuse_leftovers(self, *, may_resume: bool, resumes: bool = False) -> None:
        """Raise `CommandError` if the folder holds a run with which the command does not go on.

        Args:
          may_resume: whether the command can go on with a run; no command can with a comparison.
          resumes: whether it goes on with a run.

        Raises:
          CommandError: the message describes what is in the folder, and what the user can do.
        """
        # A finished run without checkpoints cannot go on: it would train a new model.
        is_over = _facts(self.summary).get("status") == "finished" and not self.saved_steps()
        can_go_on = may_resume and not self._is_comparison() and not is_over
        leftovers = None if can_go_on and resumes else self.describe_leftovers()
        if leftovers:
            resume = "--resume to go on with it, " if can_go_on else ""
            raise CommandError(
                f"--out {self.path} holds {leftovers}: give {resume}another folder, or --overwrite "
                "to delete it first"
            )

    def describe_leftovers(self) -> str | None:
        """Return a description of the run or comparison in the folder; None without one."""
        count = len(self.saved_steps())
        signs = (self.config, self.metrics, self.summary, self.comparison)
        if not count and not any(path.exists() for path in signs):
            return None
        if self._is_comparison():
            names = _facts(self.config).get("algorithms", ["algorithms"])
            state = "finished" if self.comparison.exists() else "not finished"
            return f"a comparison of {', '.join(names)} ({state})"
        status = _facts(self.summary).get("status", "not finished")
        step = self.last_recorded() or 0
        return f"a run ({status}, last step {step}, {count or 'no'} checkpoint{'s' * (count > 1)})"

    def _is_comparison(self) -> bool:
        return "algorithms" in _facts(self.config) or self.comparison.exists()

    def sweep(self, *, keep: Path | None = None) -> None:
        """Delete the files of an earlier run or comparison, and nothing else; the lock stays.

        Args:
          keep: a file that this run has already written.
        """
        # Checkpoints first: if the sweep is killed, files that show that there was a run remain.
        _sweep_folder(self.checkpoints, _CHECKPOINT)
        if is_export(self.model):
            shutil.rmtree(self.model)
        _sweep_folder(self.logs, _LOG)
        _sweep_folder(self.tensorboard, _EVENTS)
        # Only in a comparison: elsewhere a folder with such a name is another run.
        for path in sorted(self.path.iterdir()) if self._is_comparison() else ():
            if path.is_dir() and _RUN_OF_A_COMPARISON.fullmatch(path.name):
                RunFolder(path).sweep()
                with contextlib.suppress(OSError):  # it holds something else, too
                    path.rmdir()
        files = {self.config, self.metrics, self.summary, self.statistics, self.corpus}
        files = (files | {self.comparison, self.picture}) - {keep}
        for path in sorted(self.path.iterdir()):
            if path in files or is_unfinished(path):
                path.unlink()

    def keep_listing(self, corpus: "Contents") -> None:
        """Write corpus.json, so that later messages can name files that have changed."""
        files = corpus.listing if len(corpus.listing) <= _MOST_FILES else None
        facts = {"fingerprint": corpus.fingerprint, "source": corpus.source, "files": files}
        write_anew(self.corpus, json.dumps(facts, indent=1) + "\n")

    def listing(self, fingerprint: str) -> dict[str, str] | None:
        """Return the listing of the corpus with this fingerprint, if corpus.json has it."""
        facts = _facts(self.corpus)
        return facts.get("files") if facts.get("fingerprint") == fingerprint else None


@contextlib.contextmanager
def locked_folder(out: Path | None, command: str) -> Iterator[RunFolder]:
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
            with writing_to(folder.path):
                # The operating system frees the lock of a process that is gone.
                try:
                    stack.enter_context(FileLock(folder.lock, timeout=0))
                except Timeout:
                    raise CommandError(_in_use(folder)) from None
                stack.callback(_remove_lock, folder)  # while it is held
                since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
                facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
                write_anew(folder.holder, json.dumps(facts | {"token": folder.token}))
            yield folder
    except CommandError:
        if not existed:
            with contextlib.suppress(OSError):
                if [*folder.path.iterdir()] == [folder.corpus]:  # all that a refused run writes
                    folder.corpus.unlink()
                folder.path.rmdir()
        raise


def _remove_lock(folder: RunFolder) -> None:
    # After the folder was deleted during the run, its lock may be that of another run.
    if folder.holding_token() == folder.token:
        folder.lock.unlink(missing_ok=True)
        folder.holder.unlink(missing_ok=True)


def _in_use(folder: RunFolder) -> str:
    facts = _facts(folder.holder)
    who = "process {pid} on {host} since {since}".format(**facts) if facts else "another process"
    return f"--out {folder.path} is in use by {who}: take another folder, or end that run"


def make_folder(out: Path | None, command: str) -> Path:
    """Return the folder for results, made if missing; the default is runs/COMMAND-DATE-TIME.

    Raises:
      CommandError: it cannot be made or written to; with code 75 if a disk is full or a file
        server does not answer.
    """
    if out is None:
        # With microseconds: scripts start several runs within one second.
        out = Path("runs") / f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # several processes may try at once
            pass
    return out


def _sweep_folder(folder: Path, names: re.Pattern[str]) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not names.fullmatch(path.name):
            continue
        if path.is_dir():
            # Renamed first, so that no half deleted folder looks like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}")))
        else:
            path.unlink()
    with contextlib.suppress(OSError):  # it holds something else, too
        folder.rmdir()


def _facts_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a text; {} if it is damaged or not an object."""
    try:
        facts = json.loads(content)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _facts(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; {} if it is missing or damaged."""
    return _facts_of(path.read_bytes()) if path.exists() else {}
