"""What a run needs to have as it was, or as the other processes have it: options and text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxslowmo.data import Contents

from ..._support.files import PASSING, io_errno, write_anew
from .._errors import TRY_AGAIN, USAGE_ERROR, CommandError
from ..config._checkpoint import CheckpointConfig
from ..config._cluster import ClusterConfig
from ..config._fields import flag_of, options_of
from ..config._mesh import MeshConfig
from ..config._train import KEPT, TrainConfig, train_options, with_values

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
CORPUS = "corpus.json"
_MOST_FILES = 100_000  # of a list that is kept
_MOST_NAMES = 5  # in a message


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
    return flag_of(name, train_options()[name][2])


def as_it_was(config: TrainConfig, folder: Path, corpus: Contents) -> TrainConfig:
    """The configuration with which the run in a folder goes on; without a checkpoint as it is.

    What nobody gave of the steps and the schedule is what it was.

    Raises:
      CommandError: the run had other options or another text, or its newest checkpoint is damaged.
    """
    extra = _newest_extra(config, folder / "checkpoints")
    if extra is None:
        return config
    saved = saved_values(extra["config"])
    changed = [
        f"{_flag(name)} was {saved[name]}, is {value}"
        for name, value in option_values(config).items()
        if name not in _FREE_OF_A_RUN and name not in config.not_given and value != saved[name]
    ]
    if changed:
        raise CommandError(f"--resume: the run in {folder} had other options: {'; '.join(changed)}")
    # Checkpoints of before 0.2 do not tell.
    if extra.get("corpus", corpus.fingerprint) != corpus.fingerprint:
        then = listing_in(folder, extra["corpus"])
        what = "" if then is None else f": {other_files(corpus.listing, then)}"
        raise CommandError(f"--resume: the run in {folder} read other files than --data has{what}")
    config = with_values(config, {name: saved[name] for name in KEPT if name in config.not_given})
    done = extra["progress"]["step"]
    if config.steps < done:
        raise CommandError(
            f"--steps must be >= {done}, the steps that the run in {folder} has done, got "
            f"{config.steps}"
        )
    return config


def _newest_extra(config: TrainConfig, folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    from jaxslowmo.checkpoint import CheckpointError, Checkpoints

    try:
        checkpoints = Checkpoints(folder)
        if not checkpoints.steps():
            return None
        extra = checkpoints.extra(fallback=config.checkpoint.fallback)
    except CheckpointError as error:
        refuse_to_resume(error)
    if not {"config", "progress"} <= extra.keys():
        raise CommandError(f"--resume: the checkpoints in {folder} are not of jaxslowmo train")
    return extra


def refuse_to_resume(error: Exception) -> NoReturn:
    """Tells of a checkpoint that cannot be read, with the code of one that may be read later."""
    from jaxslowmo.checkpoint import UnansweredError

    may_pass = isinstance(error, UnansweredError) or io_errno(error) in PASSING
    code = TRY_AGAIN if may_pass else USAGE_ERROR
    words = str(error).replace("`fallback=True`", "--fallback")
    raise CommandError(f"--resume: {words}", code) from error


def saved_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a checkpoint: an option that it lacks had its default; one unknown today is out."""
    parts = [value for value in config.values() if isinstance(value, dict)]
    flat = dict(config) | {name: value for part in parts for name, value in part.items()}
    saved = {name: flat.get(name, field.default) for name, (_, field, _) in train_options().items()}
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


def keep_listing(folder: Path, corpus: Contents) -> None:
    """Writes corpus.json, from which a later message can name files."""
    files = corpus.listing if len(corpus.listing) <= _MOST_FILES else None
    facts = {"fingerprint": corpus.fingerprint, "source": corpus.source, "files": files}
    write_anew(folder / CORPUS, json.dumps(facts, indent=1) + "\n")


def listing_in(folder: Path, fingerprint: str) -> dict[str, str] | None:
    """The listing with this fingerprint, if that is in corpus.json."""
    try:
        facts = json.loads((folder / CORPUS).read_bytes())
        return facts["files"] if facts["fingerprint"] == fingerprint else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
