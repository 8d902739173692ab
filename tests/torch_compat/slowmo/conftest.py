"""The wrapper of one rank, without the others."""

import pytest
import torch
from slowmo_alone import Alone

from torch_compat.slowmo import SlowMoDistributedDataParallel, _options


@pytest.fixture
def build(monkeypatch):
    """The wrapper of one rank, as the constructor sees the world."""

    def build(world=4, rank=1, nprocs_per_node=1, module=None, **options):
        alone = Alone(rank, world)
        monkeypatch.setattr(_options, "choose", lambda name, module, groups: alone)
        return SlowMoDistributedDataParallel(
            module or torch.nn.Linear(3, 2), nprocs_per_node, **options
        )

    return build
