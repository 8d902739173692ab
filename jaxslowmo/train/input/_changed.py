"""Arrays that their iterator fills again while a batch waits for its turn."""

from typing import Any

import jax
import numpy as np

from ..._typing import PyTree

_MOST = 32  # elements of an array that are looked at

Sample = tuple[bytes, ...]


def sample_of(batch: PyTree) -> Sample:
    """Some elements of each array of the host, spread over it."""
    return tuple(_some(x) for x in jax.tree.leaves(batch) if _is_looked_at(x))


def refuse_changed(batch: PyTree, sample: Sample) -> None:
    """Raise `ValueError` where these elements are others by now.

    Args:
      batch: that was loaded.
      sample: of it, right after.
    """
    if sample != sample_of(batch):
        raise ValueError(
            "`batches` changes arrays of a batch after it has yielded it, such as by filling one "
            "array again and again, while batches are loaded ahead: yield copies, or pass "
            "`depth`=0 (`prefetch`=0 to js.train_loop)."
        )


def _is_looked_at(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.flags.c_contiguous and not x.dtype.hasobject


def _some(x: np.ndarray) -> bytes:
    flat = x.reshape(-1)
    return flat[:: max(1, flat.size // _MOST)][: 2 * _MOST].tobytes()
