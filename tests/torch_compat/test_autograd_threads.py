"""Scripts that have differentiated on the host before `xmp.spawn` forks them."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch_xla
from slowmo_spawned import spawned

from support.waiting import PATIENCE_SECONDS
from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WORLD = 4
# Waits for all device threads of the process that is forked from this one.
TOGETHER = threading.Barrier(WORLD)
FIRST_FORWARD = {"training": nullcontext, "no grad": torch.no_grad}


def first_backward(first_forward: str) -> list[float]:
    device, rank = torch_xla.device(), torch_xla.runtime.global_ordinal()
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    module.to(device)
    net = SlowMo(module, nprocs_per_node=1)
    x = torch.full((1, 2), 1.0 + rank).to(device)
    TOGETHER.wait(PATIENCE_SECONDS)
    with FIRST_FORWARD[first_forward]():
        net(x)
    TOGETHER.wait(PATIENCE_SECONDS)
    net(x).sum().backward()
    runtime.run_pending()
    return module.weight.grad.reshape(-1).tolist()


@pytest.mark.parametrize("first_forward", FIRST_FORWARD)
def test_all_devices_at_once_after_backward_on_the_host(first_forward):
    torch.ones(3, requires_grad=True).sum().backward()
    results = spawned(WORLD, first_backward, first_forward, by="torch_xla")
    assert results == [[1.0 + rank] * 2 for rank in range(WORLD)]
