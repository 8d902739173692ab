"""What SlowMo asks of whatever connects the processes."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .._places import Places
from ._header import Exchange


class Backend(ABC):
    """The processes of one run, seen from one of them.

    All processes call the collectives alike, in the same order. Those of XLA devices are traced, so
    they belong inside of `own_graph`.

    Attributes:
      name: as users write it.
      rank: of this process.
      world_size: number of processes.
      unused: constructor arguments that mean nothing here, and why, as parts of a sentence.
    """

    name: str
    rank: int
    world_size: int
    unused: tuple[tuple[str, ...], str]

    def __deepcopy__(self, memo: dict[int, object]) -> "Backend":
        """Copies of a wrapper are in the same run."""
        return self

    @abstractmethod
    def device_of(self, module: torch.nn.Module) -> torch.device:
        """The one device of this process, ready for use.

        Raises:
          ValueError: a parameter is elsewhere.
        """

    @abstractmethod
    def hosts(self) -> tuple[Hashable, ...]:
        """The host of every rank.

        Communication: one all-gather of at most a few bytes per process.
        """

    @abstractmethod
    def join_nodes(self, places: Places) -> None:
        """Prepare sums inside of nodes; called once, at construction."""

    @abstractmethod
    def meet(
        self,
        exchange: Exchange,
        device: torch.device,
        targets: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> dict[int, Exchange]:
        """Come together before an exchange, with those who come to the same.

        Args:
          exchange: the one that follows.
          device: of the tensors that it exchanges.
          targets: other processes to which this one sends in it; None for all.
          sources: other processes from which it receives; None for all.

        Raises:
          UnlikeCallsError: another process has come to another exchange.
          PeerLostError: another process will not come.

        Returns:
          Over gloo the headers of this process and of `sources`, equal but for those of
          `Kind.NO_DATA`; otherwise nothing.

        Communication: over gloo 32 bytes to each of `targets`; otherwise nothing.
        """

    def join_group(self) -> Any:
        """The process group of a join context.

        Raises:
          ValueError: where processes cannot tell each other what they do.
        """
        raise ValueError(
            f"join() is not available over {self.name}, where a process cannot be told what the "
            "others exchange: there each device must trace the same graphs. Give all processes the "
            "same number of batches, as torch.utils.data.DistributedSampler does."
        )

    def wait_for(self, work: Any) -> None:
        """Wait for a collective that has begun in `join_group`."""
        work.wait()

    def from_rank_of_node(self, value: Any, rank: int) -> Any:
        """The `value` of `rank`, a process of this node; of any type.

        Communication: one broadcast inside the node.
        """
        del rank
        return value

    @abstractmethod
    def may_read(self) -> bool:
        """Whether values may be brought to the host at this moment."""

    @abstractmethod
    def all_reduce(
        self, tensors: list[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        """The sums of `tensors`, of one dtype, over all processes or those of each group.

        Communication: one all-reduce of the bytes of `tensors`.
        """

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """This process' part (n,) of the sum of `flat` (world_size * n,).

        Communication: one reduce-scatter over all processes.
        """

    @abstractmethod
    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts (n,) of all processes in order of rank, (world_size * n,).

        Communication: one all-gather over all processes.
        """

    @abstractmethod
    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What the process that sends to this one by `edges` of ranks holds; 0 where none does.

        Communication: `value` from every source to its destination.
        """


def check_devices(module: torch.nn.Module, here: torch.device | None) -> torch.device:
    """The device of all parameters, which must be `here` where that is known.

    Raises:
      ValueError: there are others.
    """
    devices = {param.device for param in module.parameters()}
    only = here or next(iter(devices))
    if devices != {only}:
        where = "on one device" if here is None else f"on the device of this process, {here}"
        raise ValueError(
            f"`module` must have all its parameters {where}, found "
            f"{', '.join(sorted(map(str, devices)))}."
        )
    return only
