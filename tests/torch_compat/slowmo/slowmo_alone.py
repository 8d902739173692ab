"""The wrapper of one rank, without the others: what needs no exchange."""

from unittest import mock

import torch

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo
from torch_compat.slowmo import _options
from torch_compat.slowmo._places import Places
from torch_compat.slowmo.backends import Backend
from torch_compat.slowmo.backends._base import check_devices


class Alone(Backend):
    """One rank of a world whose others are not there."""

    name = "torch_xla"
    unused = ("synch_freq", "use_streams", "profile_mode", "comm_device", "global_group")

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


def build(
    world: int = 4, rank: int = 1, nprocs_per_node: int = 1, module=None, **options
) -> SlowMo:
    """The wrapper, as the constructor of that rank sees the world."""
    module = torch.nn.Linear(3, 2) if module is None else module
    with mock.patch.object(_options, "choose_backend", return_value=Alone(rank, world)):
        return SlowMo(module, nprocs_per_node, **options)
