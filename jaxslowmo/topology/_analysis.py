"""Analysis of a graph with its mixing: the cost of an exchange, and how fast nodes agree."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from ._arguments import as_size
from ._convergence import Convergence
from ._mixing import TOLERANCE, Mixing, mixing_matrix, rotation_matrices
from ._phone_book import Graph

_WEIGHT_BYTES = 4  # a push-sum weight in float32


@dataclass(frozen=True, eq=False, repr=False)
class GraphAnalysis:
    """The properties of a graph with a mixing, from `analyse`; `print` it for a summary.

    A round is one exchange, and X_t is the product of the matrices of the first t rounds. With
    starting values z the nodes hold diag(1 / w_t) X_t z after t rounds, with push-sum weights
    w_t = X_t 1. The consensus error is their largest distance from the mean over all z of length 1:

        e(t) = || diag(1 / w_t) X_t - 1 1^T / n ||_2

    It is 1 at the start (0 for a single node). If P is doubly stochastic it never grows. Otherwise
    it can grow for a while, at most by the square root of the ratio between push-sum weights.

    Attributes:
      graph: the graph (which node sends to which).
      mixing: the mixing; None is uniform.
      tolerance: consensus error for `rounds_to_tolerance`.
      model_bytes: size of the parameters in a message, or None.
      doubly_stochastic: per round of a rotation, whether the rows of P sum to 1. (The columns
        always do.)
      product: (n, n) float64, product of the matrices of a rotation.
      second_eigenvalue: |lambda_2|, the second largest modulus among the eigenvalues of `product`;
        0 for a single node.
      mixes: whether all nodes approach the mean of the starting values.
      rounds_to_tolerance: the first number of rounds after which the error is at most `tolerance`;
        None: never.
      weight_range: smallest and largest push-sum weight of a rotation in the long run; None if
        the weights do not settle.
      messages: per node, number of messages that it sends in a round; a peer that is listed twice
        counts twice.
      permutes: per round of a rotation, number of collective permutes per buffer. In each of them a
        node sends at most one message and receives at most one.
    """

    graph: Graph
    mixing: Mixing | None
    tolerance: float
    model_bytes: int | None
    doubly_stochastic: tuple[bool, ...]
    product: np.ndarray
    second_eigenvalue: float
    mixes: bool
    rounds_to_tolerance: int | None
    weight_range: tuple[float, float] | None
    messages: tuple[int, ...]
    permutes: tuple[int, ...]
    _convergence: Convergence = field(repr=False)

    @property
    def weights_move(self) -> bool:
        """True if push-sum weights differ from 1, so that `push_sum=False` is not possible."""
        return not all(self.doubly_stochastic)

    @property
    def spectral_gap(self) -> float:
        """The spectral gap of a whole rotation, 1 - |lambda_2|."""
        return 1 - self.second_eigenvalue

    @property
    def spectral_gap_per_round(self) -> float:
        """The share of the error that a round removes at last: 1 - |lambda_2|^(1 / num_rounds)."""
        return 1 - self.second_eigenvalue ** (1 / self.graph.num_rounds)

    @property
    def messages_mean(self) -> float:
        """The average number of messages that a node sends in a round."""
        return sum(self.messages) / len(self.messages)

    @property
    def messages_max(self) -> int:
        """The number of messages that the busiest sender sends in a round."""
        return max(self.messages)

    @property
    def permutes_mean(self) -> float:
        """The average number of collective permutes in a round, over a rotation."""
        return sum(self.permutes) / len(self.permutes)

    @property
    def permutes_max(self) -> int:
        """The largest number of collective permutes in a round."""
        return max(self.permutes)

    @property
    def message_bytes(self) -> int | None:
        """The bytes of a message: the model, and 4 of push-sum weight if weights can differ."""
        if self.model_bytes is None:
            return None
        return self.model_bytes + (_WEIGHT_BYTES if self.weights_move else 0)

    @property
    def bytes_mean(self) -> float | None:
        """The average number of bytes that a node sends in a round."""
        return None if self.message_bytes is None else self.messages_mean * self.message_bytes

    @property
    def bytes_max(self) -> int | None:
        """The number of bytes that the busiest sender sends in a round."""
        return None if self.message_bytes is None else self.messages_max * self.message_bytes

    def matrix(self, step: int) -> np.ndarray:
        """Return P[destination, source] of exchange number `step`, (n, n) float64."""
        return mixing_matrix(self.graph, self.mixing, step % self.graph.num_rounds)

    def error(self, rounds: int) -> float:
        """Return the consensus error after `rounds` rounds; the time grows as their logarithm."""
        return self._convergence.error(as_size("rounds", rounds, least=0))

    def errors(self, rounds: int) -> np.ndarray:
        """Return the consensus errors after 0, 1, ..., `rounds` rounds, (rounds + 1,) float64."""
        return self._convergence.errors(as_size("rounds", rounds, least=0))

    def __repr__(self) -> str:
        return f"<GraphAnalysis of {self.graph.name}({self.graph.num_nodes})>"

    def __str__(self) -> str:
        facts = self.summary()
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())

    def summary(self) -> dict[str, str]:
        """Return the lines that `print` shows: names, and values in words."""
        graph = self.graph
        rounds = self.rounds_to_tolerance
        per_step = f"{graph.peers_per_step} peer{'s' * (graph.peers_per_step > 1)} per step"
        facts = {
            "graph": f"{graph.name}, {graph.num_nodes} node{'s' * (graph.num_nodes > 1)}, "
            + (per_step if graph.num_nodes > 1 else "nobody to send to"),
            "rotation": f"{graph.num_rounds} round{'s' * (graph.num_rounds > 1)}",
            "regular": "yes: every node sends and receives as much in a round"
            if graph.is_regular
            else "no: nodes send or receive different numbers of messages",
            "doubly stochastic": "no: push-sum weights move"
            if self.weights_move
            else "yes: push-sum weights stay 1, push_sum=False is possible",
            "push-sum weights in the long run": "they do not settle"
            if self.weight_range is None
            else "{:.4g} to {:.4g}".format(*self.weight_range),
            "spectral gap of a rotation": f"{self.spectral_gap:.4g}",
            "spectral gap per round": f"{self.spectral_gap_per_round:.4g}",
            f"rounds to an error of {self.tolerance:g}": "never" if rounds is None else f"{rounds}",
            "messages per node and round": _mean_max(self.messages_mean, self.messages_max),
            "collective permutes per round": _mean_max(self.permutes_mean, self.permutes_max),
        }
        if self.bytes_mean is not None and self.bytes_max is not None:
            facts["bytes per node and round"] = _mean_max(self.bytes_mean, self.bytes_max)
        return facts


def analyse(
    graph: Graph,
    mixing: Mixing | None = None,
    *,
    model_bytes: int | None = None,
    tolerance: float = 1e-3,
) -> GraphAnalysis:
    """Compute what a graph costs and how fast it mixes.

    Args:
      graph: the graph (which node sends to which).
      mixing: callable `(graph, step) -> P[destination, source]` that repeats with the graph's
        rotation; None is uniform.
      model_bytes: size of the parameters in bytes; None omits bytes from the analysis.
      tolerance: consensus error for `rounds_to_tolerance`, strictly between 0 and 1.

    Returns:
      A `GraphAnalysis`.

    Raises:
      ValueError: a `graph` of another type, a matrix that is no mixing for it, a mixing that does
        not repeat with its rotation, a tolerance outside (0, 1), a negative size.

    Example:
      >>> from jaxslowmo.topology import ring
      >>> analyse(ring(16)).rounds_to_tolerance, analyse(ring(16, peers_per_step=2)).permutes
      (357, (2,))
    """
    if not isinstance(graph, Graph):
        raise ValueError(f"`graph` must be a js.topology.Graph, got {graph!r}.")
    if not isinstance(tolerance, Real) or not 0 < tolerance < 1:
        raise ValueError(f"`tolerance` must lie strictly between 0 and 1, got {tolerance!r}.")
    if model_bytes is not None and not (isinstance(model_bytes, Real) and model_bytes >= 0):
        raise ValueError(f"`model_bytes` must be a number >= 0, got {model_bytes!r}.")
    doubly_stochastic: list[bool] = []

    def matrices() -> Iterator[np.ndarray]:
        for matrix in rotation_matrices(graph, mixing):
            doubly_stochastic.append(bool(np.all(np.abs(matrix.sum(axis=1) - 1) <= TOLERANCE)))
            yield matrix

    convergence = Convergence(matrices())
    weight_range = None
    if all(doubly_stochastic):
        weight_range = (1.0, 1.0)
    elif convergence.limit is not None:
        weight_range = (float(convergence.limit.min()), float(convergence.limit.max()))
    return GraphAnalysis(
        graph=graph,
        mixing=mixing,
        tolerance=float(tolerance),
        model_bytes=model_bytes,
        doubly_stochastic=tuple(doubly_stochastic),
        product=convergence.product,
        second_eigenvalue=convergence.second_eigenvalue,
        mixes=convergence.mixes,
        rounds_to_tolerance=convergence.rounds_within(tolerance),
        weight_range=weight_range,
        messages=tuple(map(len, graph.out_peers(0))),
        # A colouring has as many colours as the busiest node has edges, and is slow to compute.
        permutes=tuple(
            max(map(len, (*graph.out_peers(step), *graph.in_peers(step))))
            for step in range(graph.num_rounds)
        ),
        _convergence=convergence,
    )


def _mean_max(mean: float, most: float) -> str:
    if mean == most:
        return f"{most:,}"
    return f"{mean:,.{0 if mean >= 1000 else 2}f} on average, {most:,} at most"
