"""The folder of a run: its files, its lock, and who may train in it. No jax.

A run has the options and the text of its checkpoint, and of its other processes.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from filelock import FileLock, Timeout

from .._support.coordinator import NoNoteError, gather_notes, wait_for_note, write_note
from .._support.files import (
    TRANSIENT_ERRORS,
    complete_steps,
    io_errno,
    is_export,
    is_temporary_file,
    write_atomic,
)
from .._version import __version__
from ._config import TrainConfig, flatten_options, option_types, replace_options
from ._errors import TRY_AGAIN, USAGE_ERROR, CommandError, write_errors
from ._processes import Cluster

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import CheckpointError  # loads orbax


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


# Who may train in the folder.

_KEY = "jaxslowmo/start"
# Process 0 decides these for all, since another one may have started again before it.
_DECIDED = ("resume", "overwrite", "steps", "schedule_steps")
_FILE_SERVER_SECONDS = 10.0  # until another host sees a file that one host writes
_LOOK_SECONDS = 0.25


@contextlib.contextmanager
def open_run(
    config: TrainConfig, corpus: str, cluster: Cluster
) -> Iterator[tuple[RunFolder, TrainConfig]]:
    """Run the block while the folder belongs to this run, and all processes have agreed.

    Args:
      config: configuration from the command line.
      corpus: fingerprint of the text that this process reads.
      cluster: the processes.

    Yields:
      The folder, and the configuration of all processes.

    Raises:
      CommandError: another run uses the folder or has left files in it; the run to resume had other
        options or another text; a process has other options, text or versions, or does not answer
        within `startup_timeout`.

    Communication: with several processes three messages of each through the coordinator.
    """
    with contextlib.ExitStack() as stack:
        if cluster.is_first:
            folder = stack.enter_context(lock_folder(config.run.out, "train"))
            if not config.run.overwrite:
                folder.check_no_earlier_run(resumes=config.checkpoint.resume)
            if config.checkpoint.resume:
                _check_resume_options(config, folder, corpus)
        else:
            assert config.run.out is not None
            folder = RunFolder(config.run.out)
        if cluster.count > 1:
            config = _agree_on_config(config, folder, corpus, cluster)
        yield folder, config


def clear_folder(config: TrainConfig, folder: RunFolder, cluster: Cluster) -> None:
    """Delete an earlier run in the folder before any process looks for checkpoints.

    Communication: with several processes one message through the coordinator.
    """
    seconds = config.cluster.startup_timeout
    if cluster.is_first:
        folder.delete_run_files()
    if cluster.count > 1:
        with _timeout_errors(seconds):
            if cluster.is_first:
                write_note(f"{_KEY}/begun", "")
            wait_for_note(f"{_KEY}/begun", seconds)


def _describe_changes(
    now: Mapping[str, Any], other: Mapping[str, Any], free: Collection[str]
) -> str:
    """Return how options differ from others, except those in `free`."""
    return "; ".join(
        f"--{name.replace('_', '-')} is {value}, not {other[name]}"
        for name, value in now.items()
        if name not in free and name in other and value != other[name]
    )


def _all_options(config: TrainConfig) -> dict[str, Any]:
    """Return the values of all options, with those that follow from others."""
    length = config.schedule_length
    return flatten_options(config) | {"warmup": config.warmup_steps, "schedule_steps": length}


def saved_config(extra: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration in the extra data of a checkpoint."""
    if not {"config", "progress"} <= extra.keys():
        raise CommandError("the checkpoints are not of jaxslowmo train")
    known = option_types(TrainConfig)
    return replace_options(TrainConfig(), {x: y for x, y in extra["config"].items() if x in known})


def _check_resume_options(config: TrainConfig, folder: RunFolder, corpus: str) -> None:
    """Raise `CommandError` if the newest checkpoint is of other training, or is damaged."""
    path = folder / "checkpoints"
    if not path.exists():
        return
    from jaxslowmo.checkpoint import CheckpointError, Checkpoints

    try:
        checkpoints = Checkpoints(path)
        if not checkpoints.steps():
            return
        extra = checkpoints.extra(fallback=config.checkpoint.fallback)
    except CheckpointError as error:
        refuse_to_resume(error)
    # What a run reads and computes stays; how it runs and what it writes may change.
    fixed = ("model", "data", "algorithm", "optimizer")
    free = {x for x, (section, _) in option_types(TrainConfig).items() if section not in fixed}
    changed = _describe_changes(
        _all_options(config), _all_options(saved_config(extra)), free | {"data"}
    )
    if changed:
        raise CommandError(f"--resume: the run in {folder.path} had other options: {changed}")
    if extra["corpus"] != corpus:
        raise CommandError("--resume: the run read other files than --data has")


def refuse_to_resume(error: "CheckpointError") -> NoReturn:
    """Raise a `CommandError` for an unreadable checkpoint; code 75 if it may be readable later."""
    from jaxslowmo.checkpoint import UnansweredError

    may_pass = isinstance(error, UnansweredError) or io_errno(error) in TRANSIENT_ERRORS
    code = TRY_AGAIN if may_pass else USAGE_ERROR
    older = error.older_step
    hint = "" if older is None else f" --fallback takes that of step {older}."
    raise CommandError(f"--resume: {error.reason}{hint}", code) from error


def _agree_on_config(
    config: TrainConfig, folder: RunFolder, corpus: str, cluster: Cluster
) -> TrainConfig:
    """Compare all processes with process 0; return the configuration that process 0 has decided."""
    seconds = config.cluster.startup_timeout
    packages = [f"{name} {version(name)}" for name in ("jax", "jaxlib")]
    facts = {
        "versions": f"jaxslowmo {__version__}, {', '.join(packages)}",
        "options": _all_options(config),
        "corpus": corpus,
    }
    with _timeout_errors(seconds):
        if cluster.is_first:
            decided = {name: flatten_options(config)[name] for name in _DECIDED}
            write_note(f"{_KEY}/first", json.dumps([facts, folder.token, decided]))
        first, token, decided = json.loads(wait_for_note(f"{_KEY}/first", seconds, 0))
        difference = _difference(f"process {cluster.index}", facts, first, folder, token)
        for line in gather_notes(_KEY, difference, range(cluster.count), seconds):
            if line:
                raise CommandError(line)
    make_folder(folder.path, "train")  # raises if it cannot be written to
    return replace_options(config, decided)


@contextlib.contextmanager
def _timeout_errors(seconds: float) -> Iterator[None]:
    try:
        yield
    except NoNoteError as error:
        what = f"not all processes got ready to train within {seconds} s (startup_timeout): {error}"
        raise CommandError(what, TRY_AGAIN) from error


def _difference(
    who: str,
    facts: dict[str, Any],
    first: dict[str, Any],
    folder: RunFolder,
    token: str,
) -> str:
    """Return how this process differs from process 0, in a sentence; "" if it does not."""
    if facts["versions"] != first["versions"]:
        return f"{who} runs {facts['versions']}, and process 0 {first['versions']}"
    # Of --data the content is compared, and of --out the lock.
    own = {x for x, (section, _) in option_types(TrainConfig).items() if section == "cluster"}
    free = {*own, *_DECIDED, "data", "out", "config"}
    options = _describe_changes(facts["options"], first["options"], free)
    if options:
        return f"{who} has other options than process 0: {options}"
    end = time.monotonic() + _FILE_SERVER_SECONDS
    while folder.read_json("lock.json").get("token") != token:  # file servers may be late
        if time.monotonic() >= end:
            return f"--out {folder.path} of {who} is not the folder that process 0 writes to"
        time.sleep(_LOOK_SECONDS)
    if facts["corpus"] == first["corpus"]:
        return ""
    return f"--data: {who} has other files than process 0"
