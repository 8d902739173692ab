"""What a run needs to have as it was, or as its other processes have it: options and text."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from jaxslowmo.data import Contents

from ..._support.coordinator import NoNoteError, tell, wait_for
from ..._support.files import PASSING, io_errno
from .._errors import TRY_AGAIN, USAGE_ERROR, CommandError, usage_errors
from ..config._cluster import ClusterConfig
from ..config._fields import flag_of, options_of
from ..config._mesh import MeshConfig
from ..config._training import KEPT, CheckpointConfig, TrainConfig, train_options, with_values
from ..processes._peers import Cluster
from ._lock import sees_lock
from ._run_folder import RunFolder, make_folder

if TYPE_CHECKING:
    from jaxslowmo.checkpoint import CheckpointError  # loads orbax

# A run may go on with other values of these; of all others its trajectory depends.
_FREE_OF_A_RUN = frozenset(
    {
        "steps", "schedule_steps", "data", "overwrite", "replicas", "devices_per_replica",
        "execution", "mode", "eval_every", "eval_batches", "log_every", "patience", "prefetch",
        "tensorboard", "statistics", "statistics_rate", *options_of(CheckpointConfig),
        *options_of(ClusterConfig), *options_of(MeshConfig),
    }
)  # fmt: skip
# Processes of a run may have other values of these. Of the text the content is compared; what is
# there is process 0's to go on with or to delete: another may have been started again before it.
_FREE_OF_A_PROCESS = frozenset({"data", "resume", "overwrite", *options_of(ClusterConfig)})
_MOST_NAMES = 5  # in a message
_KEY = "jaxslowmo/start"
_DECIDED = ("resume", "overwrite", *KEPT)  # by process 0, for all
_PACKAGES = ("jaxslowmo", "jax", "jaxlib")
_FILE_SERVER_SECONDS = 10.0  # in which a file that one host writes is seen by another
_MOST_DIFFERENCES = 3  # in a message


def option_values(config: TrainConfig) -> dict[str, Any]:
    """The value of every option, by its name, as JSON gives it back."""
    return json.loads(json.dumps(config.flat()))


def other_options(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """How the options of one process differ from those of process 0; "" if they do not."""
    return "; ".join(
        f"{_flag(name)} is {value}, is {there[name]} there"
        for name, value in here.items()
        if name not in _FREE_OF_A_PROCESS and value != there[name]
    )


def _flag(name: str) -> str:
    return flag_of(train_options()[name])


def as_it_was(config: TrainConfig, folder: RunFolder, corpus: Contents) -> TrainConfig:
    """Return the configuration with which the run in a folder goes on; without a checkpoint as is.

    What nobody gave of the steps and the schedule is what it was.

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
    # Checkpoints of before 0.2 do not tell.
    if extra.get("corpus", corpus.fingerprint) != corpus.fingerprint:
        then = folder.listing(extra["corpus"])
        what = "" if then is None else f": {other_files(corpus.listing, then)}"
        raise CommandError(f"--resume: the run in {where} read other files than --data has{what}")
    config = with_values(config, {name: saved[name] for name in KEPT if name in config.not_given})
    done = extra["progress"]["step"]
    if config.steps < done:
        raise CommandError(
            f"--steps must be >= {done}, the steps that the run in {where} has done, got "
            f"{config.steps}"
        )
    return config


def _newest_extra(config: TrainConfig, folder: RunFolder) -> dict[str, Any] | None:
    """Return what was saved beside the newest state; None where there is no checkpoint."""
    path = folder.checkpoints
    if not path.exists():
        return None
    from jaxslowmo.checkpoint import CheckpointError, Checkpoints

    try:
        checkpoints = Checkpoints(path)
        if not checkpoints.steps():
            return None
        extra = checkpoints.extra(fallback=config.checkpoint.fallback)
    except CheckpointError as error:
        refuse_to_resume(error)
    if not {"config", "progress"} <= extra.keys():
        raise CommandError(f"--resume: the checkpoints in {path} are not of jaxslowmo train")
    return extra


def refuse_to_resume(error: "CheckpointError") -> NoReturn:
    """Raise a `CommandError` about a checkpoint, with the code of one that may be read later."""
    from jaxslowmo.checkpoint import UnansweredError

    may_pass = isinstance(error, UnansweredError) or io_errno(error) in PASSING
    code = TRY_AGAIN if may_pass else USAGE_ERROR
    older = error.older_step
    hint = "" if older is None else f" --fallback takes that of step {older}."
    raise CommandError(f"--resume: {error.reason}{hint}", code) from error


def saved_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values of a checkpoint's configuration, by name.

    An option that it lacks had its default; one that is unknown today is left out.
    """
    parts = [value for value in config.values() if isinstance(value, dict)]
    flat = dict(config) | {name: value for part in parts for name, value in part.items()}
    saved = {name: flat.get(name, field.default) for name, field in train_options().items()}
    # An option that is not given stands for another one's value.
    return saved | {"schedule_steps": saved["schedule_steps"] or saved["steps"]}


def other_files(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """How one listing of a corpus differs from another, in words; the first few files."""
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    told = [_of_file(name, here.get(name), there.get(name)) for name in names[:_MOST_NAMES]]
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*told, *more])


def _of_file(name: str, here: str | None, there: str | None) -> str:
    name = name or "the file"
    if here is None:
        return f"{name} is missing"
    if there is None:
        return f"{name} is new"
    if not here[0].isdigit():  # why it is no text
        return f"{name} is {here}"
    return f"{name} has other bytes" if there[0].isdigit() else f"{name} is not {there}"


def _facts(config: TrainConfig, corpus: Contents) -> dict[str, Any]:
    """What must be alike. Of the text a digest: a list of files could be any length."""
    return {
        "options": option_values(config),
        "versions": {package: version(package) for package in _PACKAGES},
        "corpus": corpus.fingerprint,
        "counts": f"{corpus.num_documents} files of {corpus.num_bytes} bytes",
    }


def lead(
    given: TrainConfig, config: TrainConfig, folder: RunFolder, corpus: Contents, cluster: Cluster
) -> None:
    """Agree with the other processes, as process 0: tell what it wants, and hear who differs.

    Args:
      given: the configuration as it was given.
      config: what process 0 has made of it, which all processes do.
      folder: of the run, whose lock this process has.
      corpus: what this process reads.
      cluster: the processes.

    Raises:
      CommandError: a process has other options, text or versions, or did not come so far within
        `--startup-timeout`.

    Communication: three messages of each process through the coordinator.
    """
    decided = {name: option_values(config)[name] for name in _DECIDED}
    facts = _facts(given, corpus) | {"token": folder.token, "decided": decided}
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
    """Agree with process 0, as another one, and return the configuration that it has decided.

    Raises:
      CommandError: as for `lead`.
    """
    first = json.loads(_wait("first", config, whom=0))
    tell(f"{_KEY}/{cluster.index}", _difference(first, config, folder, corpus, cluster.index))
    message = _wait("answer", config, whom=0)
    if message:
        raise CommandError(message)
    make_folder(folder.path, "train")  # for the check that it can be written to
    with usage_errors():
        return with_values(config, first["decided"])


def clear(folder: RunFolder, config: TrainConfig, cluster: Cluster) -> None:
    """Delete an earlier run before any process looks for one.

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
    """What this process has otherwise than process 0, in a sentence; "" for nothing."""
    own = _facts(config, corpus)
    for package, number in own["versions"].items():
        if number != first["versions"][package]:
            return (
                f"process {index} runs {package} {number} and process 0 "
                f"{first['versions'][package]}: all need the same versions"
            )
    options = other_options(own["options"], first["options"])
    if options:
        return f"process {index} has other options than process 0: {options}"
    if not sees_lock(folder.path, first["token"], _FILE_SERVER_SECONDS):
        return f"--out {folder.path} of process {index} is not the folder that process 0 writes to"
    if own["corpus"] == first["corpus"]:
        return ""
    there = folder.listing(first["corpus"])
    what = f"{own['counts']}, {first['counts']} there"
    if there is not None:
        what = other_files(corpus.listing, there)
    return f"--data: process {index} has other files than process 0: {what}"


def _wait(note: str, config: TrainConfig, *, whom: int) -> str:
    seconds = config.cluster.startup_timeout
    try:
        return wait_for(f"{_KEY}/{note}", seconds)
    except NoNoteError as error:
        raise CommandError(
            f"process {whom} did not get ready to train within --startup-timeout {seconds} s",
            TRY_AGAIN,
        ) from error
