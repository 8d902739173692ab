"""The number of devices, and an autograd engine that has seen none of them."""

import multiprocessing as mp
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from support.refusals import Refusal, each
from support.waiting import PATIENCE_SECONDS
from torch_compat import runtime


def in_a_fork(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, or raises, in a fork of this process, whose runtime it may start."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        try:
            theirs.send((function(*args), None))
        except Exception as error:
            theirs.send((None, error))

    process = context.Process(target=run)
    process.start()
    assert ours.poll(PATIENCE_SECONDS), "no answer from the fork"
    result, error = ours.recv()
    process.join()
    if error is not None:
        raise error
    return result


def _configured(count: int) -> tuple[int, dict[str, str]]:
    runtime.configure_cpu_devices(count)
    names = ["PJRT_DEVICE", "CPU_NUM_DEVICES", "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE"]
    environment = {name: os.environ[name] for name in [*names, "NPROC"]}
    before = len(os.listdir("/proc/self/task"))
    devices = len(runtime.open_devices())
    # XLA's two pools have the threads that were asked for.
    assert len(os.listdir("/proc/self/task")) - before >= 2 * int(environment["NPROC"])
    return devices, environment


def test_configured_devices():
    count = 20
    devices, environment = in_a_fork(_configured, count)
    assert devices == count
    assert environment == {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(count),
        "PJRT_CPU_ASYNC_CLIENT": "0",
        "XLA_THREAD_POOL_SIZE": str(max(16, count)),
        "NPROC": str(max(os.cpu_count(), 2 * count)),
    }
    assert not runtime.is_started()


def _configure_late() -> None:
    torch_xla.device()
    runtime.configure_cpu_devices(2)


def _open_others() -> None:
    runtime.configure_cpu_devices(2)
    torch_xla.device()
    runtime.open_devices(4)


ROWS = {
    **{
        f"{count!r} devices": Refusal(
            partial(runtime.configure_cpu_devices, count), "`num_devices`", repr(count)
        )
        for count in (0, 65)
    },
    "after the start": Refusal(
        lambda: in_a_fork(_configure_late), "configure_cpu_devices(2)", error=RuntimeError
    ),
    "more than there are": Refusal(lambda: in_a_fork(_open_others), "2 (CPU:0, CPU:1)", 4),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()


def _world_after_asking_early() -> tuple[int, int]:
    runtime.configure_cpu_devices(3)
    early = xr.world_size()  # torch_xla remembers this answer
    runtime.open_devices()
    return early, xr.world_size()


def test_the_size_of_the_world_is_not_an_earlier_one():
    assert in_a_fork(_world_after_asking_early) == (1, 3)
