"""Circulant graphs: every node has peers at the same distances around a circle."""

from collections.abc import Iterable

from .._arguments import as_size, check_even
from .._phone_book import Graph, unique


def circulant(
    name: str,
    num_nodes: int,
    distances: Iterable[int],
    peers_per_step: int | None,
    *,
    dedupe: bool = False,
    is_dynamic: bool = True,
    is_bipartite: bool = False,
) -> Graph:
    """Return the graph in which node i sends to i + d for every d in `distances`, in their order.

    Args:
      name: name of the public function, for messages.
      num_nodes: number of nodes; a single one has no peers.
      distances: numbers of nodes between sender and peer, positive or negative.
      peers_per_step: number of peers per exchange; None sends to all at once, without rotation.
      dedupe: keep only the first of equal peers.
      is_dynamic: whether the graph rotates through its phone book.
      is_bipartite: whether every edge must join an even and an odd node.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    steps = list(distances) if num_nodes > 1 else []
    rows = tuple(tuple((node + d) % num_nodes for d in steps) for node in range(num_nodes))
    if dedupe:
        rows = tuple(map(unique, rows))
    if peers_per_step is None:
        peers_per_step, is_dynamic = max(1, len(rows[0])), False
    return Graph(num_nodes, peers_per_step, rows, is_dynamic, is_bipartite, name)


def _bipartite(
    name: str, num_nodes: int, distances: Iterable[int], peers_per_step: int, dedupe: bool
) -> Graph:
    """Return the graph of odd distances, forwards and backwards, between even and odd nodes."""
    check_even(name, num_nodes)
    both = both_ways(distances)
    return circulant(name, num_nodes, both, peers_per_step, dedupe=dedupe, is_bipartite=True)


def both_ways(distances: Iterable[int]) -> list[int]:
    """Return each distance forwards, then backwards."""
    return [sign * d for d in distances for sign in (1, -1)]


def powers_below(base: int, limit: int) -> list[int]:
    """Return 1, base, base**2, ..., all < `limit`."""
    # A logarithm in floating point could lose the last power.
    powers, power = [], 1
    while power < limit:
        powers.append(power)
        power *= base
    return powers


def npeer_directed_exponential(
    num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False
) -> Graph:
    """Make the default graph of `js.sgp`, with peers at distances j (p + 1)^i, j = 1 ... p.

    With p = `peers_per_step`, a node sends to the p peers of level i in exchange i. With (p + 1)^k
    nodes, all nodes hold the exact mean after k rounds of uniform mixing.

    Args:
      num_nodes: number of nodes.
      peers_per_step: p, number of peers that a node sends to per exchange.
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
        "npeer_directed_exponential", num_nodes, distances, peers_per_step, dedupe=dedupe
    )


def directed_exponential(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Make the graph with peers at distances +1, -1, +2, -2, +4, -4, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers: both directions meet on the circle.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicDirectedExponentialGraph`.
    """
    distances = both_ways(powers_below(2, as_size("num_nodes", num_nodes)))
    return circulant("directed_exponential", num_nodes, distances, peers_per_step, dedupe=dedupe)


def bipartite_exponential(
    num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False
) -> Graph:
    """Join even and odd nodes at distances 1, 1 + 2, 1 + 4, 1 + 8, ..., forwards and backwards.

    Args:
      num_nodes: number of nodes, even (or 1).
      peers_per_step: number of peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers.

    Returns:
      A `Graph`.

    Raises:
      ValueError: an odd number of nodes, sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicBipartiteExponentialGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    distances = [1] + [1 + power for power in powers_below(2, num_nodes)[1:]]
    return _bipartite("bipartite_exponential", num_nodes, distances, peers_per_step, dedupe)


def symmetric_exponential(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Make the graph with peers at distances 1, 2, 4, ... up to half the circle, both directions.

    Args:
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange, in turn. None: all peers in
        every exchange, which makes uniform mixing symmetric.

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


def ring(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Make the ring: a node sends to the next one, with 2 peers per step also to the one before.

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
    """Make the graph with peers at distances +1, -1, +3, -3, +5, -5, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers: both directions meet on the circle.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicDirectedLinearGraph`.
    """
    distances = both_ways(range(1, as_size("num_nodes", num_nodes), 2))
    return circulant("directed_linear", num_nodes, distances, peers_per_step, dedupe=dedupe)


def bipartite_linear(num_nodes: int, *, peers_per_step: int = 1, dedupe: bool = False) -> Graph:
    """Join even and odd nodes at distances +1, -1, +3, -3, ... below `num_nodes`.

    Args:
      num_nodes: number of nodes, even (or 1).
      peers_per_step: number of peers that a node sends to per exchange.
      dedupe: keep only the first of equal peers.

    Returns:
      A `Graph`.

    Raises:
      ValueError: an odd number of nodes, sizes below 1, more peers than the phone book has.

    Source: FairScale 0.4.13 `DynamicBipartiteLinearGraph`.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    distances = range(1, num_nodes, 2)
    return _bipartite("bipartite_linear", num_nodes, distances, peers_per_step, dedupe)


def complete(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Make the complete graph, in which every node sends to every other (the mean in one exchange).

    Args:
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange, in turn. None: all peers in
        every exchange.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than there are other nodes.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    return circulant("complete", num_nodes, range(1, num_nodes), peers_per_step)
