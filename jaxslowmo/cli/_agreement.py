"""Checks that a run has the options and the text of its checkpoint, and of its other processes."""

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from .._support.coordinator import NoNoteError, gather_notes, tell, wait_for
from .._support.files import PASSING, io_errno
from .._version import __version__
from ._config import TrainConfig, flat, options_of, replaced
from ._errors import TRY_AGAIN, USAGE_ERROR, CommandError
from ._folder import RunFolder, locked_folder, make_folder
from ._processes import Cluster

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import CheckpointError  # loads orbax

_KEY = "jaxslowmo/start"
# Process 0 decides these for all, since another one may have started again before it.
_DECIDED = ("resume", "overwrite", "steps", "schedule_steps")
_FILE_SERVER_SECONDS = 10.0  # until another host sees a file that one host writes
_LOOK_SECONDS = 0.25


@contextlib.contextmanager
def opened(
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
            folder = stack.enter_context(locked_folder(config.run.out, "train"))
            if not config.run.overwrite:
                folder.refuse_leftovers(resumes=config.checkpoint.resume)
            if config.checkpoint.resume:
                _check_resumed(config, folder, corpus)
        else:
            assert config.run.out is not None
            folder = RunFolder(config.run.out)
        if cluster.count > 1:
            config = _agreed(config, folder, corpus, cluster)
        yield folder, config


def clear(config: TrainConfig, folder: RunFolder, cluster: Cluster) -> None:
    """Delete an earlier run in the folder before any process looks for checkpoints.

    Communication: with several processes one message through the coordinator.
    """
    seconds = config.cluster.startup_timeout
    if cluster.is_first:
        folder.sweep()
    if cluster.count > 1:
        with _patient(seconds):
            if cluster.is_first:
                tell(f"{_KEY}/begun", "")
            wait_for(f"{_KEY}/begun", seconds)


def _changed(now: Mapping[str, Any], other: Mapping[str, Any], free: Collection[str]) -> str:
    """Return how options differ from others, except those in `free`."""
    return "; ".join(
        f"--{name.replace('_', '-')} is {value}, not {other[name]}"
        for name, value in now.items()
        if name not in free and name in other and value != other[name]
    )


def _values(config: TrainConfig) -> dict[str, Any]:
    """Return the values of all options, with those that follow from others."""
    length = config.schedule_length
    return flat(config) | {"warmup": config.warmup_steps, "schedule_steps": length}


def saved_config(extra: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration in the extra data of a checkpoint."""
    if not {"config", "progress"} <= extra.keys():
        raise CommandError("the checkpoints are not of jaxslowmo train")
    known = options_of(TrainConfig)
    return replaced(TrainConfig(), {x: y for x, y in extra["config"].items() if x in known})


def _check_resumed(config: TrainConfig, folder: RunFolder, corpus: str) -> None:
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
    free = {x for x, (section, _) in options_of(TrainConfig).items() if section not in fixed}
    changed = _changed(_values(config), _values(saved_config(extra)), free | {"data"})
    if changed:
        raise CommandError(f"--resume: the run in {folder.path} had other options: {changed}")
    if extra["corpus"] != corpus:
        raise CommandError("--resume: the run read other files than --data has")


def refuse_to_resume(error: "CheckpointError") -> NoReturn:
    """Raise a `CommandError` for an unreadable checkpoint; code 75 if it may be readable later."""
    from jaxslowmo.checkpoint import UnansweredError

    may_pass = isinstance(error, UnansweredError) or io_errno(error) in PASSING
    code = TRY_AGAIN if may_pass else USAGE_ERROR
    older = error.older_step
    hint = "" if older is None else f" --fallback takes that of step {older}."
    raise CommandError(f"--resume: {error.reason}{hint}", code) from error


def _agreed(config: TrainConfig, folder: RunFolder, corpus: str, cluster: Cluster) -> TrainConfig:
    """Compare all processes with process 0; return the configuration that process 0 has decided."""
    seconds = config.cluster.startup_timeout
    packages = [f"{name} {version(name)}" for name in ("jax", "jaxlib")]
    facts = {
        "versions": f"jaxslowmo {__version__}, {', '.join(packages)}",
        "options": _values(config),
        "corpus": corpus,
    }
    with _patient(seconds):
        if cluster.is_first:
            decided = {name: flat(config)[name] for name in _DECIDED}
            tell(f"{_KEY}/first", json.dumps([facts, folder.token, decided]))
        first, token, decided = json.loads(wait_for(f"{_KEY}/first", seconds, 0))
        difference = _difference(f"process {cluster.index}", facts, first, folder, token)
        for line in gather_notes(_KEY, difference, range(cluster.count), seconds):
            if line:
                raise CommandError(line)
    make_folder(folder.path, "train")  # raises if it cannot be written to
    return replaced(config, decided)


@contextlib.contextmanager
def _patient(seconds: float) -> Iterator[None]:
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
    own = {x for x, (section, _) in options_of(TrainConfig).items() if section == "cluster"}
    free = {*own, *_DECIDED, "data", "out", "config"}
    options = _changed(facts["options"], first["options"], free)
    if options:
        return f"{who} has other options than process 0: {options}"
    end = time.monotonic() + _FILE_SERVER_SECONDS
    while folder.facts("lock.json").get("token") != token:  # file servers may be late
        if time.monotonic() >= end:
            return f"--out {folder.path} of {who} is not the folder that process 0 writes to"
        time.sleep(_LOOK_SECONDS)
    if facts["corpus"] == first["corpus"]:
        return ""
    return f"--data: {who} has other files than process 0"
