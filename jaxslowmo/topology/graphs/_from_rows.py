"""Graphs whose phone books are built row by row: fixed neighbours, matchings, two levels."""

from collections.abc import Iterable

import numpy as np

from .._arguments import as_divisor, as_size, check_even
from .._phone_book import Graph, from_phone_book, reachable, unique
from ._circulant import powers_below


def star(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Make the star, in which node 0 sends to all others, and they send to it.

    It is irregular, so push-sum weights differ from 1. The centre receives `num_nodes` - 1 messages
    per exchange.

    Args:
      num_nodes: number of nodes.
      peers_per_step: None: the centre sends to all others in every exchange; 1: to one of them, in
        turn.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more than 1 peer per step (the others have only the centre).
    """
    num_nodes = as_size("num_nodes", num_nodes)
    centre = range(1, num_nodes)
    return from_phone_book([centre, *([0] for _ in centre)], peers_per_step, name="star")


def grid_2d(num_nodes: int, *, rows: int | None = None, peers_per_step: int | None = None) -> Graph:
    """Make the grid: nodes send to neighbours to the right, left, below and above on a rectangle.

    Nodes at the border have fewer neighbours, so push-sum weights differ from 1.

    Args:
      num_nodes: number of nodes, numbered row by row.
      rows: number of rows, a divisor of `num_nodes`; None: the rectangle nearest to a square.
      peers_per_step: number of neighbours that a node sends to per exchange, in turn. None: all in
        every exchange.

    Returns:
      A `Graph`.

    Raises:
      ValueError: `rows` that does not divide `num_nodes`, more peers than a corner has.
    """
    rows, columns = _rectangle(num_nodes, rows)

    def peers(node: int) -> Iterable[int]:
        row, column = divmod(node, columns)
        if column + 1 < columns:
            yield node + 1
        if column > 0:
            yield node - 1
        if row + 1 < rows:
            yield node + columns
        if row > 0:
            yield node - columns

    return from_phone_book(
        [tuple(peers(node)) for node in range(num_nodes)], peers_per_step, name="grid_2d"
    )


def hypercube(num_nodes: int, *, peers_per_step: int = 1) -> Graph:
    """Make the hypercube: nodes whose numbers differ in one bit swap, the lowest bit first.

    All nodes hold the exact mean after log2(`num_nodes`) exchanges of uniform mixing. On a torus of
    TPU chips partners differ in one dimension only, and compilers make each exchange asynchronous.

    Args:
      num_nodes: number of nodes, a power of 2.
      peers_per_step: number of peers that a node sends to per exchange.

    Returns:
      A `Graph`.

    Raises:
      ValueError: a number of nodes that is no power of 2, more peers than there are bits.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    if num_nodes & (num_nodes - 1):
        raise ValueError(
            f"hypercube: `num_nodes` must be a power of 2, so that every node has a partner for "
            f"every bit; got {num_nodes}."
        )
    rows = [[node ^ bit for bit in powers_below(2, num_nodes)] for node in range(num_nodes)]
    return from_phone_book(rows, peers_per_step, name="hypercube")


def torus_2d(
    num_nodes: int, *, rows: int | None = None, peers_per_step: int | None = None
) -> Graph:
    """Make the grid whose opposite borders are joined, so that every node has 4 neighbours.

    With 1 or 2 rows or columns nodes have fewer.

    Args:
      num_nodes: number of nodes, numbered row by row.
      rows: number of rows, a divisor of `num_nodes`; None: the rectangle nearest to a square.
      peers_per_step: number of neighbours that a node sends to per exchange, in turn. None: all in
        every exchange.

    Returns:
      A `Graph`.

    Raises:
      ValueError: `rows` that does not divide `num_nodes`, more peers than there are neighbours.
    """
    rows, columns = _rectangle(num_nodes, rows)

    def peers(node: int) -> tuple[int, ...]:
        row, column = divmod(node, columns)
        steps = ((0, 1), (0, -1), (1, 0), (-1, 0))
        neighbours = [(row + r) % rows * columns + (column + c) % columns for r, c in steps]
        return unique([peer for peer in neighbours if peer != node])

    return from_phone_book([peers(n) for n in range(num_nodes)], peers_per_step, name="torus_2d")


def _rectangle(num_nodes: int, rows: int | None) -> tuple[int, int]:
    num_nodes = as_size("num_nodes", num_nodes)
    if rows is None:
        rows = largest_divisor_to_root(num_nodes)
    rows = as_divisor("rows", rows, num_nodes)
    return rows, num_nodes // rows


def largest_divisor_to_root(number: int) -> int:
    """Return the largest divisor whose square is at most `number`."""
    return max(d for d in range(1, int(number**0.5) + 2) if number % d == 0 and d * d <= number)


_DRAWS = 1000


def random_matching(
    num_nodes: int, *, seed: int = 0, num_rounds: int | None = None, peers_per_step: int = 1
) -> Graph:
    """Make a graph of random matchings: in every exchange all nodes swap with a random partner.

    Args:
      num_nodes: number of nodes, even (or 1).
      seed: seed of the random numbers; the same seed gives the same graph everywhere.
      num_rounds: number of matchings until the rotation repeats, at least 2 for more than 2 nodes;
        None: 2 per level of a binary tree over the nodes.
      peers_per_step: number of matchings per exchange.

    Returns:
      A `Graph`.

    Raises:
      ValueError: an odd number of nodes, sizes below 1, too few rounds to connect the nodes.

    Source: Boyd et al., "Randomized Gossip Algorithms", IEEE Trans. Inf. Theory 52(6), 2006.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    peers_per_step = as_size("peers_per_step", peers_per_step)
    seed = as_size("seed", seed, least=0)
    check_even("random_matching", num_nodes)
    if num_rounds is None:
        num_rounds = max(2 * (num_nodes - 1).bit_length(), peers_per_step)
    num_rounds = as_size("num_rounds", num_rounds)
    if num_nodes == 1:
        return from_phone_book([[]], peers_per_step, name="random_matching")
    if num_rounds < 2 < num_nodes:
        raise ValueError(
            f"random_matching: `num_rounds` must be at least 2 to connect {num_nodes} nodes, got "
            f"{num_rounds}."
        )
    rng = np.random.default_rng(seed)
    for _ in range(_DRAWS):
        rounds = [_matching(num_nodes, rng) for _ in range(num_rounds)]
        rows = [[matching[node] for matching in rounds] for node in range(num_nodes)]
        if len(reachable(rows)) == num_nodes:
            return from_phone_book(rows, peers_per_step, name="random_matching")
    raise ValueError(
        f"random_matching: {num_rounds} matchings did not connect {num_nodes} nodes in {_DRAWS} "
        "draws; give a larger `num_rounds`."
    )


def _matching(num_nodes: int, rng: np.random.Generator) -> list[int]:
    """Return the partner of every node in one random matching."""
    order = rng.permutation(num_nodes).tolist()
    partner = [0] * num_nodes
    for a, b in zip(order[::2], order[1::2], strict=True):
        partner[a], partner[b] = b, a
    return partner


def inner_outer(num_nodes: int, *, group_size: int | None = None, peers_per_step: int = 1) -> Graph:
    """Make a graph of two levels, in which few exchanges cross the network between groups.

    Nodes are numbered group by group. The members of a group first exchange with each other at
    distances 1, 2, 4, ..., then once with the group at distance 1. The same follows for the groups
    at distances 2, 4, ...

    Args:
      num_nodes: number of nodes.
      group_size: number of nodes per group, a divisor of `num_nodes`; None: the largest divisor
        whose square is at most `num_nodes`.
      peers_per_step: number of entries of the phone book that an exchange uses.

    Returns:
      A `Graph`.

    Raises:
      ValueError: `group_size` that does not divide `num_nodes`, more peers than the phone book
        has.

    Source: Ying et al., "BlueFog: Make Decentralized Algorithms Practical", 2021 (inner-outer
      exponential graphs).
    """
    num_nodes = as_size("num_nodes", num_nodes)
    if group_size is None:
        group_size = largest_divisor_to_root(num_nodes)
    group_size = as_divisor("group_size", group_size, num_nodes)
    num_groups = num_nodes // group_size

    def peers(node: int) -> list[int]:
        group, place = divmod(node, group_size)
        sweep = [group * group_size + (place + d) % group_size for d in powers_below(2, group_size)]
        outer = [(group + d) % num_groups * group_size + place for d in powers_below(2, num_groups)]
        return [peer for other in outer for peer in (*sweep, other)] if outer else sweep

    return from_phone_book(
        [peers(node) for node in range(num_nodes)], peers_per_step, name="inner_outer"
    )
