"""The number of devices, and an autograd engine that has seen none of them."""

import multiprocessing as mp
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

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


@pytest.mark.parametrize("count", [1, 2, 8, 20])
def test_configured_devices(count: int):
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


@pytest.mark.parametrize("count", [0, -1, 65, 2.0, "2", True, None])
def test_bad_numbers_of_devices(count: Any):
    with pytest.raises(ValueError, match="`num_devices`"):
        runtime.configure_cpu_devices(count)


def _configure_late() -> None:
    torch_xla.device()
    runtime.configure_cpu_devices(2)


def test_configuring_after_the_runtime_has_started():
    with pytest.raises(RuntimeError, match=r"configure_cpu_devices\(2\) comes too late"):
        in_a_fork(_configure_late)


def _open_others() -> None:
    runtime.configure_cpu_devices(2)
    torch_xla.device()
    runtime.open_devices(4)


def test_opening_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"there are, 2 \(CPU:0, CPU:1\), got 4"):
        in_a_fork(_open_others)


def _world_after_asking_early() -> tuple[int, int]:
    runtime.configure_cpu_devices(3)
    early = xr.world_size()  # torch_xla remembers this answer
    runtime.open_devices()
    return early, xr.world_size()


def test_the_size_of_the_world_is_not_an_earlier_one():
    assert in_a_fork(_world_after_asking_early) == (1, 3)


def differentiate_on_host() -> None:
    torch.ones(3, requires_grad=True).sum().backward()


def _gradient_on_device(host_first: bool) -> float:
    if host_first:
        differentiate_on_host()
    runtime.configure_cpu_devices(2)
    device = runtime.open_devices()[1]
    runtime.bind(device)
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)
    weight.square().sum().backward()
    runtime.run_pending(device)
    differentiate_on_host()
    return weight.grad.cpu().sum().item()


@pytest.mark.parametrize("host_first", [False, True])
@pytest.mark.parametrize("parent_first", [False, True])
def test_backward_on_a_device_after_backward_on_the_host(host_first: bool, parent_first: bool):
    if parent_first:
        differentiate_on_host()
    assert in_a_fork(_gradient_on_device, host_first) == 12.0


def _without_the_fix() -> None:
    differentiate_on_host()
    device = torch_xla.device()
    torch.ones(3, device=device, requires_grad=True).sum().backward()


def test_torch_xla_alone_fails_there():
    """Should this ever pass, `autograd_threads` can go."""
    with pytest.raises(RuntimeError, match="device_ready_queues_"):
        in_a_fork(_without_the_fix)


def _transfer() -> list[torch.Tensor]:
    runtime.configure_cpu_devices(1)
    (device,) = runtime.open_devices()
    tensors = [torch.nn.Parameter(torch.ones(2)), torch.tensor(3), torch.ones(2, dtype=torch.half)]
    moved = runtime.to_device(tensors, device)
    assert all(xm.is_xla_tensor(tensor) for tensor in moved)
    assert runtime.to_device([], device) == []
    return [tensor.tolist() for tensor in runtime.to_host([tensor + 1 for tensor in moved])]


def test_transfers():
    assert in_a_fork(_transfer) == [[2.0, 2.0], 4, [2.0, 2.0]]
