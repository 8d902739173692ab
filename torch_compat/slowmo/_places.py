"""Which process is which: ranks, nodes and the masters of nodes."""

from dataclasses import dataclass


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
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"`nprocs_per_node` must be an int >= 1, got {size!r}.")
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
