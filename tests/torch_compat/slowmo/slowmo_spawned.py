"""A function on every CPU device of a fresh process, and what it returned on each."""

import pickle
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

from torch_compat import runtime

_FILTERS = threading.Lock()


class AbortedError(Exception):
    """The process was aborted, and no device had raised anything."""


def spawned(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)`, a module's function, returned on each of `world` devices.

    XLA's CPU runtime aborts the process when one device keeps the others waiting for 15 s in a
    collective. On an overloaded machine that has happened with programs that otherwise pass, in
    about one of thirty: such a process gets a second chance, and says so. Neither an exception in
    `function` nor a deadlock that comes back passes.
    """
    try:
        return _spawn_once(world, function, args)
    except AbortedError:
        print(f"{function.__name__}: XLA aborted the process; once more", file=sys.stderr)
        return _spawn_once(world, function, args)


def _spawn_once(world: int, function: Callable[..., Any], args: tuple) -> list[Any]:
    runtime.configure_cpu_devices(world)
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder) / "error"
        try:
            xmp.spawn(_run, args=(folder, world, function, args), start_method="fork")
        except BrokenProcessPool as broken:
            if error.exists():
                raise RuntimeError(error.read_text()) from broken
            raise AbortedError from broken
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]


def _run(index: int, folder: str, world: int, function: Callable[..., Any], args: tuple) -> None:
    del index
    with _FILTERS:
        warnings.simplefilter("ignore")  # pytest's filters came along, and threads share them
    try:
        assert xr.world_size() == world
        result = function(*args)
    except BaseException:
        # The other devices may wait for this one until XLA aborts the process.
        (Path(folder) / "error").write_text(traceback.format_exc())
        raise
    (Path(folder) / str(xr.global_ordinal())).write_bytes(pickle.dumps(result))
