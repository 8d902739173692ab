"""The processes of `torch.distributed`: of torchrun, `torch.multiprocessing`, or any launcher.

It is tested with gloo. With nccl, and torch_tpu's backend, it calls the same collectives.
"""

import functools
import socket
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._flat import flatten, unflatten
from .._places import Places
from ._base import Backend, Peers, check_devices
from ._header import Exchange, Kind
from ._waiting import Waiting, backend_on

# The tag of values; other messages of a program have small numbers, headers 0x510A to 0x510C.
_TAG = 0x510D
# gloo cannot sum these dtypes.
_WIDER = {torch.bool: torch.int32, torch.int16: torch.int32}
# torch 2.13 has renamed these functions.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedBackend(Backend):
    """The collectives of a process group.

    Args:
      global_group: process group of the run; None for all processes.
      local_node_group: process group of this process' node; None to make it.
      comm_device: device of exchanged tensors; None for that of the parameters, or the host for
        parameters on a GPU if the group uses gloo.

    Raises:
      ValueError: a group without this process.
    """

    name = "torch.distributed"
    unused = ("synch_freq", "use_streams", "profile_mode", "master_group")

    def __init__(
        self, global_group: Any = None, local_node_group: Any = None, comm_device: Any = None
    ) -> None:
        self._group = global_group or dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("`global_group` must contain this process.")
        self._node_group = local_node_group
        self._comm_device = None if comm_device is None else torch.device(comm_device)
        self._waiting = Waiting.for_group(self._group)
        self._wrapper = next(self._waiting.wrappers)
        self._device: torch.device | None = None

    def __reduce__(self) -> Any:
        raise TypeError(
            "A wrapper over torch.distributed cannot be pickled, as process groups cannot: save "
            "state_dict() in every process, or one consolidated_state_dict()."
        )

    def device_of(self, module: torch.nn.Module) -> torch.device:
        self._device = check_devices(module, None)
        return self._device

    def hosts(self) -> tuple[Hashable, ...]:
        self.meet(Exchange(Kind.HOSTS, 0, 0), torch.device("cpu"))
        names: list[Any] = [None] * self.world_size
        dist.all_gather_object(names, socket.gethostname(), group=self._group)
        return tuple(names)

    def join_nodes(self, places: Places) -> None:
        if places.nprocs_per_node == 1:
            return
        ranks = dist.get_process_group_ranks(self._group)
        nodes = [[ranks[rank] for rank in node] for node in places.node_groups]
        members = nodes[places.node]
        if self._node_group is None and len(members) == len(ranks):
            self._node_group = self._group
        elif self._node_group is None and len(ranks) < dist.get_world_size():
            # Processes outside of the run do not call this. torch derives the group's name from its
            # ranks, and hangs if a name comes again: such a group lives as long as the run's.
            kept, key = self._waiting.node_groups, tuple(members)
            if key not in kept:
                # torch_xla, once imported, replaces `dist.new_group` by one without this option.
                kept[key] = distributed_c10d.new_group(members, use_local_synchronization=True)
            self._node_group = kept[key]
        elif self._node_group is None:
            self._node_group = [dist.new_group(node) for node in nodes][places.node]
            finalize(self, _destroy, self._node_group)
        node_ranks = dist.get_process_group_ranks(self._node_group)
        if node_ranks != members:
            raise ValueError(
                f"`local_node_group` must hold the {places.nprocs_per_node} processes of this "
                f"node, ranks {members}, got ranks {node_ranks}."
            )

    def meet(
        self, exchange: Exchange, device: torch.device, peers: Peers | None = None
    ) -> dict[int, Exchange]:
        if backend_on(self._group, self._wire_device(device)) != "gloo":
            return {}
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        header = exchange._replace(wrapper=self._wrapper)
        return self._waiting.meet(header, *(peers or (others, others)))

    def join_group(self) -> Any:
        devices = [torch.device("cpu")]
        if self._device is not None:
            devices.append(self._wire_device(self._device))
        is_gloo = all(backend_on(self._group, device) == "gloo" for device in devices)
        return self._group if is_gloo else None

    def wait_for(self, work: Any) -> None:
        self._waiting.until_done(lambda: work)

    def from_rank_of_node(self, value: Any, rank: int) -> Any:
        values = [value]
        source = dist.get_process_group_ranks(self._group)[rank]
        dist.broadcast_object_list(values, source, group=self._node_group)
        return values[0]

    def may_read(self) -> bool:
        return True

    def all_reduce(
        self, tensors: list[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        in_node = groups is not None
        flat = flatten(tensors)
        wire = self._to_wire(flat.to(_WIDER.get(flat.dtype, flat.dtype)), fresh=True)
        self._wait(dist.all_reduce, wire, in_node=in_node)
        return unflatten(tensors, wire.to(flat.device))

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        wire = self._to_wire(flat)
        if backend_on(self._group, wire.device) == "gloo":
            # gloo's reduce-scatter sends as much as an all-reduce, twice the bytes needed.
            parts = torch.empty_like(wire)
            self._wait(dist.all_to_all_single, parts, wire)
            part = parts.reshape(self.world_size, -1).sum(0)
        else:
            part = wire.new_empty(len(flat) // self.world_size)
            self._wait(_REDUCE_SCATTER, part, wire)
        return part.to(flat.device)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        wire = self._to_wire(part)
        whole = wire.new_empty(len(part) * self.world_size)
        self._wait(_ALL_GATHER, whole, wire)
        return whole.to(part.device)

    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Exchange by one all-to-all, in which a process sends to at most one other.

        Communication: over gloo the values go beside it, and 1 byte for each in it.
        """
        wire = self._to_wire(value).reshape(-1)
        targets = [target for source, target in edges if source == self.rank]
        sources = [source for source, target in edges if target == self.rank]
        arrived = wire.new_empty(len(sources) * len(wire))
        sent, received, works = wire[: len(targets) * len(wire)], arrived, []
        if backend_on(self._group, wire.device) == "gloo":
            # gloo's all-to-all announces a receive after it has begun to send, on the same
            # connection: of two processes that send to each other one would wait for the other.
            works += [
                dist.irecv(arrived, group=self._group, group_src=rank, tag=_TAG) for rank in sources
            ]
            works += [
                dist.isend(wire, group=self._group, group_dst=rank, tag=_TAG) for rank in targets
            ]
            # A byte follows each value, so that `until_done` waits for it: messages of a connection
            # arrive in the order in which they were sent.
            sent, received = (
                torch.zeros(len(ranks), dtype=torch.uint8) for ranks in (targets, sources)
            )
        everyone = range(self.world_size)
        exchange = functools.partial(
            dist.all_to_all_single,
            output_split_sizes=[len(received) * (rank in sources) for rank in everyone],
            input_split_sizes=[len(sent) * (rank in targets) for rank in everyone],
        )
        self._wait(exchange, received, sent)
        for work in works:
            work.wait()
        return arrived.reshape(value.shape).to(value.device) if sources else torch.zeros_like(value)

    def _to_wire(self, value: torch.Tensor, *, fresh: bool = False) -> torch.Tensor:
        """Return `value`, contiguous, on the wire device; a copy if `fresh`, to be overwritten."""
        wire = value.detach().to(self._wire_device(value.device)).contiguous()
        return wire.clone() if fresh and wire.data_ptr() == value.data_ptr() else wire

    def _wire_device(self, device: torch.device) -> torch.device:
        """Return the device on which tensors of `device` are exchanged."""
        if self._comm_device is not None:
            return self._comm_device
        return torch.device("cpu") if backend_on(self._group, device) == "gloo" else device

    def _wait(self, collective: Any, *tensors: torch.Tensor, in_node: bool = False) -> None:
        group = self._node_group if in_node else self._group
        self._waiting.until_done(lambda: collective(*tensors, group=group, async_op=True), *tensors)


def _destroy(group: Any) -> None:
    """Close the connections of a group, unless `destroy_process_group()` has closed all."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
