"""What an exchange amounts to for the program that runs it: permutations and weights."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ._colouring import Edge
from ._graph import Graph
from ._mixing import TOLERANCE, Mixing, rotation_matrices


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class ExchangeRound:
    """One exchange.

    Attributes:
      permutations: partial permutations, tuples of (source, destination).
      received: (len(permutations), num_nodes) float64: by which share of the sender's value a node
        multiplies what arrives by each permutation; 0 where nothing does.
      kept: (num_nodes,) float64: share of its own value that each node keeps.
      is_doubly_stochastic: whether what a node keeps and receives sums to 1 as well: then push-sum
        weights that are 1 stay 1.
    """

    permutations: tuple[tuple[Edge, ...], ...]
    received: np.ndarray
    kept: np.ndarray
    is_doubly_stochastic: bool


def exchange_rounds(graph: Graph, mixing: Mixing | None = None) -> tuple[ExchangeRound, ...]:
    """All exchanges of a rotation, checked.

    Args:
      graph: who sends to whom.
      mixing: callable `(graph, step) -> P[destination, source]`; None is `uniform_mixing()`. It
        must repeat with the rotation, and is asked for the steps of two; a table may end with the
        first (`LookupError`).

    Returns:
      `graph.num_rounds` rounds. The weight of an edge that occurs more than once is split evenly.

    Raises:
      ValueError: a matrix that is no mixing for the graph, as in `mixing_matrix`; a mixing that
        does not repeat with the rotation.
    """
    matrices = rotation_matrices(graph, mixing)
    return tuple(_round(graph, matrix, step) for step, matrix in enumerate(matrices))


def _round(graph: Graph, matrix: np.ndarray, step: int) -> ExchangeRound:
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
