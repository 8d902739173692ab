"""A function on every CPU device of a fresh process, and what it returned on each."""

import pickle
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


def spawned(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)`, a module's function, returned on each of `world` devices.

    Raises:
        RuntimeError: the traceback of a device that raised while others waited for it in a
            collective; XLA's CPU runtime aborts such a process after 15 s.
    """
    runtime.configure_cpu_devices(world)
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder) / "error"
        try:
            xmp.spawn(_run, args=(folder, world, function, args), start_method="fork")
        except BrokenProcessPool as broken:
            if error.exists():
                raise RuntimeError(error.read_text()) from broken
            raise
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
