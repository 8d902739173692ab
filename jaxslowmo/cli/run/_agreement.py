"""Checks that a run has the options and the text of its checkpoint, and of its other processes."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from jaxslowmo.data import Contents

from ..._support.coordinator import NoNoteError, gather_notes, tell, wait_for
from ..._support.files import PASSING, io_errno
from ..._version import __version__
from .._errors import TRY_AGAIN, USAGE_ERROR, CommandError
from ..config._cluster import ClusterOptions
from ..config._options import options_of
from ..config._training import KEPT, CheckpointOptions, DeviceOptions, TrainConfig, train_options
from ..processes._peers import Cluster
from ._run_folder import RunFolder, make_folder

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import CheckpointError  # loads orbax

# A resumed run may have other values of these options; all others change its training.
_FREE_OF_A_RUN = frozenset(
    {
        "steps", "schedule_steps", "data", "overwrite", "replicas", "devices_per_replica",
        "execution", "mode", "eval_every", "eval_batches", "log_every", "patience", "prefetch",
        "tensorboard", "statistics", "statistics_rate", "islands", "quorum", "deadline_seconds",
        "late", *options_of(CheckpointOptions),
        *options_of(ClusterOptions), *options_of(DeviceOptions),
    }
)  # fmt: skip
# Processes of a run may have other values of these options. Of --data the content is compared.
# Process 0 decides about --resume and --overwrite, since another process may have started again
# before it.
_FREE_OF_A_PROCESS = frozenset({"data", "resume", "overwrite", *options_of(ClusterOptions)})
_MOST_NAMES = 5  # in a message
_KEY = "jaxslowmo/start"
_DECIDED = ("resume", "overwrite", *KEPT)  # process 0 decides these for all
_FILE_SERVER_SECONDS = 10.0  # until another host sees a file that one host writes
_LOOK_SECONDS = 0.25


def option_values(config: TrainConfig) -> dict[str, Any]:
    """Return the value of every option by its name, as JSON returns it (lists for tuples)."""
    return json.loads(json.dumps(config.values()))


def _changed(
    values: Mapping[str, Any], other: Mapping[str, Any], free: Collection[str], text: str
) -> str:
    """Return how options differ, except those in `free`, each as `text` says."""
    return "; ".join(
        text.format(train_options()[name].flag, value, other[name])
        for name, value in values.items()
        if name not in free and value != other[name]
    )


def resumed_config(config: TrainConfig, folder: RunFolder, corpus: Contents) -> TrainConfig:
    """Return the configuration with which the run in a folder goes on.

    Without a checkpoint it is `config`. Options in `KEPT` that are not given keep their saved
    values.

    Raises:
      CommandError: the run had other options or another text, or its newest checkpoint is damaged.
    """
    extra = _newest_extra(config, folder)
    if extra is None:
        return config
    where = folder.path
    saved = saved_values(extra["config"])
    free = _FREE_OF_A_RUN.union(config.not_given)
    changed = _changed(option_values(config), saved, free, "{0} was {2}, is {1}")
    if changed:
        raise CommandError(f"--resume: the run in {where} had other options: {changed}")
    if extra["corpus"] != corpus.fingerprint:
        files = other_files(folder, extra["corpus"], corpus)
        raise CommandError(f"--resume: the run in {where} read other files than --data has{files}")
    kept = {name: saved[name] for name in KEPT if name in config.not_given}
    config = dataclasses.replace(config, **kept)
    done = extra["progress"]["step"]
    if config.steps < done:
        raise CommandError(
            f"--steps must be >= {done}, the steps that the run in {where} has done, got "
            f"{config.steps}"
        )
    return config


def _newest_extra(config: TrainConfig, folder: RunFolder) -> dict[str, Any] | None:
    """Return the extra data of the newest checkpoint; None without a checkpoint."""
    path = folder.checkpoints
    if not path.exists():
        return None
    from jaxslowmo.checkpoint import CheckpointError, Checkpoints

    try:
        checkpoints = Checkpoints(path)
        if not checkpoints.steps():
            return None
        extra = checkpoints.extra(fallback=config.fallback)
    except CheckpointError as error:
        refuse_to_resume(error)
    if not {"config", "progress"} <= extra.keys():
        raise CommandError(f"--resume: the checkpoints in {path} are not of jaxslowmo train")
    return extra


def refuse_to_resume(error: "CheckpointError") -> NoReturn:
    """Raise a `CommandError` for an unreadable checkpoint; code 75 if it may be readable later."""
    from jaxslowmo.checkpoint import UnansweredError

    may_pass = isinstance(error, UnansweredError) or io_errno(error) in PASSING
    code = TRY_AGAIN if may_pass else USAGE_ERROR
    older = error.older_step
    hint = "" if older is None else f" --fallback takes that of step {older}."
    raise CommandError(f"--resume: {error.reason}{hint}", code) from error


def saved_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values of a checkpoint's configuration, by name.

    An option that it lacks had its default; an option that no longer exists is left out.
    """
    parts = [value for value in config.values() if isinstance(value, dict)]
    flat = dict(config) | {name: value for part in parts for name, value in part.items()}
    saved = {name: flat.get(name, option.default) for name, option in train_options().items()}
    # Without --schedule-steps the schedule spans --steps.
    return saved | {"schedule_steps": saved["schedule_steps"] or saved["steps"]}


def other_files(folder: RunFolder, fingerprint: str, corpus: Contents) -> str:
    """Return how the files of a corpus differ from those that a run has read, the first few.

    Args:
      folder: folder of the run, which may hold a listing.
      fingerprint: fingerprint of what it has read.
      corpus: what is there now.

    Returns:
      A colon and words; "" without a listing.
    """
    other, listing = folder.listing(fingerprint), corpus.listing
    if other is None:
        return ""
    names = sorted(name for name in {*listing, *other} if listing.get(name) != other.get(name))
    changes = []
    for name in names[:_MOST_NAMES]:
        change = "has other bytes" if name in listing else "is missing"
        changes.append(f"{name or 'the file'} {change if name in other else 'is new'}")
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return f": {', '.join(changes + more)}"


def agreed(
    requested: TrainConfig,
    config: TrainConfig,
    folder: RunFolder,
    corpus: Contents,
    cluster: Cluster,
) -> TrainConfig:
    """Compare all processes with process 0; return the configuration that process 0 has decided.

    Args:
      requested: the configuration from the command line.
      config: the same; in process 0 what it has decided on, for all processes.
      folder: folder of the run, whose lock process 0 holds.
      corpus: text that this process reads.
      cluster: the processes.

    Raises:
      CommandError: a process has other options, text or versions, or does not answer within
        `--startup-timeout`.

    Communication: three messages of each process through the coordinator.
    """
    who, seconds = f"process {cluster.index}", config.startup_timeout
    packages = [f"{name} {version(name)}" for name in ("jax", "jaxlib")]
    facts = {
        "versions": f"jaxslowmo {__version__}, {', '.join(packages)}",
        "options": option_values(requested),
        # Only a digest, since lists can be long.
        "corpus": corpus.fingerprint,
    }
    with _patient(seconds):
        if cluster.is_first:
            decided = {name: option_values(config)[name] for name in _DECIDED}
            tell(f"{_KEY}/first", json.dumps([facts, folder.token, decided]))
        first, token, decided = json.loads(wait_for(f"{_KEY}/first", seconds, 0))
        difference = _difference(who, facts, first, folder, corpus, token)
        for line in gather_notes(_KEY, difference, range(cluster.count), seconds):
            if line:
                raise CommandError(line)
    make_folder(folder.path, "train")  # raises if it cannot be written to
    return dataclasses.replace(config, **decided)


@contextlib.contextmanager
def _patient(seconds: float) -> Iterator[None]:
    try:
        yield
    except NoNoteError as error:
        what = f"not all processes got ready to train within --startup-timeout {seconds} s: {error}"
        raise CommandError(what, TRY_AGAIN) from error


def clear(folder: RunFolder, config: TrainConfig, cluster: Cluster) -> None:
    """Delete an earlier run in the folder before any process looks for checkpoints.

    Communication: with several processes one message through the coordinator.
    """
    if cluster.is_first:
        folder.sweep(keep=folder.corpus)
    if cluster.count > 1:
        with _patient(config.startup_timeout):
            if cluster.is_first:
                tell(f"{_KEY}/begun", "")
            wait_for(f"{_KEY}/begun", config.startup_timeout)


def _difference(
    who: str,
    facts: dict[str, Any],
    first: dict[str, Any],
    folder: RunFolder,
    corpus: Contents,
    token: str,
) -> str:
    """Return how this process differs from process 0, in a sentence; "" if it does not."""
    if facts["versions"] != first["versions"]:
        return f"{who} runs {facts['versions']}, and process 0 {first['versions']}"
    options = _changed(
        facts["options"], first["options"], _FREE_OF_A_PROCESS, "{} is {}, is {} there"
    )
    if options:
        return f"{who} has other options than process 0: {options}"
    if not _sees_lock(folder, token):
        return f"--out {folder.path} of {who} is not the folder that process 0 writes to"
    if facts["corpus"] == first["corpus"]:
        return ""
    files = other_files(folder, first["corpus"], corpus)
    return f"--data: {who} has other files than process 0{files}"


def _sees_lock(folder: RunFolder, token: str) -> bool:
    """Return whether the lock of a folder has a token; wait, as file servers may be late."""
    end = time.monotonic() + _FILE_SERVER_SECONDS
    while folder.holding_token() != token:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
