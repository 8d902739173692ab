"""The folder of a run: where it is, what is complete in it, and how processes share it."""

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import PurePath

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

ARRAYS, RECORD = "state", "record"  # the two items of a checkpoint
COMMITTED = "commit_success.txt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used: which one, what is wrong, and what can be done."""


class UnreadableError(CheckpointError):
    """Files are missing, cut short or not of this library: an older checkpoint may do."""


def resolved(folder: str | PathLike[str]) -> epath.Path:
    """An absolute path, or an address such as `gs://...` as it is."""
    path = epath.Path(folder)
    return path if "://" in str(folder) else epath.Path(os.path.abspath(path.expanduser()))


def processes() -> ocp.options.MultiprocessingOptions:
    """All processes, by number: then barriers go through the coordinator.

    A barrier over devices, which is orbax's default, could meet a training step half way.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jaxslowmo"
    )


def complete_steps(folder: epath.Path) -> tuple[int, ...]:
    """Steps of the complete checkpoints in a folder, ascending.

    One that is being written has another name until all of it is there.

    Raises:
      CheckpointError: the path is a file.
    """
    if not folder.exists():
        return ()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give the folder of a run.")
    return tuple(sorted(int(path.name) for path in folder.iterdir() if _is_complete(path)))


def _is_complete(path: epath.Path) -> bool:
    if not path.name.isdecimal() or not path.is_dir():
        return False
    # Object stores cannot rename: there a file says that all is there.
    return not str(path).startswith("gs://") or (path / COMMITTED).exists()


def set_aside(folder: epath.Path, steps: Iterable[int]) -> None:
    """Rename checkpoints, on process 0 while the others wait, so that nothing takes them for one.

    Communication: none with one process; else one gather of 4 bytes through the host.
    """
    if jax.process_index() == 0:
        for step in sorted(steps):
            path = folder / str(step)
            names = (f"{step}.set-aside{n or ''}" for n in itertools.count())
            target = next(folder / name for name in names if not (folder / name).exists())
            if path.exists():
                path.rename(target)
    first_failure(0)


def first_failure(own: int) -> int:
    """The lowest code that is not 0 on any process, or 0.

    Communication: none with one process; else one gather of 4 bytes through the host.
    """
    if jax.process_count() == 1:
        return own
    codes = np.ravel(multihost_utils.process_allgather(np.array([own], np.int32)))
    failures = codes[codes != 0]
    return int(failures.min()) if failures.size else 0


def of_first_process(numbers: Sequence[int]) -> list[int]:
    """Process 0's numbers (int32), on all processes.

    Communication: none with one process; else two broadcasts of a few bytes through the host.
    """
    if jax.process_count() == 1:
        return list(numbers)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    own = np.zeros(length, np.int32)
    own[: len(numbers)] = numbers[:length]
    return [int(n) for n in multihost_utils.broadcast_one_to_all(own)] if length else []


def _is_foreign(record: logging.LogRecord) -> bool:
    return "orbax" not in PurePath(record.pathname).parts


def quiet_orbax() -> None:
    """Drop what orbax logs: it names every file that it touches, which no terminal needs.

    Other users of the same logger keep theirs. Its errors go, too: a save that fails in the
    background is logged with its stack, and raised by the next `save`, `wait` or `close`.
    """
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_foreign not in logger.filters:
        logger.addFilter(_is_foreign)
