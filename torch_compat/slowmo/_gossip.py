"""Stochastic gradient push: the forms of graph that users may pass, and the plan they give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxslowmo.topology import (
    ExchangeRound,
    Graph,
    exchange_rounds,
    make_graph,
    npeer_directed_exponential,
    weights_move,
)


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
    return GossipPlan(rounds, weights_move(chosen, rounds, push_sum=push_sum))


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
    is_dynamic = getattr(manager, "is_dynamic_graph", lambda: True)()
    peers, name = getattr(manager, "peers_per_itr", 1), type(manager).__name__
    return Graph(len(rows), peers, rows, is_dynamic, name=name)


def _as_mixing(mixing: Any) -> Any:
    """Return None for FairScale's uniform mixing, any other value as it is."""
    is_uniform: Callable[[], bool] | None = getattr(mixing, "is_uniform", None)
    return None if is_uniform is not None and is_uniform() else mixing
