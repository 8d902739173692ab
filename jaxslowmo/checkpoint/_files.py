"""Where checkpoints lie, which of them are complete, and how their arrays are read."""

import json
import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ._errors import CheckpointError, UnreadableError
from ._record import LeafRecord, Record, from_json

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


def first_line(error: BaseException) -> str:
    """Of its message, at most 300 characters; its type where there is none."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


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


def read_arrays(
    path: epath.Path, leaves: Sequence[LeafRecord], like: Sequence[Any] | None
) -> list[Any]:
    """Arrays of a checkpoint as they are stored.

    Args:
      path: of the checkpoint.
      leaves: which ones.
      like: arrays or structs with the shardings that they shall have; None reads all of them as
        NumPy arrays.

    Raises:
      CheckpointError: a missing or damaged file.
    """
    if like is None:
        args: list[ocp.RestoreArgs] = [ocp.RestoreArgs(restore_type=np.ndarray) for _ in leaves]
    else:
        args = [
            ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
            for x in like
        ]
    keys = [leaf.key for leaf in leaves]
    restore = ocp.args.PyTreeRestore(
        item=dict.fromkeys(keys, 0),
        restore_args=dict(zip(keys, args, strict=True)),
        partial_restore=True,
    )
    # The handler alone: around it orbax puts a barrier, at which a process that fails is missed.
    try:
        found = ocp.PyTreeCheckpointHandler().restore(path / ARRAYS, args=restore)
        return [found[key] for key in keys]
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise UnreadableError(f"{path} is damaged: {first_line(error)}") from error
