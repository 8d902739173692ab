"""What a graph and a mixing ask of the program: its rounds, and whether weights move or travel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._integers import as_int
from ...topology import ExchangeRound, Graph, Mixing, exchange_rounds


@dataclass(frozen=True)
class GossipPlan:
    """What a graph and a mixing amount to.

    Attributes:
      rounds: the exchanges of a rotation; () for a single node.
      weight_moves: whether push-sum weights can differ from 1.
      weight_differs: whether they can differ between nodes, so that they must be sent.
    """

    rounds: tuple[ExchangeRound, ...]
    weight_moves: bool
    weight_differs: bool


def checked_overlap(owner: str, overlap: Any) -> int:
    """`overlap` as an int.

    Raises:
      ValueError: no integer, or a negative one.
    """
    count = as_int(overlap, 0)
    if count is None:
        raise ValueError(
            f"{owner}: `overlap` counts exchanges and must be an int >= 0, got {overlap!r}."
        )
    return count


def gossip_plan(
    owner: str, graph: Graph, mixing: Mixing | None, *, push_sum: bool, overlap: int
) -> GossipPlan:
    """Check graph and mixing for a whole rotation and say what they need.

    Raises:
      ValueError: a mixing that is none; without push-sum, one that is not doubly stochastic; with
        late arrivals, a node that keeps nothing meanwhile.
    """
    # One rotation tells all: graph and mixing repeat with it.
    rounds = exchange_rounds(graph, mixing)
    if graph.num_nodes == 1:
        return GossipPlan((), False, False)
    # Columns of P sum to 1. Where rows do, too, w = 1 stays 1: sum_k P[i, k] 1 = 1.
    uneven = next((i for i, r in enumerate(rounds) if not r.is_doubly_stochastic), None)
    if uneven is not None and not push_sum:
        raise ValueError(
            f"{owner}: `push_sum`=False needs a doubly stochastic mixing, where what a node keeps "
            f"and receives also sums to 1; at step {uneven} of {graph.name}({graph.num_nodes}) the "
            "rows of P do not. Leave `push_sum` True, which weighs that out."
        )
    # Parameters are x / w: a weight that vanishes in float32 would make them infinite.
    smallest = 1.0 if uneven is None else _smallest_weight(rounds)
    if smallest < _LEAST_WEIGHT:
        raise ValueError(
            f"{owner}: push-sum weights must stay above {_LEAST_WEIGHT:g}, since float32 ends near "
            f"1e-38; on {graph.name}({graph.num_nodes}) with this mixing they fall to "
            f"{smallest:.1g}. Let nodes that send much receive more often, or keep more."
        )
    # With late arrivals a node that keeps nothing would have weight 0 until they come.
    late = overlap > 1
    if late and any(np.any(r.kept == 0) for r in rounds):
        raise ValueError(
            f"{owner}: `overlap`={overlap} needs a mixing in which every node keeps a share > 0, "
            "since what it is sent arrives later; P has a zero on its diagonal."
        )
    # What is on its way is missing from w: alike on all nodes where all keep the same share.
    kept_differs = any(np.ptp(r.kept) > 0 for r in rounds)
    differs = uneven is not None or (late and kept_differs)
    return GossipPlan(rounds, late or uneven is not None, differs)


_LEAST_WEIGHT = 1e-30
_ROTATIONS = 20  # whose weights are looked at; they settle, or vanish, long before


def _smallest_weight(rounds: Sequence[ExchangeRound]) -> float:
    """Smallest push-sum weight of any node."""
    edges = [_edges(exchange) for exchange in rounds]
    weight = np.ones_like(rounds[0].kept)
    smallest = 1.0
    for _ in range(_ROTATIONS):
        for exchange, (sources, destinations, shares) in zip(rounds, edges, strict=True):
            arriving = np.bincount(destinations, shares * weight[sources], weight.size)
            weight = exchange.kept * weight + arriving
            smallest = min(smallest, float(weight.min()))
        if smallest < _LEAST_WEIGHT:
            break
    return smallest


def _edges(exchange: ExchangeRound) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, destination and share of every message of a round."""
    pairs = np.concatenate([np.array(p) for p in exchange.permutations])
    which = np.repeat(np.arange(len(exchange.permutations)), list(map(len, exchange.permutations)))
    sources, destinations = pairs.T
    return sources, destinations, exchange.received[which, destinations]
