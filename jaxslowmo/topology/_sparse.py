"""Mixing matrices applied by their few entries per row; dense products would take most time."""

import numpy as np


class Sparse:
    """A square matrix that others are multiplied with from the left.

    Args:
      matrix: (n, n), with entries >= 0.
    """

    def __init__(self, matrix: np.ndarray):
        size = len(matrix)
        most = int(np.count_nonzero(matrix, axis=1).max())
        # Gathering rows costs about this much more than multiplying with them.
        self._dense = matrix if 4 * most > size else None
        # Row i is the sum of weights[k, i] times row sources[k, i]; short rows end with weights 0.
        self._sources = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most].T.copy()
        self._weights = matrix[np.arange(size), self._sources]

    def times(self, right: np.ndarray) -> np.ndarray:
        """The product with (n, m) `right`."""
        if self._dense is not None:
            return self._dense @ right
        total = self._weights[0][:, None] * right[self._sources[0]]
        for sources, weights in zip(self._sources[1:], self._weights[1:], strict=True):
            total += weights[:, None] * right[sources]
        return total

    def pattern_times(self, right: np.ndarray) -> np.ndarray:
        """Where the product with bool (n, m) `right` is not 0."""
        found = np.zeros_like(right)
        for sources, weights in zip(self._sources, self._weights, strict=True):
            found |= right[sources] & (weights > 0)[:, None]
        return found
