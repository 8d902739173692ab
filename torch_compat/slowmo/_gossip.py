"""Stochastic gradient push: the forms of graph that users may pass, and one exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jaxslowmo.topology import (
    ExchangeRound,
    Graph,
    Mixing,
    exchange_rounds,
    make_graph,
    npeer_directed_exponential,
)

from ._collectives import Collectives
from ._graphs import device_data

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


class Gossip:
    """The exchanges of a plan, for one process.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
      (arXiv:1811.10792), algorithm 1.
    """

    def __init__(self, plan: GossipPlan, collectives: Collectives) -> None:
        self.plan = plan
        self.collectives = collectives
        self._shares: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def edges(self, number: int) -> list[tuple[int, int]]:
        """Return the pairs of nodes, source and target, of exchange `number`."""
        permutations = self.plan.rounds[number % len(self.plan.rounds)].permutations
        return [edge for permutation in permutations for edge in permutation]

    def exchange(
        self, number: int, numerators: Sequence[torch.Tensor], weight: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Send to the peers of exchange `number`, and mix in the values that arrive.

        x <- P x and w <- P w, the rows of this process' node; all processes of a node then hold
        the result of its master. Call it inside `Collectives.graph`.

        Args:
          number: number of the exchange, 0, 1, ...; the plan repeats after its last round.
          numerators: w * parameters, packed in one vector per floating dtype.
          weight: push-sum weight w, (1,) float32.

        Returns:
          The new numerators, and the new weight: `weight` itself if weights stay 1.

        Communication: per dtype one collective-permute between masters for every permutation of the
          round, of the bytes of `numerators`; 4 bytes of w if weights can differ from 1; then
          `Collectives.total_in_node` of the same.
        """
        index = number % len(self.plan.rounds)
        new = [self._of_master(self._mixed(index, flat)) for flat in numerators]
        if self.plan.weight_moves:
            weight = self._of_master(self._mixed(index, weight))
        return new, weight

    def _of_master(self, value: torch.Tensor) -> torch.Tensor:
        return self.collectives.total_in_node(self.collectives.only_masters([value]))[0]

    def _mixed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return this node's row of P times `value` of all nodes, computed in at least float32."""
        wide = torch.promote_types(value.dtype, torch.float32)
        kept, *received = self._own_shares(index, wide, value.device).split(1)
        mixed = kept * value.to(wide)
        for share, edges in zip(received, self.plan.rounds[index].permutations, strict=True):
            mixed = mixed + share * self.collectives.permute(value, edges).to(wide)
        return mixed.to(value.dtype)

    def _own_shares(self, index: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the share that this node keeps, then its share of what each permutation brings."""
        key = index, dtype, device
        if key not in self._shares:
            node, round_ = self.collectives.places.node, self.plan.rounds[index]
            shares = [round_.kept[node], *round_.received[:, node]]
            self._shares[key] = device_data(shares, dtype, device)
        return self._shares[key]


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
