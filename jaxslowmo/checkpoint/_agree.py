"""Several processes decide alike."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils


def first_failure(own: int) -> int:
    """The lowest code that is not 0 on any process, or 0.

    Communication: none with one process; else one gather of 4 bytes through the host.
    """
    if jax.process_count() == 1:
        return own
    codes = np.ravel(multihost_utils.process_allgather(np.array([own], np.int32)))
    failures = codes[codes != 0]
    return int(failures.min()) if failures.size else 0


def of_first_process(numbers: Sequence[int]) -> list[int]:
    """Process 0's numbers (int32), on all processes.

    Communication: none with one process; else two broadcasts of a few bytes through the host.
    """
    if jax.process_count() == 1:
        return list(numbers)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    own = np.zeros(length, np.int32)
    own[: len(numbers)] = numbers[:length]
    return [int(n) for n in multihost_utils.broadcast_one_to_all(own)] if length else []
