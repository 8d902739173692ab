"""Mixing matrices applied by their few entries; dense products would take most of the time."""

import numpy as np


class Sparse:
    """A square matrix that others are multiplied with from the left.

    Args:
      matrix: (n, n), entries >= 0, no row of zeros.
    """

    def __init__(self, matrix: np.ndarray):
        rows, self._columns = np.nonzero(matrix)
        self._entries = matrix[rows, self._columns][:, None]
        self._starts = np.searchsorted(rows, np.arange(len(matrix)))
        # Collecting rows costs about this much more than multiplying with them.
        self._dense = matrix if 4 * len(rows) > matrix.size else None

    def times(self, right: np.ndarray) -> np.ndarray:
        """The product with (n, m) `right`."""
        if self._dense is not None:
            return self._dense @ right
        return np.add.reduceat(self._entries * right[self._columns], self._starts, axis=0)

    def pattern_times(self, right: np.ndarray) -> np.ndarray:
        """Where the product with bool (n, m) `right` is not 0."""
        return np.logical_or.reduceat(right[self._columns], self._starts, axis=0)
