"""The folder of a run: what its files are called, whose it is, and what lies there; without jax."""

import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._support.files import complete_steps, is_unfinished, write_anew
from .._errors import CommandError, writing_to
from ._lock import FolderLock, facts_of

if TYPE_CHECKING:
    from jaxslowmo.data import Contents

_LOCK_OF_THE_PAST = re.compile(r"lock\.[0-9a-f]+")
_CHECKPOINT = re.compile(r"\d+(\..+)?")  # with an ending: set aside, or not complete
_LOG = re.compile(r"process-\d+\.txt")
_EVENTS = re.compile(r"events\.out\.tfevents\..+")
_RUN_OF_A_COMPARISON = re.compile(r".+-seed\d+")
_MOST_FILES = 100_000  # of a list that is kept
# The end of metrics.jsonl that is read: more than its longest line.
_TAIL_BYTES = 2**16


class RunFolder:
    """A folder that holds a run, or a comparison of some; it may be missing.

    Args:
      path: of the folder.
      token: of its lock, where this process has it.

    Attributes:
      path: of the folder.
      token: of its lock; "" where another process has it, or none.
      config, metrics, summary, statistics, corpus: paths of files of a run.
      comparison, picture: paths of files of a comparison.
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
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"

    def saved_steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, ascending; () where they cannot be looked at."""
        try:
            return complete_steps(self.checkpoints)
        except OSError:
            return ()

    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint; None without any."""
        return max(self.saved_steps(), default=None)

    def last_saved(self) -> str:
        """Say from which step a run that starts again would go on."""
        step = self.newest_step()
        if step is None:
            return f"no checkpoint in {self.checkpoints}"
        return f"the last saved step is {step}, in {self.checkpoints}"

    def last_recorded(self) -> int | None:
        """Return the last step in the metrics; None where there is none."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return None
        # A line that was cut off, or is damaged, does not count.
        steps = (facts_of(line).get("step") for line in reversed(lines))
        return next((step for step in steps if isinstance(step, int)), None)

    def refuse_leftovers(self, *, may_resume: bool, resumes: bool = False) -> None:
        """End a start in a folder that holds what the command does not go on with.

        Args:
          may_resume: whether the command can go on with a run. With a comparison none can.
          resumes: whether it does.

        Raises:
          CommandError: what lies there, and what can be done.
        """
        # A run that is finished and kept nothing to go on from would be another run.
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
        """Describe the run or the comparison that lies here; None where there is none."""
        count = len(self.saved_steps())
        signs = (self.config, self.metrics, self.summary, self.comparison)
        if not count and not any(path.exists() for path in signs):
            return None
        config, summary = _facts(self.config), _facts(self.summary)
        if self._is_comparison():
            names = config.get("algorithms")
            of = ", ".join(map(str, names)) if isinstance(names, list) else "algorithms"
            state = "finished" if self.comparison.exists() else "not finished"
            return f"a comparison of {of} ({state})"
        part = config.get("algorithm")
        of = part.get("algorithm") if isinstance(part, dict) else None
        of = of or summary.get("algorithm") or "an algorithm"
        counted = f"{count or 'no'} checkpoint{'s' * (count > 1)}"
        status = summary.get("status") or "not finished"
        recorded = self.last_recorded()
        step = summary.get("steps", "unknown" if recorded is None else recorded)
        return f"a run of {of} (last step {step}, {status}, {counted})"

    def _is_comparison(self) -> bool:
        return "algorithms" in _facts(self.config) or self.comparison.exists()

    def sweep(self, *, keep: Path | None = None) -> None:
        """Delete what an earlier run or comparison left, and nothing else. The lock stays.

        Args:
          keep: a file that this run has written already.
        """
        # The checkpoints first: a sweep that is killed must leave what tells of a run to the last.
        _sweep_folder(self.checkpoints, _CHECKPOINT)
        if is_export(self.model):
            shutil.rmtree(self.model)
        _sweep_folder(self.logs, _LOG)
        _sweep_folder(self.tensorboard, _EVENTS)
        # Elsewhere a folder of such a name is a run of its own.
        for path in sorted(self.path.iterdir()) if self._is_comparison() else ():
            if path.is_dir() and _RUN_OF_A_COMPARISON.fullmatch(path.name):
                RunFolder(path).sweep()
                with contextlib.suppress(OSError):  # it holds something else, too
                    path.rmdir()
        files = {self.config, self.metrics, self.summary, self.statistics, self.corpus}
        files = (files | {self.comparison, self.picture}) - {keep}
        for path in sorted(self.path.iterdir()):
            if path in files or _LOCK_OF_THE_PAST.fullmatch(path.name) or is_unfinished(path):
                path.unlink()

    def keep_listing(self, corpus: "Contents") -> None:
        """Write corpus.json, from which a later message can name files."""
        files = corpus.listing if len(corpus.listing) <= _MOST_FILES else None
        facts = {"fingerprint": corpus.fingerprint, "source": corpus.source, "files": files}
        write_anew(self.corpus, json.dumps(facts, indent=1) + "\n")

    def listing(self, fingerprint: str) -> dict[str, str] | None:
        """Return the listing of the corpus with this fingerprint, if corpus.json has it."""
        facts = _facts(self.corpus)
        return facts.get("files") if facts.get("fingerprint") == fingerprint else None


def is_export(folder: Path) -> bool:
    """Whether a folder looks like a model that `--export` has written."""
    return (folder / "record").is_dir() and (folder / "state").is_dir()


@contextlib.contextmanager
def locked_folder(out: Path | None, command: str) -> Iterator[RunFolder]:
    """Context in which the folder for results, made if need be, belongs to this process.

    After a wrong call a new folder is removed again, if nothing is in it.
    """
    existed = out is not None and out.exists()
    path = make_folder(out, command)
    try:
        with FolderLock(path) as lock:
            yield RunFolder(path, lock.token)
    except CommandError:
        if not existed:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def make_folder(out: Path | None, command: str) -> Path:
    """Return the folder for results, made if need be; by default runs/COMMAND-DATE, a new one.

    Raises:
      CommandError: if it cannot be made or written to; with code 75 if a disk is full or a file
        server does not answer.
    """
    out = _new_folder(command) if out is None else out
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # several processes may try at once
            pass
    return out


def _new_folder(command: str) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{command}-{now}"
    with writing_to(first):
        first.parent.mkdir(exist_ok=True)
        out, others = first, itertools.count(2)
        while True:
            try:
                out.mkdir()
            except FileExistsError:  # scripts start several runs within one second
                out = first.with_name(f"{first.name}-{next(others)}")
            else:
                return out


def _sweep_folder(folder: Path, ours: re.Pattern[str]) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not ours.fullmatch(path.name):
            continue
        if path.is_dir():
            # What is deleted by half when this is killed must not be taken for a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}")))
        else:
            path.unlink()
    with contextlib.suppress(OSError):  # it holds something else, too
        folder.rmdir()


def _facts(path: Path) -> dict[str, Any]:
    """Return what a file of JSON holds, which may be missing or damaged."""
    try:
        return facts_of(path.read_bytes())
    except FileNotFoundError:
        return {}
