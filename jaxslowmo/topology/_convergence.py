"""The rate at which exchanges bring nodes to agree, from products of mixing matrices.

X_t, the product of the first t matrices, tends to w 1^T / n with w the push-sum weights in the
long run. The products here use matrices from which this limit is subtracted,
A_r - w_{r+1} 1^T / n, so that errors stay exact however small they are and after any number of
rounds.
"""

from collections.abc import Iterable, Sequence

import numpy as np

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
