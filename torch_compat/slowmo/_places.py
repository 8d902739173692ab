"""The place of a process among all processes, nodes and hosts."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from ..checks import as_count


@dataclass(frozen=True)
class Places:
    """The place of one process among all.

    A node is a group of `nprocs_per_node` processes, of one host if they fit into one; the first is
    its master. Without `hosts`, and if ranks count host by host, node k consists of ranks
    k * nprocs_per_node to (k + 1) * nprocs_per_node - 1.

    Attributes:
      rank: rank of this process, 0 <= rank < world_size.
      world_size: number of processes.
      nprocs_per_node: processes in each node.
      hosts: the host of every rank; None if it does not matter.

    Raises:
      ValueError: nprocs_per_node is no positive int, no divisor of the world's size, or neither
        divides the processes of every host nor is made up of whole hosts.
    """

    rank: int
    world_size: int
    nprocs_per_node: int = 1
    hosts: tuple[Hashable, ...] | None = None

    def __post_init__(self) -> None:
        size = as_count("nprocs_per_node", self.nprocs_per_node)
        if self.world_size % size:
            raise ValueError(
                f"`nprocs_per_node` must divide the number of processes, {self.world_size}, got "
                f"{size}."
            )
        sizes = [len(ranks) for ranks in self._by_host().values()]
        inside, whole = all(n % size == 0 for n in sizes), all(size % n == 0 for n in sizes)
        if not (inside or (whole and len(set(sizes)) == 1)):
            raise ValueError(
                f"`nprocs_per_node` must not split a host over nodes, got {size} with hosts of "
                f"{', '.join(map(str, sizes))} processes."
            )

    def _by_host(self) -> dict[Hashable, list[int]]:
        """Return the ranks of every host, hosts in order of their first rank."""
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(self.hosts[rank] if self.hosts else None, []).append(rank)
        return groups

    @cached_property
    def node_groups(self) -> list[list[int]]:
        """The ranks of every node; those of a host follow each other."""
        order = [rank for ranks in self._by_host().values() for rank in ranks]
        size = self.nprocs_per_node
        return [order[k : k + size] for k in range(0, self.world_size, size)]

    @cached_property
    def node(self) -> int:
        """The node of this process."""
        return next(k for k, ranks in enumerate(self.node_groups) if self.rank in ranks)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.world_size // self.nprocs_per_node

    @property
    def masters(self) -> list[int]:
        """The rank of every node's master."""
        return [ranks[0] for ranks in self.node_groups]

    @property
    def is_master(self) -> bool:
        """True if this process is the master of its node."""
        return self.rank in self.masters
