"""Analysis of a graph with its mixing: the cost of an exchange, and how fast nodes agree.

X_t, the product of the first t mixing matrices, tends to w 1^T / n with w the push-sum weights in
the long run. The products here use matrices from which this limit is subtracted,
A_r - w_{r+1} 1^T / n, so that errors stay exact however small they are and after any number of
rounds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from ._mixing import TOLERANCE, Mixing, mixing_matrix, rotation_matrices
from ._phone_book import Graph, as_size

_MOST_DOUBLINGS = 60
# If a factor reduces a product by more than this, only rounding errors are left: the product is 0.
_VANISHED = 1e-10
_EXACT = 1e-12
_PROBES = 8
# Whether an error equal to the tolerance is within it should not depend on its last bit.
_SLACK = 1 + 1e-9


class Convergence:
    """The disagreement of the nodes after any number of rounds.

    Args:
      matrices: mixing matrices of a rotation, each (n, n), with columns that sum to 1.

    Attributes:
      num_rounds: number of matrices.
      mixes: whether all nodes approach the mean of all starting values, for any starting values.
      product: (n, n), product of the matrices of a rotation.
      second_eigenvalue: |lambda_2| of the product, 0 for a single node.
      limit: (num_rounds, n), push-sum weights before each round in the long run; None if they do
        not settle.
    """

    def __init__(self, matrices: Iterable[np.ndarray]):
        # Make columns sum to 1 exactly: thousands of products would accumulate rounding errors.
        self._matrices, sums = [], []
        for matrix in matrices:
            exact = matrix / matrix.sum(axis=0)
            self._matrices.append(_Sparse(exact))
            sums.append(exact.sum(axis=1))
        row_sums = np.array(sums)
        self.num_rounds, self._size = row_sums.shape
        self.mixes = _is_primitive(self._matrices, self._size)
        if np.abs(row_sums - 1).max() <= _EXACT:
            self.limit = np.ones_like(row_sums)
        else:
            self.limit = self._limit_weights() if self.mixes else None
        # Without a limit nothing is subtracted.
        self._subtracted = np.zeros_like(row_sums) if self.limit is None else self.limit
        rotation, vanished = self._rotation()
        self._powers = [rotation]
        self.product = rotation + self._subtracted[0][:, None] / self._size
        self.second_eigenvalue = 0.0 if vanished else self._second_eigenvalue()
        # Columns: the deviation from the mean for each node's value, and that of the weights.
        deviation = np.eye(self._size) - 1 / self._size
        self._start = np.column_stack([deviation, 1 - self._subtracted[0]])

    def errors(self, count: int) -> np.ndarray:
        """Return the consensus errors after 0, 1, ..., `count` rounds."""
        state, errors = self._start, [_spectral_norm(self._deviation(self._start, 0))]
        for t in range(count):
            state = self._next(state, t)
            errors.append(_spectral_norm(self._deviation(state, t + 1)))
        return np.array(errors)

    def error(self, rounds: int) -> float:
        """Return the consensus error after `rounds` rounds; the time grows as their logarithm."""
        rotations, rest = divmod(rounds, self.num_rounds)
        state = self._start
        for k in range(rotations.bit_length()):
            if rotations >> k & 1:
                state = self._power(k) @ state
        for t in range(rest):
            state = self._next(state, t)
        return _spectral_norm(self._deviation(state, rounds))

    def rounds_within(self, tolerance: float) -> int | None:
        """Return the first number of rounds with an error of at most `tolerance`; None if none.

        The deviation from the mean, with squares weighted by w, never grows, and with the bounds on
        w it bounds the error from below. So it gives the number of rotations that can be skipped;
        after them every round is checked.
        """
        if not self.mixes:
            return None
        # An upper bound of the weights: their ratio to the limit is largest at the start.
        most = self._subtracted.max() / self._subtracted[0].min()
        goal = tolerance * np.sqrt(most)
        doublings = 0
        while _norm_exceeds(self._weighted_deviation(self._power(doublings) @ self._start), goal):
            doublings += 1
            if doublings > _MOST_DOUBLINGS:
                return None
        t, state = 0, self._start
        for k in reversed(range(doublings)):
            ahead = self._power(k) @ state
            if _norm_exceeds(self._weighted_deviation(ahead), goal):
                t, state = t + 2**k * self.num_rounds, ahead
        while _norm_exceeds(self._deviation(state, t), tolerance * _SLACK):
            state = self._next(state, t)
            t += 1
        return t

    def _next(self, state: np.ndarray, t: int) -> np.ndarray:
        """Return the state after one more round."""
        after = self._subtracted[(t + 1) % self.num_rounds] / self._size
        product = self._matrices[t % self.num_rounds].matmul(state)
        return product - after[:, None] * state.sum(axis=0)

    def _deviation(self, state: np.ndarray, t: int) -> np.ndarray:
        weights = self._subtracted[t % self.num_rounds] + state[:, -1]
        return state[:, :-1] / weights[:, None]

    def _weighted_deviation(self, state: np.ndarray) -> np.ndarray:
        """Return the deviation after whole rotations, times the square root of w."""
        weights = self._subtracted[0] + state[:, -1]
        return state[:, :-1] / np.sqrt(weights)[:, None]

    def _power(self, k: int) -> np.ndarray:
        """Return the product of 2^k rotations."""
        while len(self._powers) <= k:
            self._powers.append(self._powers[-1] @ self._powers[-1])
        return self._powers[k]

    def _limit_weights(self) -> np.ndarray:
        product = np.eye(self._size)
        for matrix in self._matrices:
            product = matrix.matmul(product)
        limit = [_stationary(product) * self._size]
        for matrix in self._matrices[:-1]:
            limit.append(matrix.matmul(limit[-1][:, None])[:, 0])
        return np.array(limit)

    def _rotation(self) -> tuple[np.ndarray, bool]:
        """Return the product of a rotation's factors, and whether it is 0 up to rounding."""
        total = np.eye(self._size)
        size = _frobenius_norm(total)
        for t in range(self.num_rounds):
            total = self._next(total, t)
            before, size = size, _frobenius_norm(total)
            if size <= _VANISHED * before:
                return np.zeros_like(total), True
        return total, False

    def _second_eigenvalue(self) -> float:
        if self.limit is None:
            moduli = np.sort(np.abs(np.linalg.eigvals(self.product)))
            return float(min(moduli[-2], 1.0))
        power = self._powers[0]
        for _ in range(self._size.bit_length()):
            # Rounding gives a nilpotent matrix eigenvalues far above the rounding errors.
            power = power / _frobenius_norm(power)
            power = power @ power
            if _frobenius_norm(power) <= _VANISHED:
                return 0.0
        return float(min(np.abs(np.linalg.eigvals(self._powers[0])).max(), 1.0))


class _Sparse:
    """A square matrix with few entries, for products from the left.

    Dense products would take most of the time.

    Args:
      matrix: array (n, n), entries >= 0, no row of zeros.
    """

    def __init__(self, matrix: np.ndarray):
        rows, self._columns = np.nonzero(matrix)
        self._entries = matrix[rows, self._columns][:, None]
        self._starts = np.searchsorted(rows, np.arange(len(matrix)))
        # Gathering rows costs about 4 times as much as multiplying with them.
        self._dense = matrix if 4 * len(rows) > matrix.size else None

    def matmul(self, right: np.ndarray) -> np.ndarray:
        """Return the product with (n, m) `right`."""
        if self._dense is not None:
            return self._dense @ right
        return np.add.reduceat(self._entries * right[self._columns], self._starts, axis=0)

    def pattern_matmul(self, right: np.ndarray) -> np.ndarray:
        """Return where the product with bool (n, m) `right` is not 0."""
        return np.logical_or.reduceat(right[self._columns], self._starts, axis=0)


def _stationary(matrix: np.ndarray) -> np.ndarray:
    """Return the vector with sum 1 that a primitive matrix, whose columns sum to 1, keeps.

    Nodes are eliminated one by one, and the weight that a node received is redistributed to the
    nodes it sends to. Nothing is subtracted, so even very small entries have full precision: on a
    star whose centre serves its n leaves in turn the smallest is 2^-n.

    Source: Grassmann, Taksar and Heyman, "Regenerative Analysis and Steady State Distributions for
      Markov Chains", Operations Research 33(5), 1985.
    """
    left = matrix.T.copy()
    for k in range(len(left) - 1, 0, -1):
        left[:k, k] /= left[k, :k].sum()
        left[:k, :k] += np.outer(left[:k, k], left[k, :k])
    vector = np.ones(len(left))
    for k in range(1, len(left)):
        vector[k] = vector[:k] @ left[:k, k]
    return vector / vector.sum()


def _norm_exceeds(matrix: np.ndarray, bound: float) -> bool:
    """Return whether the largest singular value is above `bound`."""
    probe = np.random.default_rng(0).normal(size=len(matrix))
    for _ in range(_PROBES):
        # The power method bounds it from below, much cheaper than computing it.
        image = matrix @ probe
        if _frobenius_norm(image) > bound * _frobenius_norm(probe):
            return True
        probe = image @ matrix
    return _spectral_norm(matrix) > bound


def _spectral_norm(matrix: np.ndarray) -> float:
    """Return the largest singular value."""
    scale = _frobenius_norm(matrix)
    if scale == 0:
        return 0.0
    # Several times as fast as a singular value decomposition. Scaling keeps squares from vanishing.
    scaled = matrix / scale
    return float(scale * np.sqrt(max(np.linalg.eigvalsh(scaled.T @ scaled)[-1], 0.0)))


def _frobenius_norm(x: np.ndarray) -> float:
    """Return the square root of the sum of squares; `np.linalg.norm` would start BLAS threads."""
    return float(np.sqrt(np.square(x).sum()))


def _is_primitive(matrices: Sequence[_Sparse], size: int) -> bool:
    """Return whether a power of the rotation's product has no zeros, from zero patterns alone."""
    pattern = np.eye(size, dtype=bool)
    for matrix in matrices:
        # No row of a mixing matrix is empty, so a full pattern stays full.
        pattern = pattern if pattern.all() else matrix.pattern_matmul(pattern)
    # By Wielandt's bound the power (n - 1)^2 + 1, or any higher one, decides.
    power = 1
    while power <= (size - 1) ** 2 and not pattern.all():
        counts = pattern.astype(np.float32)
        pattern = counts @ counts > 0
        power *= 2
    return bool(pattern.all())


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
