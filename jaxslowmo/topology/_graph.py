"""A gossip graph: an ordered phone book, and the rotation through it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ._arguments import as_rows, as_size, described, takes
from ._colouring import Edge, colour_edges
from ._phone_book import check_connected, check_phone_book

Peers = tuple[tuple[int, ...], ...]  # per node

# Rows of many different lengths need millions of exchanges until all start over together, and every
# exchange of a rotation is a branch of the program.
MAX_ROUNDS = 10_000


@dataclass(frozen=True)
class Graph:
    """Whom each node sends to, step by step.

    At exchange number `step` = 0, 1, ... a node sends to `peers_per_step` entries of its row of the
    phone book. A dynamic graph goes on to the next entries with every exchange and starts over at
    the end of the row; a static one stays at the first. A row that is shorter than `peers_per_step`
    is used whole.

    Attributes:
      num_nodes: number of nodes, 1 or more.
      peers_per_step: most peers that a node sends to in one exchange.
      phone_book: ordered out-peers of every node; an entry may occur more than once.
      is_dynamic: whether it rotates.
      is_bipartite: whether it is declared bipartite: every edge joins an even and an odd node.
      name: for messages and tables.

    Raises:
      ValueError: unknown nodes, self-loops, a node that nobody sends to, nodes that cannot reach
        each other, more peers than any row has, an edge inside one side of a bipartite graph, rows
        of so many lengths that a rotation has more than 10000 exchanges.
    """

    num_nodes: int
    peers_per_step: int
    phone_book: Peers
    is_dynamic: bool = True
    is_bipartite: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        for argument in ("num_nodes", "peers_per_step"):
            object.__setattr__(self, argument, as_size(argument, getattr(self, argument)))
        object.__setattr__(self, "phone_book", as_rows("phone_book", self.phone_book))
        longest = max(map(len, self.phone_book), default=0)
        if self.num_nodes > 1 and self.peers_per_step > max(longest, 1):
            raise ValueError(
                f"`peers_per_step` must be at most {longest}, the peers in the phone book of "
                f"{self.name}({self.num_nodes}), got {self.peers_per_step}."
            )
        check_phone_book(self.name, self.num_nodes, self.phone_book, self.is_bipartite)
        # A static graph stays at the first entries: the others connect nothing.
        in_use = self.phone_book if self.is_dynamic else self.out_peers(0)
        check_connected(self.name, self.num_nodes, in_use)
        if self.num_rounds > MAX_ROUNDS:
            raise ValueError(
                f"{self.name}({self.num_nodes}): a rotation must have at most {MAX_ROUNDS} "
                f"exchanges, and rows of lengths {sorted(set(map(len, self.phone_book)))} take "
                f"{self.num_rounds} until all start over together; make them equally long, by "
                "repeating peers, or send to all of them every time."
            )

    @cached_property
    def num_rounds(self) -> int:
        """Exchanges until the graph repeats itself; 1 for a static graph."""
        if not self.is_dynamic:
            return 1
        rows = [row for row in self.phone_book if row]
        return math.lcm(1, *(len(row) // math.gcd(len(row), self._sends(row)) for row in rows))

    def out_peers(self, step: int) -> Peers:
        """Whom each node sends to at exchange `step` = 0, 1, ..., in order."""
        return tuple(self._out_peers_of(row, step) for row in self.phone_book)

    def in_peers(self, step: int) -> Peers:
        """Whom each node receives from at exchange `step`, by place in the senders' order."""
        out = self.out_peers(step)
        found: list[list[int]] = [[] for _ in out]
        for place in range(max(map(len, out), default=0)):
            for source, peers in enumerate(out):
                if place < len(peers):
                    found[peers[place]].append(source)
        return tuple(map(tuple, found))

    def permutations(self, step: int) -> tuple[tuple[Edge, ...], ...]:
        """The exchange as partial permutations: lists of (source, destination).

        In each a node sends at most once and receives at most once. There are as many as the
        largest number of sends or receipts at one node; `peers_per_step` where the graph is
        regular.
        """
        step %= self.num_rounds
        if step not in self._coloured:
            self._coloured[step] = self._colour(step)
        return self._coloured[step]

    @cached_property
    def is_regular(self) -> bool:
        """Whether in every exchange all nodes send and receive the same number of messages."""
        for step in range(self.num_rounds):
            counts = {len(p) for p in self.out_peers(step)} | {len(p) for p in self.in_peers(step)}
            if len(counts) > 1:
                return False
        return True

    @cached_property
    def _coloured(self) -> dict[int, tuple[tuple[Edge, ...], ...]]:
        """Rounds that somebody asked for."""
        return {}

    def _colour(self, step: int) -> tuple[tuple[Edge, ...], ...]:
        out = self.out_peers(step)
        edges = [
            (source, peers[place])
            for place in range(max(map(len, out), default=0))
            for source, peers in enumerate(out)
            if place < len(peers)
        ]
        return tuple(map(tuple, colour_edges(edges)))

    def _sends(self, row: Sequence[int]) -> int:
        return min(self.peers_per_step, len(row))

    def _out_peers_of(self, row: Sequence[int], step: int) -> tuple[int, ...]:
        count = self._sends(row)
        start = step * count if self.is_dynamic else 0
        return tuple(row[(start + i) % len(row)] for i in range(count))


def from_phone_book(
    table: Sequence[Sequence[int]], peers_per_step: int | None = 1, *, name: str = "custom"
) -> Graph:
    """A graph out of any ordered phone book.

    Args:
      table: the out-peers of every node, in the order in which they get their turn. Rows may differ
        in length, and in-degrees from out-degrees: push-sum weights make up for it.
      peers_per_step: how many entries of its row each node sends to in one exchange, at most the
        length of the shortest row. None: all of them, always (a static graph).
      name: for messages and tables.

    Returns:
      A `Graph`.

    Raises:
      ValueError: no rows, unknown nodes, self-loops, a node that nobody sends to, nodes that cannot
        reach each other, more peers per step than a row has, rows of so many lengths that a
        rotation has more than 10000 exchanges.

    Example:
      >>> graph = from_phone_book([[1, 2], [0], [1]])
      >>> graph.out_peers(1), graph.num_rounds, graph.is_regular
      (((2,), (0,), (1,)), 2, False)
    """
    rows = as_rows("table", table)
    if not rows:
        raise ValueError("`table` must have one row per node, got none.")
    if peers_per_step is None:
        return Graph(len(rows), max([1, *map(len, rows)]), rows, is_dynamic=False, name=name)
    peers_per_step = as_size("peers_per_step", peers_per_step)
    short = next((i for i, row in enumerate(rows) if len(row) < peers_per_step), None)
    # Rows that are empty, and single nodes, are the graph's own business.
    if short is not None and rows[short] and len(rows) > 1:
        raise ValueError(
            f"`peers_per_step` must be at most {len(rows[short])}, the length of the phone book "
            f"row of node {short} in {name}({len(rows)}), got {peers_per_step}."
        )
    return Graph(len(rows), peers_per_step, rows, name=name)


def unique(row: Sequence[int]) -> tuple[int, ...]:
    """`row` with the first of equal entries only."""
    return tuple(dict.fromkeys(row))


def check_graph(owner: str, graph: Any) -> None:
    """Refuse what neither is a graph nor makes one.

    Args:
      owner: of the argument, for messages.
      graph: a `Graph`, a function `(num_nodes) -> Graph`, or None.

    Raises:
      ValueError: something else.
    """
    if graph is None or isinstance(graph, Graph) or takes(graph, "num_nodes"):
        return
    hint = "; did you mean `mixing`?" if takes(graph, "graph", "step") else "."
    raise ValueError(
        f"{owner}: `graph` must be a js.topology.Graph, a function of the number of nodes that "
        f"makes one, or None, got {described(graph)}{hint}"
    )
