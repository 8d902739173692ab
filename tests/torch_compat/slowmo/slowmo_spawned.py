"""A function in every process of a run, and what it returned in each."""

import itertools
import multiprocessing as mp
import pickle
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.waiting import PATIENCE_SECONDS

_FILTERS = threading.Lock()
# gloo everywhere, XLA's CPU devices where torch_xla is installed.
BACKENDS = ["gloo", *(["torch_xla"] if find_spec("torch_xla") else [])]


def spawned(world: int, function: Callable[..., Any], *args: Any, by: str = "gloo") -> list[Any]:
    """What `function(*args)`, a module's function, returned in each of `world` processes.

    Args:
        world: how many.
        function: of a module.
        args: its arguments.
        by: "gloo", one forked process each; or "torch_xla", threads of one that is forked, which
            drive a CPU device each.

    Raises:
        RuntimeError: the traceback of a process that raised, the first one's.
    """
    if by == "gloo":
        return spawned_at_once(world, function, [args])[0]
    with tempfile.TemporaryDirectory() as folder:
        _over_xla(world, Path(folder), function, args)
        return _results(world, Path(folder))


def spawned_at_once(
    world: int, function: Callable[..., Any], arguments: list[tuple]
) -> list[list[Any]]:
    """The same over gloo, for each of the `arguments` in a group that runs beside the others."""
    with tempfile.TemporaryDirectory() as top:
        folders = [Path(top) / str(number) for number in range(len(arguments))]
        for folder in folders:
            folder.mkdir()
        groups = [
            start_gloo(world, folder, function, *args)
            for folder, args in zip(folders, arguments, strict=True)
        ]
        for process in itertools.chain(*groups):
            process.join(PATIENCE_SECONDS)
        for folder, group in zip(folders, groups, strict=True):
            errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
            if errors:
                raise RuntimeError(errors[0].read_text())
            assert [process.exitcode for process in group] == [0] * world
        return [_results(world, folder) for folder in folders]


def _results(world: int, folder: Path) -> list[Any]:
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


def start_gloo(
    world: int, folder: Path, function: Callable[..., Any], *args: Any
) -> list[mp.Process]:
    """Processes that leave what they return, or a traceback, in `folder`."""
    context = mp.get_context("fork")
    processes = [
        context.Process(target=_in_gloo, args=(rank, world, folder, function, args), daemon=True)
        for rank in range(world)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12: this process has threads
        for process in processes:
            process.start()
    return processes


def _in_gloo(rank: int, world: int, folder: Path, function: Callable, args: tuple) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    dist.barrier()  # one that ends sooner would close connections that others are still making
    _run(rank, folder, function, args)
    dist.destroy_process_group()


def _over_xla(world: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    import torch_xla.distributed.xla_multiprocessing as xmp

    from torch_compat import runtime

    runtime.configure_cpu_devices(world)
    try:
        xmp.spawn(_on_device, args=(folder, world, function, args), start_method="fork")
    except BrokenProcessPool as broken:
        errors = list(folder.glob("error*"))
        if errors:
            raise RuntimeError(errors[0].read_text()) from broken
        raise


def _on_device(index: int, folder: Path, world: int, function: Callable, args: tuple) -> None:
    import torch_xla.runtime as xr

    del index
    with _FILTERS:
        warnings.simplefilter("ignore")  # pytest's filters came along, and threads share them
    assert xr.world_size() == world
    _run(xr.global_ordinal(), folder, function, args)


def _run(rank: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    try:
        result = function(*args)
    except BaseException:
        # Others may wait for this one; theirs come later.
        (folder / f"error{rank}").write_text(traceback.format_exc())
        raise
    (folder / str(rank)).write_bytes(pickle.dumps(result))
