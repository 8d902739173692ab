"""What SlowMo asks of whatever connects the processes."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch

from .._places import Places


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
    def meet(self) -> None:
        """Come together before a collective where one alone would end the process.

        Raises:
          PeerLostError: another process will not come.
        """

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
