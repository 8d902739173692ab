"""The processes of `xmp.spawn`: each drives one XLA device."""

import itertools
import os
import socket
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ... import runtime
from ...autograd_threads import ensure_autograd_threads
from .._graphs import device_data, own_graph
from .._places import Places
from ._base import Backend, Peers, check_devices
from ._header import Exchange, Kind

# The next number for a wrapper, by process id (the process may be a fork) and rank.
_wrappers: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)


class XlaBackend(Backend):
    """The collectives of torch_xla, traced into the current graph."""

    name = "torch_xla"
    unused = (
        *("synch_freq", "use_streams", "profile_mode", "global_group", "master_group"),
        *("local_node_group", "comm_device"),
    )

    def __init__(self) -> None:
        self.rank = xr.global_ordinal()
        self.world_size = xr.world_size()
        self._wrapper = next(_wrappers[os.getpid(), self.rank])
        runtime.introduce()

    def device_of(self, module: torch.nn.Module) -> torch.device:
        device = check_devices(module, torch_xla.device())
        runtime.may_launch()  # raises an error for calls that would end the process later
        ensure_autograd_threads(device)
        return device

    def hosts(self) -> tuple[Hashable, ...]:
        if runtime.on_cpu():  # several CPU devices are threads of one process
            return (0,) * self.world_size
        return self.gather_number(zlib.crc32(socket.gethostname().encode()))

    def gather_number(self, number: int) -> tuple[int, ...]:
        """Return the `number` of every process, of at most 32 bits."""
        device = torch_xla.device()
        with own_graph(device):
            value = device_data([number], torch.int64, device)
        self.meet(Exchange(Kind.HOSTS, 8, 0), device)
        with own_graph(device):
            numbers = self.all_gather(value)
        return tuple(map(int, numbers.cpu()))

    def join_nodes(self, places: Places) -> None:
        pass  # every collective names its groups

    def meet(
        self, exchange: Exchange, device: torch.device, peers: Peers | None = None
    ) -> dict[int, Exchange]:
        """Wait for all CPU devices of the process, even if only some exchange data."""
        if runtime.may_launch():
            runtime.meet(str(exchange._replace(wrapper=self._wrapper)))
        return {}

    def may_read(self) -> bool:
        return self.world_size == 1 or runtime.may_launch()

    def all_reduce(
        self, tensors: list[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        xm.all_reduce("sum", tensors, groups=groups, pin_layout=False)
        return tensors

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        return xm.reduce_scatter("sum", flat, 1.0, 0, self.world_size, pin_layout=False)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return xm.all_gather(part, 0, pin_layout=False)

    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        return xm.collective_permute(value, [[source, target] for source, target in edges])
