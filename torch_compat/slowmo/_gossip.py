"""Stochastic gradient push: the forms of graph that users may pass, and the plan they give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxslowmo.topology import (
    ExchangeRound,
    Graph,
    Mixing,
    exchange_rounds,
    make_graph,
    npeer_directed_exponential,
)

# The smallest normal float32 is near 1e-38.
_LEAST_WEIGHT = 1e-30
_ROTATIONS = 20  # rotations to simulate; weights settle, or vanish, much earlier


@dataclass(frozen=True)
class GossipPlan:
    """The exchanges that follow from a graph and a mixing.

    Attributes:
      rounds: the exchanges of a rotation; () for a single node.
      weight_moves: whether push-sum weights can differ from 1, so that they must be sent.
    """

    rounds: tuple[ExchangeRound, ...]
    weight_moves: bool


def plan_gossip(
    graph: Any, mixing: Any, num_nodes: int, nprocs_per_node: int, *, push_sum: bool
) -> GossipPlan:
    """Check graph and mixing for a whole rotation.

    Args:
      graph: None, a `jaxslowmo.topology.Graph`, its name, a function from the number of nodes to a
        graph, or an object with FairScale's `phone_book`.
      mixing: None, a callable `(graph, step) -> P[destination, source]`, or an object whose
        `is_uniform()` is true.
      num_nodes: number of nodes.
      nprocs_per_node: processes in each node; FairScale's phone books count processes.
      push_sum: whether weights may differ from 1.

    Raises:
      ValueError: a graph or mixing of another form, a graph of another size, one that
        `jaxslowmo.topology` refuses, push_sum=False with a mixing that is not doubly stochastic,
        weights that would vanish.
    """
    if num_nodes == 1:
        return GossipPlan((), False)
    chosen = _as_graph(graph, num_nodes, nprocs_per_node)
    if chosen.num_nodes != num_nodes:
        raise ValueError(
            f"`graph` must have as many nodes as there are, {num_nodes}, got "
            f"{chosen.name}({chosen.num_nodes})."
        )
    rounds = exchange_rounds(chosen, _as_mixing(mixing))
    uneven = next((i for i, r in enumerate(rounds) if not r.is_doubly_stochastic), None)
    if uneven is None:
        return GossipPlan(rounds, False)
    if not push_sum:
        raise ValueError(
            "`push_sum`=False needs a doubly stochastic mixing, where what a node keeps and "
            f"receives also sums to 1; at step {uneven} of {chosen.name}({num_nodes}) it does not. "
            "Leave `push_sum` True, which weighs that out."
        )
    smallest = _smallest_weight(rounds)
    if smallest < _LEAST_WEIGHT:
        raise ValueError(
            f"push-sum weights must stay above {_LEAST_WEIGHT:g}; on {chosen.name}({num_nodes}) "
            f"with this `mixing` they fall to {smallest:.1g}. Let nodes that send much receive "
            "more often, or keep more."
        )
    return GossipPlan(rounds, True)


def _as_graph(graph: Any, num_nodes: int, nprocs_per_node: int) -> Graph:
    if graph is None:
        return npeer_directed_exponential(num_nodes)
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str):
        return make_graph(graph, num_nodes)
    if hasattr(graph, "phone_book"):
        return _from_manager(graph, nprocs_per_node)
    constructed = graph(num_nodes) if callable(graph) else None
    if not isinstance(constructed, Graph):
        raise ValueError(
            "`graph` must be None, a jaxslowmo.topology.Graph or its name or constructor, or an "
            f"object with FairScale's `phone_book`, got {graph!r}."
        )
    return constructed


def _from_manager(manager: Any, nprocs_per_node: int) -> Graph:
    """Convert a FairScale GraphManager: rows of edges whose `dest` is the rank of a master."""
    try:
        rows = tuple(
            tuple(int(edge.dest) // nprocs_per_node for edge in row) for row in manager.phone_book
        )
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            "`graph.phone_book` must hold one row of edges with `dest` per node, got "
            f"{manager.phone_book!r}."
        ) from None
    peers = _get(manager, "peers_per_itr", 1)
    dynamic, bipartite = _get(manager, "is_dynamic_graph", True), _get(manager, "is_bipartite", 0)
    name = type(manager).__name__
    return Graph(len(rows), int(peers), rows, bool(dynamic), bool(bipartite), name)


def _get(manager: Any, name: str, default: Any) -> Any:
    answer = getattr(manager, name, default)
    return answer() if callable(answer) else answer


def _as_mixing(mixing: Any) -> Mixing | None:
    if mixing is None or callable(mixing):
        return mixing
    is_uniform: Callable[[], bool] | None = getattr(mixing, "is_uniform", None)
    if is_uniform is not None and is_uniform():
        return None
    raise ValueError(
        "`mixing` must be None or a callable (graph, step) -> P[destination, source], such as "
        f"jaxslowmo.topology.self_weighted(0.5), got {mixing!r}."
    )


def _smallest_weight(rounds: tuple[ExchangeRound, ...]) -> float:
    """Return the smallest push-sum weight of any node in the first rotations."""
    size = rounds[0].kept.size
    matrices = []
    for exchange in rounds:
        matrix = np.diag(exchange.kept)
        for permutation, shares in zip(exchange.permutations, exchange.received, strict=True):
            for source, destination in permutation:
                matrix[destination, source] += shares[destination]
        matrices.append(matrix)
    weight, smallest = np.ones(size), 1.0
    for _ in range(_ROTATIONS):
        for matrix in matrices:
            weight = matrix @ weight
            smallest = min(smallest, float(weight.min()))
    return smallest
