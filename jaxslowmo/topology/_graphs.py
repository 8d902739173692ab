"""The graphs of the library, by structure and by name."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ._phone_book import Graph, as_size, check_even, from_phone_book, reachable, unique

# Circulant graphs: every node has peers at the same distances around a circle.


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
    if not isinstance(dedupe, bool):
        raise ValueError(f"{name}: `dedupe` must be True or False, got {dedupe!r}.")
    if dedupe:
        rows = tuple(map(unique, rows))
    if peers_per_step is None:
        peers_per_step, is_dynamic = max(1, len(rows[0])), False
    return Graph(num_nodes, peers_per_step, rows, is_dynamic, is_bipartite, name)


def _bipartite_circulant(
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
    if any(d % num_nodes == 0 for d in distances):
        raise ValueError(
            f"npeer_directed_exponential: with `peers_per_step`={peers_per_step} nodes would send "
            f"to themselves, since a multiple of `num_nodes`={num_nodes} is a distance."
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
    return _bipartite_circulant(
        "bipartite_exponential", num_nodes, distances, peers_per_step, dedupe
    )


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
    return _bipartite_circulant("bipartite_linear", num_nodes, distances, peers_per_step, dedupe)


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


# Graphs whose phone books are built row by row: fixed neighbours, matchings, two levels.


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
    rows = _divisor("rows", rows, as_size("num_nodes", num_nodes))
    return rows, num_nodes // rows


def _divisor(argument: str, value: int | None, num_nodes: int) -> int:
    """Return a divisor of the number of nodes, for None the largest one up to its square root."""
    if value is None:
        return max(d for d in range(1, math.isqrt(num_nodes) + 1) if num_nodes % d == 0)
    divisor = as_size(argument, value)
    if num_nodes % divisor:
        raise ValueError(f"`{argument}` must divide `num_nodes`={num_nodes}, got {divisor}.")
    return divisor


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
    group_size = _divisor("group_size", group_size, num_nodes)
    num_groups = num_nodes // group_size

    def peers(node: int) -> list[int]:
        group, place = divmod(node, group_size)
        sweep = [group * group_size + (place + d) % group_size for d in powers_below(2, group_size)]
        outer = [(group + d) % num_groups * group_size + place for d in powers_below(2, num_groups)]
        return [peer for other in outer for peer in (*sweep, other)] if outer else sweep

    return from_phone_book(
        [peers(node) for node in range(num_nodes)], peers_per_step, name="inner_outer"
    )


GRAPHS: Mapping[str, Callable[..., Graph]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            npeer_directed_exponential,
            directed_exponential,
            bipartite_exponential,
            symmetric_exponential,
            hypercube,
            inner_outer,
            random_matching,
            directed_linear,
            bipartite_linear,
            ring,
            torus_2d,
            grid_2d,
            star,
            complete,
        )
    }
)
"""The constructors of graphs by name, for `make_graph`."""


def make_graph(
    name: str, num_nodes: int, *, peers_per_step: int | None = None, **options: Any
) -> Graph:
    """Make a graph by the name of its constructor.

    Args:
      name: a key of `GRAPHS`, such as "ring".
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange; None: the constructor's
        default.
      **options: more arguments of the constructor, such as `dedupe`; None means its default.

    Returns:
      `GRAPHS[name](num_nodes, ...)`.

    Raises:
      ValueError: an unknown name, an option that the constructor lacks, or an invalid value.

    Example:
      >>> make_graph("ring", 8, peers_per_step=2).phone_book[0]
      (1, 7)
    """
    if name not in GRAPHS:
        raise ValueError(f"unknown graph {name!r}; the graphs are {', '.join(GRAPHS)}.")
    options = {"peers_per_step": peers_per_step, **options}
    options = {option: value for option, value in options.items() if value is not None}
    allowed = list(inspect.signature(GRAPHS[name]).parameters)[1:]
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise ValueError(
            f"{name} has no option {_quote_names(unknown)}; it has {_quote_names(allowed)}."
        )
    return GRAPHS[name](num_nodes, **options)


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
