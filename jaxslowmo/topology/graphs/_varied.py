"""Random matchings, and graphs of two levels."""

import numpy as np

from .._arguments import as_divisor, as_size, check_even
from .._graph import Graph, from_phone_book
from ._circulant import powers_below
from ._static import largest_divisor_to_root

_DRAWS = 1000


def random_matching(
    num_nodes: int, *, seed: int = 0, num_rounds: int | None = None, peers_per_step: int = 1
) -> Graph:
    """In every exchange all nodes swap with a partner, drawn at random and known to all.

    Args:
      num_nodes: number of nodes, even (or 1).
      seed: of the drawing; the same graph everywhere.
      num_rounds: matchings drawn before the rotation repeats, at least 2 for more than 2 nodes;
        None: 2 per level of a binary tree over the nodes.
      peers_per_step: matchings used per exchange.

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
        if _connects(rounds, num_nodes):
            return from_phone_book(rows, peers_per_step, name="random_matching")
    raise ValueError(
        f"random_matching: {num_rounds} matchings did not connect {num_nodes} nodes in {_DRAWS} "
        "draws; give a larger `num_rounds`."
    )


def _matching(num_nodes: int, rng: np.random.Generator) -> list[int]:
    """Partner of every node."""
    order = rng.permutation(num_nodes).tolist()
    partner = [0] * num_nodes
    for a, b in zip(order[::2], order[1::2], strict=True):
        partner[a], partner[b] = b, a
    return partner


def _connects(rounds: list[list[int]], num_nodes: int) -> bool:
    seen, todo = {0}, [0]
    while todo:
        node = todo.pop()
        fresh = {matching[node] for matching in rounds} - seen
        seen |= fresh
        todo += fresh
    return len(seen) == num_nodes


def inner_outer(num_nodes: int, *, group_size: int | None = None, peers_per_step: int = 1) -> Graph:
    """Two levels: an exponential sweep inside every group, one exchange between groups, and again.

    Nodes are numbered group by group. Before each exchange with a group at distance 1, 2, 4, ...
    the members of a group mix among themselves at distances 1, 2, 4, ..., so few of the exchanges
    cross the network between groups.

    Args:
      num_nodes: number of nodes.
      group_size: nodes per group, a divisor of `num_nodes`; None: the largest one whose square is
        at most `num_nodes`.
      peers_per_step: entries of the phone book per exchange.

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
