"""Checks that a run has the options and the text of its checkpoint, and of its other processes."""

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from .._support.coordinator import NoNoteError, gather_notes, wait_for_note, write_note
from .._support.files import TRANSIENT_ERRORS, io_errno
from .._version import __version__
from ._config import TrainConfig, flatten_options, option_types, replace_options
from ._errors import TRY_AGAIN, USAGE_ERROR, CommandError
from ._folder import RunFolder, lock_folder, make_folder
from ._processes import Cluster

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import CheckpointError  # loads orbax

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
