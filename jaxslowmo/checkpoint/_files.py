"""Where checkpoints lie, which of them are complete, and how their arrays are read."""

import itertools
import json
import os
from collections.abc import Iterable
from os import PathLike

import jax
import orbax.checkpoint as ocp
from etils import epath

from ._agree import first_failure
from ._errors import CheckpointError, UnreadableError
from ._record import Record, from_json

ARRAYS, RECORD = "state", "record"  # the two items of a checkpoint
COMMITTED = "commit_success.txt"


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


def read_record(path: epath.Path) -> Record:
    """The record of a checkpoint.

    Raises:
      CheckpointError: a missing or damaged file, another library's checkpoint, a newer format.
    """
    file = path / RECORD / "metadata"
    if not file.exists():
        raise UnreadableError(
            f"{path} has no file {RECORD}/metadata: it is damaged, or was not written by "
            "jaxslowmo.checkpoint."
        )
    try:
        value = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UnreadableError(f"{path} is damaged: {file} is no JSON ({error}).") from error
    return from_json(value, path)
