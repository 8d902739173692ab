"""The wrapper of one rank, without a device."""

import pytest
import torch
import torch_xla

from torch_compat.slowmo import SlowMoDistributedDataParallel


@pytest.fixture
def build(monkeypatch):
    """The wrapper of one rank, as the constructor sees the world."""

    def build(world=4, rank=1, nprocs_per_node=1, module=None, **options):
        monkeypatch.setattr(torch_xla.runtime, "world_size", lambda: world)
        monkeypatch.setattr(torch_xla.runtime, "global_ordinal", lambda: rank)
        return SlowMoDistributedDataParallel(
            module or torch.nn.Linear(3, 2), nprocs_per_node, **options
        )

    return build
