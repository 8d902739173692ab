"""Mixing weights: the share of its value that a node keeps, and the shares it sends to peers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._phone_book import Edge, Graph, accepts

Mixing = Callable[[Graph, int], Any]
"""`(graph, step) -> P[destination, source]`, (num_nodes, num_nodes), with columns that sum to 1."""

# Users may compute weights in float32, or by trigonometric functions of the step.
TOLERANCE = 1e-6


def uniform_mixing() -> Mixing:
    """Return the mixing in which every node splits its value evenly with its peers of the step.

    Returns:
      A mixing: `(graph, step) -> P`, with P[k, i] = 1 / (number of peers of i + 1) for each peer k
      and for k = i; a peer that is listed twice gets two shares.
    """

    def mixing(graph: Graph, step: int) -> np.ndarray:
        return _split(graph, step, [1.0 / (len(peers) + 1) for peers in graph.out_peers(step)])

    return mixing


def self_weighted(keep: float | Sequence[float]) -> Mixing:
    """Return the mixing in which node i keeps `keep` (or `keep[i]`); its peers share the rest.

    Args:
      keep: share of its value that a node keeps, strictly between 0 and 1, or one share per node.

    Returns:
      A mixing: `(graph, step) -> P`.

    Raises:
      ValueError: shares outside (0, 1); in use, a number of shares that is not the number of nodes.
    """
    shares = np.atleast_1d(_numbers("`keep`", keep)).copy()
    if shares.ndim != 1 or not shares.size or not np.all((shares > 0) & (shares < 1)):
        raise ValueError(
            f"`keep` must lie strictly between 0 and 1, one share or one per node, got {keep!r}."
        )

    def mixing(graph: Graph, step: int) -> np.ndarray:
        if shares.size not in (1, graph.num_nodes):
            raise ValueError(
                f"`keep` must be one share, or one per node of {graph.name}({graph.num_nodes}), "
                f"got {shares.size}."
            )
        return _split(graph, step, np.broadcast_to(shares, graph.num_nodes))

    return mixing


def _numbers(where: str, value: Any) -> np.ndarray:
    try:
        if not np.iscomplexobj(value):  # NumPy would only warn and drop the imaginary part
            return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{where} must hold real numbers, got {value!r}.")


def _split(graph: Graph, step: int, keep: Sequence[float] | np.ndarray) -> np.ndarray:
    matrix = np.zeros((graph.num_nodes, graph.num_nodes))
    for source, peers in enumerate(graph.out_peers(step)):
        matrix[source, source] = keep[source] if peers else 1.0
        for peer in peers:
            matrix[peer, source] += (1.0 - keep[source]) / len(peers)
    return matrix


def check_mixing(mixing: Any) -> None:
    """Raise `ValueError` unless `mixing` is None or can be called with `(graph, step)`.

    Args:
      mixing: a callable `(graph, step) -> P[destination, source]`, or None.

    Raises:
      ValueError: another value.
    """
    if mixing is None or accepts(mixing, "graph", "step"):
        return
    raise ValueError(
        "`mixing` must be a callable (graph, step) -> matrix P[destination, source], as "
        f"js.topology.uniform_mixing() returns it, got {mixing!r}."
    )


def rotation_matrices(graph: Graph, mixing: Mixing | None) -> Iterator[np.ndarray]:
    """Yield the checked matrices of a rotation, one by one.

    Args:
      graph: the graph (which node sends to which).
      mixing: callable `(graph, step) -> P`; None is `uniform_mixing()`. It is called for the steps
        of two rotations, which must be equal; a table may end after the first (`LookupError`).

    Raises:
      ValueError: as in `mixing_matrix`; a mixing that does not repeat with the rotation.
    """
    count = graph.num_rounds
    for step in range(count):
        matrix = mixing_matrix(graph, mixing, step)
        # Compare step by step, since all matrices of a rotation can take gigabytes.
        if mixing is not None and graph.num_nodes > 1:
            _check_repeats(graph, mixing, step, matrix)
        yield matrix


def _check_repeats(graph: Graph, mixing: Mixing, step: int, matrix: np.ndarray) -> None:
    count = graph.num_rounds
    try:
        later = _numbers("`mixing`", mixing(graph, step + count))
    except LookupError:
        return
    where = ""
    if later.shape == matrix.shape:
        differs = np.argwhere(~(np.abs(later - matrix) <= TOLERANCE))
        if not len(differs):
            return
        row, column = differs[0]
        where = f": P[{row}, {column}] = {later[row, column]:.6g} after {matrix[row, column]:.6g}"
    raise ValueError(
        f"`mixing` must repeat with the graph's rotation of {count} rounds; on "
        f"{graph.name}({graph.num_nodes}) step {step + count} differs from step {step}{where}."
    )


def mixing_matrix(graph: Graph, mixing: Mixing | None, step: int) -> np.ndarray:
    """Return the mixing matrix P of one exchange, after checking it.

    Args:
      graph: the graph (which node sends to which).
      mixing: callable `(graph, step) -> P`; None is `uniform_mixing()`.
      step: number of the exchange, 0, 1, ...

    Returns:
      (num_nodes, num_nodes) float64, P[destination, source].

    Raises:
      ValueError: no such callable, weights that are not real numbers, another shape, a negative or
        non-finite weight, a column that does not sum to 1, a weight without an edge in the graph,
        or a node that neither keeps nor receives anything.
    """
    check_mixing(mixing)
    mixing = uniform_mixing() if mixing is None else mixing
    size = graph.num_nodes
    where = f"`mixing` at step {step} of {graph.name}({size})"
    matrix = _numbers(where, mixing(graph, step))
    if matrix.shape != (size, size):
        raise ValueError(f"{where}: P must have shape {(size, size)}, got {matrix.shape}.")
    bad = np.argwhere(~(matrix >= 0) | ~np.isfinite(matrix))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"{where}: weights must be finite and >= 0, got P[{row}, {column}] = "
            f"{matrix[row, column]}."
        )
    sums = matrix.sum(axis=0)
    wrong = np.flatnonzero(np.abs(sums - 1) > TOLERANCE)
    if wrong.size:
        raise ValueError(
            f"{where}: every column of P must sum to 1, what a node keeps and sends together; "
            f"column {wrong[0]} sums to {sums[wrong[0]]:.9g}."
        )
    edges = np.eye(size, dtype=bool)
    for source, peers in enumerate(graph.out_peers(step)):
        edges[list(peers), source] = True
    stray = np.argwhere((matrix > 0) & ~edges)
    if len(stray):
        row, column = stray[0]
        raise ValueError(
            f"{where}: P[{row}, {column}] = {matrix[row, column]:.6g}, but node {column} does not "
            f"send to node {row} in that step."
        )
    empty = np.flatnonzero(matrix.sum(axis=1) == 0)
    if empty.size:
        raise ValueError(
            f"{where}: node {empty[0]} keeps nothing and receives nothing, so its push-sum weight "
            "would become 0."
        )
    return matrix


@dataclass(frozen=True, eq=False)  # comparing arrays does not give one truth value
class ExchangeRound:
    """One exchange of a graph: who sends to whom, and how a node weighs what it receives.

    Attributes:
      permutations: partial permutations, tuples of (source, destination).
      received: (len(permutations), num_nodes) float64: factor by which a node multiplies the value
        that it receives through each permutation; 0 if it receives none.
      kept: (num_nodes,) float64: share of its own value that each node keeps.
      is_doubly_stochastic: whether the shares that a node keeps and receives sum to 1 too, so that
        push-sum weights of 1 stay 1.
    """

    permutations: tuple[tuple[Edge, ...], ...]
    received: np.ndarray
    kept: np.ndarray
    is_doubly_stochastic: bool


def exchange_rounds(graph: Graph, mixing: Mixing | None = None) -> tuple[ExchangeRound, ...]:
    """Return the exchanges of a graph until it repeats, after checking its mixing weights.

    Args:
      graph: the graph (which node sends to which).
      mixing: callable `(graph, step) -> P[destination, source]`; None is `uniform_mixing()`. It
        must repeat with the rotation, and is called for the steps of two rotations; a table may end
        after the first (`LookupError`).

    Returns:
      `graph.num_rounds` rounds. The weight of an edge that occurs more than once is split evenly.

    Raises:
      ValueError: a matrix that is no mixing for the graph, as in `mixing_matrix`; a mixing that
        does not repeat with the rotation.
    """
    matrices = rotation_matrices(graph, mixing)
    return tuple(_exchange_round(graph, matrix, step) for step, matrix in enumerate(matrices))


def _exchange_round(graph: Graph, matrix: np.ndarray, step: int) -> ExchangeRound:
    permutations = graph.permutations(step)
    times = Counter(edge for permutation in permutations for edge in permutation)
    received = np.zeros((len(permutations), graph.num_nodes))
    for i, permutation in enumerate(permutations):
        for source, destination in permutation:
            received[i, destination] = matrix[destination, source] / times[source, destination]
    return ExchangeRound(
        permutations,
        received,
        np.diagonal(matrix).copy(),
        bool(np.all(np.abs(matrix.sum(axis=1) - 1) <= TOLERANCE)),
    )


_LEAST_WEIGHT = 1e-30
_ROTATIONS = 20  # weights settle or vanish in fewer rotations than this


def weights_move(graph: Graph, rounds: Sequence[ExchangeRound], *, push_sum: bool) -> bool:
    """Return whether push-sum weights can differ from 1.

    Args:
      graph: the graph (which node sends to which).
      rounds: its exchanges, from `exchange_rounds`.
      push_sum: whether they may.

    Returns:
      False if every round is doubly stochastic, so that weights of 1 stay 1; otherwise True.

    Raises:
      ValueError: without push-sum, a mixing that is not doubly stochastic; weights that vanish.
    """
    # Columns of P sum to 1. If rows do too, w = 1 stays 1: sum_k P[i, k] 1 = 1.
    uneven = next((i for i, r in enumerate(rounds) if not r.is_doubly_stochastic), None)
    if uneven is None:
        return False
    if not push_sum:
        raise ValueError(
            "`push_sum`=False needs a doubly stochastic mixing, where rows of P also sum to 1, as "
            f"they do not at step {uneven} of {graph.name}({graph.num_nodes})."
        )
    # Parameters are x / w: a weight that vanishes in float32 would make them infinite.
    smallest = _smallest_weight(rounds)
    if smallest < _LEAST_WEIGHT:
        raise ValueError(
            f"push-sum weights on {graph.name}({graph.num_nodes}) with this `mixing` fall to "
            f"{smallest:.1g}, below {_LEAST_WEIGHT:g}: nodes that send much must keep more."
        )
    return True


def _smallest_weight(rounds: Sequence[ExchangeRound]) -> float:
    """Return the smallest push-sum weight of any node in the first rotations."""
    edges = []  # per round: source, destination and share of every message
    for exchange in rounds:
        sources, destinations = np.concatenate([np.array(p) for p in exchange.permutations]).T
        which = np.repeat(np.arange(len(exchange.permutations)), [*map(len, exchange.permutations)])
        edges.append((sources, destinations, exchange.received[which, destinations]))
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
