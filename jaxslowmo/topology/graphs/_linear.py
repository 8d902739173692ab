"""Rings, and graphs whose peers lie at all odd distances."""

from .._arguments import as_size, check_even
from .._graph import Graph
from ._circulant import both_ways, circulant


def ring(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """The next node on a circle, with 2 peers per step also the one before; never rotates.

    Args:
      num_nodes: number of nodes.
      peers_per_step: 1 or 2.
      dedupe: keep only the first of equal peers (2 nodes have one peer twice).

    Returns:
      A static `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `RingGraph`.
    """
    return circulant(
        "ring", num_nodes, both_ways([1]), peers_per_step, dedupe=dedupe, is_dynamic=False
    )


def directed_linear(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Peers at distances +1, -1, +3, -3, +5, -5, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes.
      peers_per_step: peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers: forwards and backwards meet on a circle.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicDirectedLinearGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    distances = both_ways(range(1, num_nodes, 2))
    return circulant("directed_linear", num_nodes, distances, peers_per_step, dedupe=dedupe)


def bipartite_linear(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Even and odd nodes at distances +1, -1, +3, -3, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes, even (or 1).
      peers_per_step: peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers.

    Returns:
      A `Graph`.

    Raises:
      ValueError: an odd number of nodes, sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicBipartiteLinearGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    check_even("bipartite_linear", num_nodes)
    distances = both_ways(range(1, num_nodes, 2))
    return circulant(
        "bipartite_linear",
        num_nodes,
        distances,
        peers_per_step,
        dedupe=dedupe,
        is_bipartite=True,
    )
