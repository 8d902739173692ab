"""Checks that a run has the options and the text of its checkpoint, and of its other processes."""

import dataclasses
import json
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from jaxslowmo.data import Contents

from ..._support.coordinator import NoNoteError, tell, wait_for
from ..._support.files import PASSING, io_errno
from ..._version import __version__
from .._errors import TRY_AGAIN, USAGE_ERROR, CommandError, usage_errors
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
        "tensorboard", "statistics", "statistics_rate", *options_of(CheckpointOptions),
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
_MOST_DIFFERENCES = 3  # in a message


def option_values(config: TrainConfig) -> dict[str, Any]:
    """Return the value of every option by its name, as JSON returns it (lists for tuples)."""
    return json.loads(json.dumps(config.values()))


def other_options(local: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return how options of this process differ from those of process 0; "" if they do not."""
    return "; ".join(
        f"{_flag(name)} is {value}, is {first[name]} there"
        for name, value in local.items()
        if name not in _FREE_OF_A_PROCESS and value != first[name]
    )


def _flag(name: str) -> str:
    return train_options()[name].flag


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
    changed = [
        f"{_flag(name)} was {saved[name]}, is {value}"
        for name, value in option_values(config).items()
        if name not in _FREE_OF_A_RUN and name not in config.not_given and value != saved[name]
    ]
    if changed:
        raise CommandError(f"--resume: the run in {where} had other options: {'; '.join(changed)}")
    if extra["corpus"] != corpus.fingerprint:
        listing = folder.listing(extra["corpus"])
        what = "" if listing is None else f": {other_files(corpus.listing, listing)}"
        raise CommandError(f"--resume: the run in {where} read other files than --data has{what}")
    config = dataclasses.replace(
        config, **{name: saved[name] for name in KEPT if name in config.not_given}
    )
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


def other_files(listing: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return how one listing of a corpus differs from another, in words; the first few files."""
    names = sorted(name for name in {*listing, *other} if listing.get(name) != other.get(name))
    shown = [_file_change(x, listing.get(x), other.get(x)) for x in names[:_MOST_NAMES]]
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*shown, *more])


def _file_change(name: str, entry: str | None, other: str | None) -> str:
    name = name or "the file"
    if entry is None:
        return f"{name} is missing"
    if other is None:
        return f"{name} is new"
    if not entry[0].isdigit():  # not a digest, but the reason why the file is no text
        return f"{name} is {entry}"
    return f"{name} has other bytes" if other[0].isdigit() else f"{name} is not {other}"


def _facts(config: TrainConfig, corpus: Contents) -> dict[str, Any]:
    """Return what all processes must share; of the text only a digest, since lists can be long."""
    return {
        "options": option_values(config),
        "versions": {"jaxslowmo": __version__, "jax": version("jax"), "jaxlib": version("jaxlib")},
        "corpus": corpus.fingerprint,
        "counts": f"{corpus.num_documents} files of {corpus.num_bytes} bytes",
    }


def lead(
    requested: TrainConfig,
    config: TrainConfig,
    folder: RunFolder,
    corpus: Contents,
    cluster: Cluster,
) -> None:
    """Send options, text and versions of process 0 to the others, and collect their differences.

    Args:
      requested: the configuration from the command line.
      config: the configuration that process 0 has decided on, for all processes.
      folder: folder of the run, whose lock this process holds.
      corpus: text that this process reads.
      cluster: the processes.

    Raises:
      CommandError: a process has other options, text or versions, or does not answer within
        `--startup-timeout`.

    Communication: three messages of each process through the coordinator.
    """
    decided = {name: option_values(config)[name] for name in _DECIDED}
    facts = _facts(requested, corpus) | {"token": folder.token, "decided": decided}
    tell(f"{_KEY}/first", json.dumps(facts))
    answers = [_wait(f"{i}", config, whom=i) for i in range(1, cluster.count)]
    differences = [answer for answer in answers if answer]
    more = len(differences) - _MOST_DIFFERENCES
    message = "; ".join(
        differences[:_MOST_DIFFERENCES] + [f"and {more} more processes"] * (more > 0)
    )
    tell(f"{_KEY}/answer", message)
    if message:
        raise CommandError(message)


def follow(
    config: TrainConfig, folder: RunFolder, corpus: Contents, cluster: Cluster
) -> TrainConfig:
    """Compare this process with process 0, and return the configuration that process 0 decided.

    Raises:
      CommandError: see `lead`.
    """
    first = json.loads(_wait("first", config, whom=0))
    tell(f"{_KEY}/{cluster.index}", _difference(first, config, folder, corpus, cluster.index))
    message = _wait("answer", config, whom=0)
    if message:
        raise CommandError(message)
    make_folder(folder.path, "train")  # raises if it cannot be written to
    with usage_errors():
        return dataclasses.replace(config, **first["decided"])


def clear(folder: RunFolder, config: TrainConfig, cluster: Cluster) -> None:
    """Delete an earlier run in the folder before any process looks for checkpoints.

    Communication: with several processes one message through the coordinator.
    """
    if cluster.is_first:
        folder.sweep(keep=folder.corpus)
    if cluster.count > 1:
        if cluster.is_first:
            tell(f"{_KEY}/begun", "")
        _wait("begun", config, whom=0)


def _difference(
    first: dict[str, Any], config: TrainConfig, folder: RunFolder, corpus: Contents, index: int
) -> str:
    """Return how this process differs from process 0, in a sentence; "" if it does not."""
    local = _facts(config, corpus)
    for package, number in local["versions"].items():
        if number != first["versions"][package]:
            return (
                f"process {index} runs {package} {number} and process 0 "
                f"{first['versions'][package]}: all need the same versions"
            )
    options = other_options(local["options"], first["options"])
    if options:
        return f"process {index} has other options than process 0: {options}"
    if not _sees_lock(folder, first["token"]):
        return f"--out {folder.path} of process {index} is not the folder that process 0 writes to"
    if local["corpus"] == first["corpus"]:
        return ""
    listing = folder.listing(first["corpus"])
    what = f"{local['counts']}, {first['counts']} there"
    if listing is not None:
        what = other_files(corpus.listing, listing)
    return f"--data: process {index} has other files than process 0: {what}"


def _sees_lock(folder: RunFolder, token: str) -> bool:
    """Return whether the lock of a folder has a token; wait, as file servers may be late."""
    end = time.monotonic() + _FILE_SERVER_SECONDS
    while folder.holding_token() != token:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _wait(note: str, config: TrainConfig, *, whom: int) -> str:
    seconds = config.startup_timeout
    try:
        return wait_for(f"{_KEY}/{note}", seconds)
    except NoNoteError as error:
        raise CommandError(
            f"process {whom} did not get ready to train within --startup-timeout {seconds} s",
            TRY_AGAIN,
        ) from error
