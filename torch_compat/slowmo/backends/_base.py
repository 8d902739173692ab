"""The interface that SlowMo needs from a connection between the processes."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .._places import Places
from ._header import Exchange

# Ranks to send to, and ranks to receive from.
Peers = tuple[list[int], list[int]]


class Backend(ABC):
    """A connection of one process to all processes of its run.

    All processes call the same collectives in the same order. Collectives of XLA devices are
    traced, so they belong inside of `own_graph`.

    Attributes:
      name: name of the backend in arguments and messages.
      rank: rank of this process.
      world_size: number of processes.
      unused: constructor arguments without effect.
    """

    name: str
    rank: int
    world_size: int
    unused: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> "Backend":
        """Return the same object: copies of a wrapper are in the same run."""
        return self

    @abstractmethod
    def device_of(self, module: torch.nn.Module) -> torch.device:
        """Return the one device of this process, ready for use.

        Raises:
          ValueError: a parameter is on another device.
        """

    @abstractmethod
    def hosts(self) -> tuple[Hashable, ...]:
        """Return the host of every rank.

        Communication: one all-gather of at most a few bytes per process.
        """

    @abstractmethod
    def join_nodes(self, places: Places) -> None:
        """Prepare sums inside of nodes; called once, at construction."""

    @abstractmethod
    def meet(
        self, exchange: Exchange, device: torch.device, peers: Peers | None = None
    ) -> dict[int, Exchange]:
        """Wait for the other processes of an exchange, and check that theirs is the same.

        Args:
          exchange: the exchange that follows.
          device: device of the tensors to exchange.
          peers: other processes to which this one sends, and from which it receives; None for all.

        Raises:
          UnlikeCallsError: another process is in a different exchange.
          PeerLostError: another process has ended.

        Returns:
          Over gloo the headers of this process and of those it receives from, equal except those
          of `Kind.NO_DATA`; otherwise an empty dict.

        Communication: over gloo 40 bytes to each process that it sends to; otherwise nothing.
        """

    def join_group(self) -> Any:
        """Return the process group of a join context.

        None: a process cannot learn what the others exchange next.
        """
        return None

    def wait_for(self, work: Any) -> None:
        """Wait for a collective that has begun in `join_group`."""
        work.wait()

    def from_rank_of_node(self, value: Any, rank: int) -> Any:
        """Return the `value`, of any type, of `rank`, a process of this node.

        Communication: one broadcast inside the node.
        """
        del rank
        return value

    @abstractmethod
    def may_read(self) -> bool:
        """Return whether values may be copied to the host now."""

    @abstractmethod
    def all_reduce(
        self, tensors: list[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        """Return the sums of `tensors`, of one dtype, over all processes or those of each group.

        Communication: one all-reduce of the bytes of `tensors`.
        """

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this process' part (n,) of the sum of `flat` (world_size * n,).

        Communication: one reduce-scatter over all processes.
        """

    @abstractmethod
    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts (n,) of all processes in order of rank, (world_size * n,).

        Communication: one all-gather over all processes.
        """

    @abstractmethod
    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the value of the process that sends to this one by `edges` of ranks, or 0.

        Communication: `value` is sent from every source to its destination.
        """


def check_devices(module: torch.nn.Module, device: torch.device | None) -> torch.device:
    """Return the one device of all parameters; it must be `device` unless that is None.

    Raises:
      ValueError: parameters are on other devices.
    """
    devices = {param.device for param in module.parameters()}
    only = device or next(iter(devices))
    if devices != {only}:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"`module` must have all its parameters on {device or 'one device'}, got {found}."
        )
    return only
