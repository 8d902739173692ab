"""Checkpoints that are there as a whole or not at all."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, replacing what was at `path`, only once all of it is on disk.

    Args:
      path: the file; its folder is made where it is missing.
      state: tensors, numbers, strings, dicts and lists; nothing that `torch.load` with
        `weights_only=True` refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote, on the CPU.

    Raises:
      ValueError: if there is no such file, or it is no checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"There is no checkpoint {path}.") from None
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a checkpoint: it holds a {type(state).__name__}.")
    return state
