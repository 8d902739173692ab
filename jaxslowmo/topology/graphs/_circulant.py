"""Graphs that look the same from every node: peers at given distances around a circle."""

from collections.abc import Iterable

from .._arguments import as_size
from .._graph import Graph, unique


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
    """Node i sends to i + d for every d in `distances`, in their order.

    Args:
      name: of the public function, for messages.
      num_nodes: number of nodes; a single one has no peers.
      distances: in nodes, positive or negative.
      peers_per_step: as in `Graph`; None is all at once, without rotation.
      dedupe: keep only the first of equal peers.
      is_dynamic: whether it rotates.
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


def both_ways(distances: Iterable[int]) -> list[int]:
    """Each distance forwards, then backwards."""
    return [sign * d for d in distances for sign in (1, -1)]


def powers_below(base: int, limit: int) -> list[int]:
    """1, base, base**2, ..., all < `limit`; integers throughout, so that no level is lost."""
    found, power = [], 1
    while power < limit:
        found.append(power)
        power *= base
    return found
