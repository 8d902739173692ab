"""A gossip graph: an ordered phone book, the rotation through it, and its checks."""

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Edge = tuple[int, int]  # (source, destination)
Peers = tuple[tuple[int, ...], ...]  # one tuple of peers per node

# Rows of many different lengths start over together only after millions of exchanges, and every
# exchange of a rotation is a branch of the program.
MAX_ROUNDS = 10_000


@dataclass(frozen=True)
class Graph:
    """A gossip graph: the peers that each node sends to, step by step.

    At exchange number `step` = 0, 1, ... a node sends to `peers_per_step` entries of its row of the
    phone book. A dynamic graph uses the next entries in every exchange and starts over at the end
    of the row. A static graph always uses the first entries. A row that is shorter than
    `peers_per_step` is used whole.

    Attributes:
      num_nodes: number of nodes, 1 or more.
      peers_per_step: largest number of peers that a node sends to in one exchange.
      phone_book: ordered out-peers of every node; an entry may occur more than once.
      is_dynamic: whether the graph rotates through its phone book.
      is_bipartite: whether the graph is declared bipartite: every edge joins an even and an odd
        node.
      name: name in messages and tables.

    Raises:
      ValueError: unknown nodes, self-loops, a node without in-peers, nodes that cannot reach each
        other, more peers than any row has, an edge between two even or two odd nodes in a bipartite
        graph, rows of so many lengths that a rotation has more than 10000 exchanges.
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
        # A static graph uses only the first entries, so the others connect nothing.
        in_use = self.phone_book if self.is_dynamic else self.out_peers(0)
        check_connectivity(self.name, self.num_nodes, in_use)
        if self.num_rounds > MAX_ROUNDS:
            raise ValueError(
                f"{self.name}({self.num_nodes}): rows of lengths "
                f"{sorted(set(map(len, self.phone_book)))} start over together after "
                f"{self.num_rounds} exchanges, more than {MAX_ROUNDS}: make them equally long."
            )

    @cached_property
    def num_rounds(self) -> int:
        """The number of exchanges until the graph repeats itself; 1 for a static graph."""
        if not self.is_dynamic:
            return 1
        rows = [row for row in self.phone_book if row]
        return math.lcm(1, *(len(row) // math.gcd(len(row), self._num_sent(row)) for row in rows))

    def out_peers(self, step: int) -> Peers:
        """Return the peers that each node sends to at exchange `step` = 0, 1, ..., in order."""
        return tuple(self._row_peers(row, step) for row in self.phone_book)

    def in_peers(self, step: int) -> Peers:
        """Return the nodes that each node receives from at exchange `step`.

        Nodes that send to it as their first peer come first, then those with it as second peer, ...
        """
        sources: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for source, destination in self._edges(step):
            sources[destination].append(source)
        return tuple(map(tuple, sources))

    def permutations(self, step: int) -> tuple[tuple[Edge, ...], ...]:
        """Return the exchange as partial permutations: tuples of (source, destination).

        In each of them a node sends at most once and receives at most once. Their number is the
        largest number of messages that one node sends or receives: `peers_per_step` if the graph is
        regular.
        """
        step %= self.num_rounds
        if step not in self._permutation_cache:
            self._permutation_cache[step] = tuple(map(tuple, colour_edges(self._edges(step))))
        return self._permutation_cache[step]

    @cached_property
    def is_regular(self) -> bool:
        """True if in every exchange all nodes send and receive the same number of messages."""
        return all(
            len({*map(len, self.out_peers(step)), *map(len, self.in_peers(step))}) == 1
            for step in range(self.num_rounds)
        )

    @cached_property
    def _permutation_cache(self) -> dict[int, tuple[tuple[Edge, ...], ...]]:
        """The cache of `permutations`, by round."""
        return {}

    def _edges(self, step: int) -> list[Edge]:
        """Return the messages of an exchange: first the first peer of every node, and so on."""
        out = self.out_peers(step)
        return [
            (source, peers[place])
            for place in range(max(map(len, out), default=0))
            for source, peers in enumerate(out)
            if place < len(peers)
        ]

    def _num_sent(self, row: Sequence[int]) -> int:
        return min(self.peers_per_step, len(row))

    def _row_peers(self, row: Sequence[int], step: int) -> tuple[int, ...]:
        count = self._num_sent(row)
        start = step * count if self.is_dynamic else 0
        return tuple(row[(start + i) % len(row)] for i in range(count))


def from_phone_book(
    table: Sequence[Sequence[int]], peers_per_step: int | None = 1, *, name: str = "custom"
) -> Graph:
    """Make a graph from a phone book: for each node the list of nodes that it sends to, in order.

    Args:
      table: the out-peers of every node, in the order of the rotation. Rows may differ in length,
        and in-degrees from out-degrees; push-sum weights compensate for both.
      peers_per_step: number of entries of its row that a node sends to in one exchange, at most the
        length of the shortest row. None: all entries in every exchange (a static graph).
      name: name in messages and tables.

    Returns:
      A `Graph`.

    Raises:
      ValueError: no rows, unknown nodes, self-loops, a node without in-peers, nodes that cannot
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
    # `Graph` itself checks empty rows and single nodes.
    if short is not None and rows[short] and len(rows) > 1:
        raise ValueError(
            f"`peers_per_step` must be at most {len(rows[short])}, the length of the phone book "
            f"row of node {short} in {name}({len(rows)}), got {peers_per_step}."
        )
    return Graph(len(rows), peers_per_step, rows, name=name)


def unique(row: Sequence[int]) -> tuple[int, ...]:
    """Return `row` with only the first of equal entries."""
    return tuple(dict.fromkeys(row))


# Messages of an exchange as partial permutations.


def colour_edges(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Split `edges` into as few partial permutations as possible.

    In a partial permutation a node sends at most once and receives at most once, as a collective
    permute requires. Senders and receivers are the two sides of a bipartite multigraph, so its
    largest degree is the number of permutations needed (König, 1916).

    Args:
      edges: (source, destination) pairs, repetitions allowed.

    Returns:
      One list per permutation, as many as the largest number of edges at one source or destination.
      Edges that are already ordered as whole permutations keep these permutations.
    """
    sending: list[dict[int, int]] = []  # per colour: source -> destination
    receiving: list[dict[int, int]] = []  # per colour: destination -> source
    for source, destination in edges:
        free = _first_free(source, sending)
        taken = _first_free(destination, receiving)
        while max(free, taken) >= len(sending):
            sending.append({})
            receiving.append({})
        if free != taken:
            _swap_path(destination, free, taken, sending, receiving)
        sending[free][source] = destination
        receiving[free][destination] = source
    return [sorted(colour.items()) for colour in sending]


def _first_free(node: int, used: list[dict[int, int]]) -> int:
    return next((c for c, colour in enumerate(used) if node not in colour), len(used))


def _swap_path(
    destination: int,
    free: int,
    taken: int,
    sending: list[dict[int, int]],
    receiving: list[dict[int, int]],
) -> None:
    """Free colour `free` at `destination`, which has no edge of colour `taken`.

    The edges of these two colours form paths and even cycles. Swapping the colours along the path
    from `destination` keeps the colouring valid, and cannot reach the source without colour `free`.
    """
    path: list[tuple[int, int, int, int]] = []  # source, destination, colour, new colour
    node = destination
    while node in receiving[free]:
        source = receiving[free][node]
        path.append((source, node, free, taken))
        if source not in sending[taken]:
            break
        node = sending[taken][source]
        path.append((source, node, taken, free))
    for source, node, colour, _ in path:
        del sending[colour][source], receiving[colour][node]
    for source, node, _, colour in path:
        sending[colour][source], receiving[colour][node] = node, source


# Checks of arguments.


def check_graph(owner: str, graph: Any) -> None:
    """Raise `ValueError` unless `graph` is a graph, a function that makes one, or None.

    Args:
      owner: public name that has the argument, for messages.
      graph: a `Graph`, a function `(num_nodes) -> Graph`, or None.

    Raises:
      ValueError: another value.
    """
    if graph is None or isinstance(graph, Graph) or accepts(graph, "num_nodes"):
        return
    raise ValueError(
        f"{owner}: `graph` must be a js.topology.Graph, a function of the number of nodes that "
        f"makes one, or None, got {graph!r}."
    )


def check_phone_book(
    name: str, num_nodes: int, rows: Sequence[Sequence[int]], bipartite: bool
) -> None:
    """Raise `ValueError` for a phone book with invalid rows or entries, or with self-loops."""
    if len(rows) != num_nodes:
        raise ValueError(
            f"{name}: the phone book must have one row per node, got {len(rows)} rows for "
            f"`num_nodes`={num_nodes}."
        )
    for node, row in enumerate(rows):
        for peer in row:
            is_int = isinstance(peer, int) and not isinstance(peer, bool)
            if not is_int or not 0 <= peer < num_nodes:
                raise ValueError(
                    f"{name}: the phone book of node {node} names {peer!r}, and nodes are ints, 0 "
                    f"to {num_nodes - 1}."
                )
            if peer == node:
                raise ValueError(
                    f"{name}({num_nodes}): node {node} would send to itself (its phone book is "
                    f"{list(row)}); the share that it keeps is the mixing's matter."
                )
            if bipartite and (peer - node) % 2 == 0:
                raise ValueError(
                    f"{name}({num_nodes}): a bipartite graph joins even with odd nodes, and node "
                    f"{node} would send to {peer}."
                )


def check_connectivity(name: str, num_nodes: int, rows: Sequence[Sequence[int]]) -> None:
    """Raise `ValueError` unless the value of every node can reach all others.

    Args:
      name: name of the graph, for messages.
      num_nodes: number of nodes.
      rows: per node, the peers that the rotation uses.
    """
    backward: list[list[int]] = [[] for _ in rows]
    for source, row in enumerate(rows):
        for peer in row:
            backward[peer].append(source)
    for table, text in (
        (rows, "what node 0 holds never reaches node {}"),
        (backward, "what node {} holds never reaches node 0"),
    ):
        if missing := set(range(num_nodes)) - reachable(table):
            raise ValueError(
                f"{name}({num_nodes}): every node must be able to reach every other over the peers "
                f"that get a turn, and {text.format(min(missing))}."
            )


def reachable(table: Sequence[Sequence[int]]) -> set[int]:
    """Return the nodes that can be reached from node 0."""
    seen, todo = {0}, [0]
    while todo:
        for peer in table[todo.pop()]:
            if peer not in seen:
                seen.add(peer)
                todo.append(peer)
    return seen


def as_size(argument: str, value: object, least: int = 1) -> int:
    """Return `value` as an int; raise `ValueError` unless it is an integer >= `least`."""
    size = _plain(value)
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"`{argument}` must be an int >= {least}, got {value!r}.")
    return size


def as_rows(argument: str, table: Any) -> tuple[tuple[Any, ...], ...]:
    """Return `table` as tuples of ints; entries of other types stay, for a later check to name."""
    try:
        return tuple(tuple(map(_plain, row)) for row in table)
    except TypeError:
        raise ValueError(
            f"`{argument}` must hold one sequence of peers per node, got {table!r}."
        ) from None


def _plain(entry: Any) -> Any:
    if isinstance(entry, bool):
        return entry
    try:
        return operator.index(entry)
    except TypeError:
        return entry


def check_even(name: str, num_nodes: int) -> None:
    """Raise `ValueError` for an odd number of nodes above 1."""
    if num_nodes % 2 and num_nodes > 1:
        raise ValueError(
            f"{name}: `num_nodes` must be even, since nodes exchange in pairs of an even and an "
            f"odd one and one would be left over; got {num_nodes}."
        )


def accepts(value: Any, *arguments: str) -> bool:
    """Return whether `value` can be called with these positional arguments, as far as is known."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True
