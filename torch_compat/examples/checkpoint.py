"""Checkpoints that are complete or missing, and Ctrl-C that leaves time for one."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state`; an older file is replaced only when all of the new one is on disk."""
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


def load(path: Path, **expected: Any) -> dict[str, Any]:
    """Return the saved state; raise `ValueError` unless it has the entries `expected`."""
    try:
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise ValueError(f"There is no checkpoint {path}.") from None
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read: {error}") from error
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(f"{path} has the {name} {state.get(name)}, not {value}.")
    return state


def postpone_interrupt() -> list[int]:
    """Return a list that grows by one entry at the first Ctrl-C; the second one raises."""
    requests: list[int] = []

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.append(number)

    signal.signal(signal.SIGINT, handle)
    return requests
