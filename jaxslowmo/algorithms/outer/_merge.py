"""The share of its own progress that a replica keeps in a slow step."""

import jax
import numpy as np

from ..._support.types import PyTree


def check_merge(owner: str, merge: float) -> None:
    """Raise `ValueError` unless `merge` is a number in [0, 1]."""
    is_number = isinstance(merge, int | float | np.number) and not isinstance(merge, bool)
    if not is_number or not 0 <= merge <= 1:
        raise ValueError(f"{owner}: `merge` must be a number in [0, 1], got {merge!r}.")


def merged(local: PyTree, anchor: PyTree, merge: float) -> PyTree:
    """Return `anchor + merge * (local - anchor)`: the anchor for 0, the local values for 1.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 3.3.
    """
    if merge == 0:
        return anchor
    if merge == 1:
        return jax.tree.map(lambda x, a: x.astype(a.dtype), local, anchor)
    return jax.tree.map(lambda x, a: a + merge * (x.astype(a.dtype) - a), local, anchor)
