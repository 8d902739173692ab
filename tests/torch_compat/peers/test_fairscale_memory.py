"""The memory that SlowMo takes beside plain training, with FairScale's bounds.

FairScale reads the allocator of a GPU, which knows the peak too; torch has no such count on the
host. What is counted here is what the wrapper holds from one step to the next.
"""

import gc
import time

import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

SIZE = 64 * 64 * 4
CASES = {
    "sharded": {"localsgd_frequency": 100},
    "whole": {"localsgd_frequency": 100, "slowmo_memory_efficient": False},
    "sharded, local SGD": {"localsgd_frequency": 1},
}


def held() -> int:
    """The bytes of all tensors since `gc.freeze()`."""
    found = []
    for _ in range(10):  # gloo's threads let go of what they have sent a little later
        time.sleep(0.05)
        gc.collect()
        storages = [t.untyped_storage() for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        found.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    return min(found)


def extra(options: dict) -> float:
    """The bytes that are held beside model and optimizer, in models."""
    gc.freeze()
    net = SlowMo(torch.nn.Linear(64, 64, bias=False), 1, slowmo_frequency=1, **options)
    torch.nn.init.eye_(net.module.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        take_step(net, optimizer, (net(torch.full((2, 64), 1.0 + here.rank())) ** 2).mean())
    return held() / SIZE - 1


def of_all_cases() -> dict[str, float]:
    return {name: extra(options) for name, options in CASES.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_it_takes_what_fairscale_allows(world):
    for found in spawned(world, of_all_cases):
        assert found["sharded"] == pytest.approx(2 / world, rel=0.1)
        assert found["whole"] == pytest.approx(2, rel=0.1)
        assert found["sharded, local SGD"] - 2 / world < 0.3
