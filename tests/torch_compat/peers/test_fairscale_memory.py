"""The memory that SlowMo takes beside plain training, with FairScale's bounds.

FairScale reads the allocator of a GPU, which knows the peak too; torch has no such count on the
host. What is counted here is what the wrapper holds from one step to the next.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

SLOW = {"nprocs_per_node": 1, "slowmo_momentum": 0.5, "slowmo_frequency": 1}
CASES = {
    "sharded": {"localsgd_frequency": 100, "slowmo_memory_efficient": True},
    "whole": {"localsgd_frequency": 100, "slowmo_memory_efficient": False},
    "sharded, local SGD": {"localsgd_frequency": 1, "slowmo_memory_efficient": True},
}


def after_three_steps() -> dict[str, float]:
    """For each case the bytes that are held beside model and optimizer, in models."""
    return {name: _extra(SLOW | options) for name, options in CASES.items()}


def _extra(options: dict[str, Any]) -> float:
    device = here.device()
    module = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(64))
    net = SlowMo(module.to(device), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    x = torch.full((2, 64), 1.0 + here.rank()).to(device)
    for _ in range(3):
        take_step(net, optimizer, (net(x) ** 2).mean())
    assert num_bytes(net.module, optimizer) == 2 * num_bytes(net.module)  # SGD's momentum
    return num_bytes(net, optimizer) / num_bytes(net.module) - 2


def num_bytes(*owners: object) -> int:
    """Of all tensors that are reached from `owners`, each once."""
    return sum(t.numel() * t.element_size() for t in _tensors(owners, {}))


def _tensors(value: object, seen: dict[int, object]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield value
        parts = [value.grad]
    elif isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    else:
        is_ours = type(value).__module__.startswith(("torch_compat", "torch.nn", "torch.optim"))
        parts = list(vars(value).values()) if is_ours and hasattr(value, "__dict__") else []
    for part in parts:
        yield from _tensors(part, seen)


def test_it_takes_what_fairscale_allows(by):
    results = spawned(2, after_three_steps, by=by)
    most = {name: max(rank[name] for rank in results) for name in CASES}
    assert most["sharded"] == pytest.approx(2 / 2, rel=0.1)
    assert most["whole"] == pytest.approx(2, rel=0.1)
    assert most["sharded, local SGD"] - 1 < 0.3
    for rank in spawned(4, after_three_steps, by=by):
        assert rank["sharded"] == pytest.approx(2 / 4, rel=0.1)
