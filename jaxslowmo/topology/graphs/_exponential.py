"""Graphs whose peers lie at distances that grow exponentially: mixed in a logarithm of rounds."""

from .._arguments import as_size, check_even
from .._graph import Graph, from_phone_book
from ._circulant import both_ways, circulant, powers_below


def npeer_directed_exponential(
    num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False
) -> Graph:
    """Peers at distances j (p + 1)^i, j = 1 ... p: the default of `js.sgp`.

    With p = `peers_per_step`, exchange i goes to the p peers of level i. On (p + 1)^k nodes all
    hold the exact mean after k rounds of uniform mixing.

    Args:
      num_nodes: number of nodes.
      peers_per_step: p, peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers in the phone book.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, or a distance that is a multiple of `num_nodes` (2 or 6 nodes with
        2 peers): nodes would send to themselves.

    Source: FairScale 0.4.13 `NPeerDynamicDirectedExponentialGraph`; Assran et al., "Stochastic
      Gradient Push", ICML 2019, appendix A.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    peers_per_step = as_size("peers_per_step", peers_per_step)
    base = peers_per_step + 1
    distances = [j * power for power in powers_below(base, num_nodes) for j in range(1, base)]
    loop = next((d for d in distances if d % num_nodes == 0), None)
    if loop is not None:
        raise ValueError(
            f"npeer_directed_exponential: no distance j * (`peers_per_step` + 1)**i, j = 1 to "
            f"`peers_per_step`, may be a multiple of `num_nodes`={num_nodes}, where nodes would "
            f"send to themselves; `peers_per_step`={peers_per_step} gives {loop}."
        )
    return circulant(
        "npeer_directed_exponential",
        num_nodes,
        distances,
        peers_per_step,
        dedupe=dedupe,
    )


def directed_exponential(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Peers at distances +1, -1, +2, -2, +4, -4, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes.
      peers_per_step: peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers: forwards and backwards meet on a circle.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicDirectedExponentialGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    return circulant(
        "directed_exponential",
        num_nodes,
        both_ways(powers_below(2, num_nodes)),
        peers_per_step,
        dedupe=dedupe,
    )


def bipartite_exponential(
    num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False
) -> Graph:
    """Even and odd nodes at distances 1, 1 + 2, 1 + 4, 1 + 8, ..., forwards and backwards.

    Args:
      num_nodes: number of nodes, even (or 1).
      peers_per_step: peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers.

    Returns:
      A `Graph`.

    Raises:
      ValueError: an odd number of nodes, sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicBipartiteExponentialGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    check_even("bipartite_exponential", num_nodes)
    distances = [1] + [1 + power for power in powers_below(2, num_nodes)[1:]]
    return circulant(
        "bipartite_exponential",
        num_nodes,
        both_ways(distances),
        peers_per_step,
        dedupe=dedupe,
        is_bipartite=True,
    )


def symmetric_exponential(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Peers at distances 1, 2, 4, ... up to half the circle, in both directions, each once.

    Args:
      num_nodes: number of nodes.
      peers_per_step: peers that a node sends to per exchange, in turn; None: all, every time. Then
        uniform mixing is symmetric.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
      NeurIPS 2021.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    distances = powers_below(2, num_nodes // 2 + 1)
    return circulant(
        "symmetric_exponential", num_nodes, both_ways(distances), peers_per_step, dedupe=True
    )


def hypercube(num_nodes: int, *, peers_per_step: int = 1) -> Graph:
    """Partners whose numbers differ in one bit swap: the lowest bit first, then the next.

    All hold the exact mean after log2(`num_nodes`) exchanges of uniform mixing. On a torus of TPU
    chips the partners lie along one dimension, and compilers make each exchange asynchronous.

    Args:
      num_nodes: number of nodes, a power of 2.
      peers_per_step: peers that a node sends to per exchange.

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
