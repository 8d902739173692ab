"""What the constructor is given: what it means, what is refused, and what is only mentioned."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch_xla.runtime as xr

_UNUSED = {
    "synch_freq": 0,
    "use_streams": True,
    "profile_mode": False,
    "global_group": None,
    "master_group": None,
    "local_node_group": None,
    "comm_device": None,
}
_OVERLAP = (
    "`overlap`=True is not available (FairScale's is disabled as well): the exchange would have to "
    "run beside the next step, and a torch_xla program runs one graph after the other. In JAX, "
    "jaxslowmo.sgp(..., overlap=1) does it."
)


class SlowMoBaseAlgorithm(str, Enum):  # noqa: UP042  FairScale's prints its name
    """How the nodes come together between two slow steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"

    @classmethod
    def of(cls, value: object) -> "SlowMoBaseAlgorithm":
        """The member that `value`, a member or its string, names.

        Raises:
          ValueError: any other value.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(
                f"`slowmo_base_algorithm` must be a SlowMoBaseAlgorithm or one of {names}, got "
                f"{value!r}."
            ) from None


@dataclass(frozen=True)
class Places:
    """One process among all.

    Node k consists of ranks k * nprocs_per_node to (k + 1) * nprocs_per_node - 1; the first of them
    is its master.

    Attributes:
      rank: of this process, 0 or more.
      world_size: number of processes.
      nprocs_per_node: processes in each node.

    Raises:
      ValueError: no positive int, or not a divisor of the world's size.
    """

    rank: int
    world_size: int
    nprocs_per_node: int = 1

    def __post_init__(self) -> None:
        size = self.nprocs_per_node
        _check_count("nprocs_per_node", size)
        if self.world_size % size:
            raise ValueError(
                f"`nprocs_per_node` must divide the number of processes, {self.world_size}, got "
                f"{size}."
            )

    @property
    def node(self) -> int:
        """The node of this process."""
        return self.rank // self.nprocs_per_node

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.world_size // self.nprocs_per_node

    @property
    def is_master(self) -> bool:
        """Whether this process speaks for its node."""
        return self.rank % self.nprocs_per_node == 0

    @property
    def node_groups(self) -> list[list[int]]:
        """The ranks of every node."""
        size = self.nprocs_per_node
        return [list(range(k * size, (k + 1) * size)) for k in range(self.num_nodes)]


def settle(given: Mapping[str, Any]) -> tuple[Places, SlowMoBaseAlgorithm | None]:
    """Check all arguments of the constructor but `graph`, `mixing` and `push_sum`; mention some.

    Its warnings point at the caller of the constructor.

    Returns:
      Where this process is, and the base algorithm; None where it is off.

    Raises:
      ValueError: naming the argument, the rule and the value.
    """
    module = given["module"]
    if not isinstance(module, torch.nn.Module) or not any(True for _ in module.parameters()):
        raise ValueError(f"`module` must be a torch.nn.Module with parameters, got {module!r}.")
    if given["overlap"]:
        raise ValueError(_OVERLAP)
    _check_numbers(given)
    _check_place("process_rank", given["process_rank"], xr.global_ordinal())
    _check_place("process_world_size", given["process_world_size"], xr.world_size())
    base = SlowMoBaseAlgorithm.of(given["slowmo_base_algorithm"])
    places = Places(xr.global_ordinal(), xr.world_size(), given["nprocs_per_node"])

    _mention_unused(given, places)
    if places.world_size == 1:
        _mention("SlowMoDistributedDataParallel: there is one process, so nothing is exchanged.")
    has_slow_momentum = given["slowmo_lr"] != 1 or given["slowmo_momentum"] != 0
    if places.nprocs_per_node > 1 and places.num_nodes == 1:
        _mention(
            f"`nprocs_per_node`={places.nprocs_per_node} makes one node of all processes: LocalSGD "
            "and SGP are off, since averaging gradients inside the node does all."
        )
        if has_slow_momentum:
            _mention("SlowMo is used without LocalSGD and SGP.")
        return places, None
    if has_slow_momentum and base == SlowMoBaseAlgorithm.LOCALSGD:
        _mention_schedule(given["slowmo_frequency"], given["localsgd_frequency"])
    return places, base


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Frequencies are ints >= 1, momentum lies in [0, 1), the slow learning rate is >= 0.

    Raises:
      ValueError: naming the argument, the rule and the value.
    """
    for name in ("slowmo_frequency", "localsgd_frequency", "slowmo_num_shards"):
        _check_count(name, options[name])
    momentum, slow_lr = options["slowmo_momentum"], options["slowmo_lr"]
    if not (_is_number(momentum) and 0 <= momentum < 1):
        raise ValueError(f"`slowmo_momentum` must lie in [0, 1), got {momentum!r}.")
    if not (_is_number(slow_lr) and 0 <= slow_lr < float("inf")):
        raise ValueError(f"`slowmo_lr` must be a finite number >= 0, got {slow_lr!r}.")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be an int >= 1, got {value!r}.")


def _check_place(name: str, given: int | None, actual: int) -> None:
    """A rank or world size that the caller states is the one that torch_xla has.

    Raises:
      ValueError: it is another.
    """
    if given is not None and given != actual:
        raise ValueError(
            f"`{name}` comes from torch_xla, where it is {actual}; leave it None or pass that, got "
            f"{given!r}."
        )


def _mention_unused(given: Mapping[str, Any], places: Places) -> None:
    """One warning that names the arguments without meaning on XLA that are not at their default."""
    shards_differ = (
        given["slowmo_memory_efficient"] and given["slowmo_num_shards"] < places.world_size
    )
    unused = {**_UNUSED, "slowmo_num_shards": 32} if shards_differ else _UNUSED
    names = [f"`{name}`" for name, default in unused.items() if given[name] is not default]
    if names:
        _mention(
            f"SlowMoDistributedDataParallel: {', '.join(names)} without effect on XLA: torch_xla "
            "has neither process groups nor streams, gossip is part of the step, and slow momentum "
            "is sharded over all processes.",
            stacklevel=5,
        )


def _mention_schedule(slowmo_frequency: int, localsgd_frequency: int) -> None:
    """A warning where slow steps and averages are out of step."""
    if slowmo_frequency % localsgd_frequency:
        _mention(
            f"`slowmo_frequency`={slowmo_frequency} is not a multiple of "
            f"`localsgd_frequency`={localsgd_frequency}: parameters are averaged more often than "
            "needed, or slow steps start from parameters that are not averaged.",
            stacklevel=5,
        )


def _mention(message: str, stacklevel: int = 4) -> None:
    warnings.warn(message, UserWarning, stacklevel=stacklevel)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
