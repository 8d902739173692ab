"""The wrapper of one rank, without the others."""

import pytest
import torch
from slowmo_spawned import BACKENDS

from torch_compat.slowmo import SlowMoDistributedDataParallel, _options
from torch_compat.slowmo._places import Places
from torch_compat.slowmo.backends import Backend
from torch_compat.slowmo.backends._base import check_devices


class Alone(Backend):
    """One rank of a world whose others are not there."""

    name = "torch_xla"
    unused = (("synch_freq", "use_streams", "profile_mode", "comm_device", "global_group"), "so")

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world_size = rank, world

    def device_of(self, module):
        return check_devices(module, None)

    def hosts(self):
        return ("here",) * self.world_size

    def join_nodes(self, places: Places) -> None:
        pass

    def may_read(self) -> bool:
        return True

    def _nobody(self, *args, **kwargs):
        raise AssertionError("nobody is there")

    meet = all_reduce = reduce_scatter = all_gather = permute = _nobody


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


@pytest.fixture(params=BACKENDS)
def by(request):
    """What connects the processes of a test."""
    return request.param
