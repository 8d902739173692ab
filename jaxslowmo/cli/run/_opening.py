"""Before a run: its folder is taken, and its processes find out whether they want the same."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxslowmo.data import Contents

from ..._support.coordinator import NoNoteError, tell, wait_for
from .._errors import TRY_AGAIN, CommandError, usage_errors
from .._output import make_folder
from ..config._train import KEPT, TrainConfig, with_values
from ..processes._launchers import Cluster
from ._alike import (
    CORPUS,
    as_it_was,
    keep_listing,
    listing_in,
    option_values,
    other_files,
    other_options,
)
from ._leftovers import refuse_leftovers, sweep
from ._lock import FolderLock, sees_lock

_KEY = "jaxslowmo/start"
_DECIDED = ("resume", "overwrite", *KEPT)  # by process 0, for all
_PACKAGES = ("jaxslowmo", "jax", "jaxlib")
_FILE_SERVER_SECONDS = 10.0  # in which a file that one host writes is seen by another
_MOST_DIFFERENCES = 3  # in a message


@dataclasses.dataclass(frozen=True)
class Opening:
    """A folder that is this run's.

    Attributes:
      folder: where.
      config: what all processes do.
      cluster: the processes.
    """

    folder: Path
    config: TrainConfig
    cluster: Cluster

    def begin(self) -> None:
        """Deletes an earlier run, if that is asked for, before any process looks for one.

        Communication: then, with several processes, one message through the coordinator.
        """
        if not self.config.overwrite:
            return
        if self.cluster.is_first:
            sweep(self.folder, keep={CORPUS})
        if self.cluster.count > 1:
            if self.cluster.is_first:
                tell(f"{_KEY}/begun", "")
            _wait("begun", self.config, whom=0)


@contextlib.contextmanager
def locked_folder(out: Path | None, command: str) -> Iterator[tuple[Path, str]]:
    """The folder for results, made if need be, and the token of its lock, which this process has.

    After a wrong call a new folder is removed again, if nothing is in it.
    """
    existed = out is not None and out.exists()
    folder = make_folder(out, command)
    try:
        with FolderLock(folder) as lock:
            yield folder, lock.token
    except CommandError:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def opened(
    config: TrainConfig, out: Path | None, corpus: Contents, cluster: Cluster
) -> Iterator[Opening]:
    """Context in which the folder of a run is its own, and all processes want the same.

    Args:
      config: as it was given.
      out: folder of the run.
      corpus: what this process reads; without the texts, most of which a process can forget.
      cluster: the processes.

    Raises:
      CommandError: another run is going on in the folder or has left something there; the run to go
        on with had other options or text; processes have other options, text or versions, or one
        did not come so far within `--startup-timeout`.

    Communication: with several processes three messages of each through the coordinator.
    """
    if not cluster.is_first:
        assert out is not None  # several processes must be given it
        yield Opening(out, _follow(config, out, corpus, cluster), cluster)
        return
    with locked_folder(out, "train") as (folder, token):
        given, resumes = config, config.checkpoint.resume
        if not config.overwrite:
            refuse_leftovers(folder, may_resume=True, resumes=resumes)
        if resumes:
            with usage_errors():
                config = as_it_was(config, folder, corpus)
        keep_listing(folder, corpus)
        if cluster.count > 1:
            decided = {name: option_values(config)[name] for name in _DECIDED}
            _lead(_facts(given, corpus) | {"token": token, "decided": decided}, config, cluster)
        yield Opening(folder, config, cluster)


def _facts(config: TrainConfig, corpus: Contents) -> dict[str, Any]:
    """What must be alike. Of the text a digest: a list of files could be any length."""
    return {
        "options": option_values(config),
        "versions": {package: version(package) for package in _PACKAGES},
        "corpus": corpus.fingerprint,
        "counts": f"{corpus.num_documents} files of {corpus.num_bytes} bytes",
    }


def _lead(facts: dict[str, Any], config: TrainConfig, cluster: Cluster) -> None:
    """Process 0: says what it wants, hears who differs, and says that to all."""
    tell(f"{_KEY}/first", json.dumps(facts))
    answers = [_wait(f"{i}", config, whom=i) for i in range(1, cluster.count)]
    differences = [answer for answer in answers if answer]
    more = len(differences) - _MOST_DIFFERENCES
    told = differences[:_MOST_DIFFERENCES] + [f"and {more} more processes"] * (more > 0)
    tell(f"{_KEY}/answer", "; ".join(told))
    if told:
        raise CommandError("; ".join(told))


def _follow(config: TrainConfig, out: Path, corpus: Contents, cluster: Cluster) -> TrainConfig:
    """Another process: compares, and takes over what process 0 has decided."""
    first = json.loads(_wait("first", config, whom=0))
    tell(f"{_KEY}/{cluster.index}", _difference(first, config, out, corpus, cluster.index))
    told = _wait("answer", config, whom=0)
    if told:
        raise CommandError(told)
    make_folder(out, "train")  # for the check that it can be written to
    with usage_errors():
        return with_values(config, first["decided"])


def _difference(
    first: dict[str, Any], config: TrainConfig, out: Path, corpus: Contents, index: int
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
    if not sees_lock(out, first["token"], _FILE_SERVER_SECONDS):
        return f"--out {out} of process {index} is not the folder that process 0 writes to"
    if own["corpus"] == first["corpus"]:
        return ""
    there = listing_in(out, first["corpus"])
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
