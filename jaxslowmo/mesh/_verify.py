"""Do all processes hold the same tree? Asked once, before anything is averaged."""

import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._typing import PyTree
from ..tree import leaf_names


def describe(tree: PyTree) -> list[str]:
    """One line per leaf: name, dtype, shape."""
    return [
        f"{name}: {jax.typeof(leaf).dtype}{list(np.shape(leaf))}"
        for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    ]


def differences(descriptions: list[list[str]]) -> list[str]:
    """What each process has that process 0 lacks, and lacks that process 0 has."""
    reference = descriptions[0]
    found = []
    for process, lines in enumerate(descriptions[1:], start=1):
        found += [f"process {process} has {line}" for line in lines if line not in reference]
        found += [f"process {process} lacks {line}" for line in reference if line not in lines]
        if sorted(lines) == sorted(reference) and lines != reference:
            found.append(f"process {process} has the same leaves in another order")
    return found


def check_same_tree_everywhere(tree: PyTree) -> None:
    """Raise `ValueError` listing every difference between the processes' trees.

    Raises:
      ValueError: names, dtypes or shapes differ; on every process, with the same text.

    Communication: none with one process; else two small gathers through the host.
    """
    if jax.process_count() == 1:
        return
    payload = np.frombuffer(json.dumps(describe(tree)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: payload.size] = payload
    gathered = multihost_utils.process_allgather(padded).reshape(lengths.size, -1)
    found = differences(
        [
            json.loads(bytes(row[:length]).decode())
            for row, length in zip(gathered, lengths, strict=True)
        ]
    )
    if found:
        raise ValueError(
            "params: the parameter trees differ between processes (compared with process "
            "0): " + "; ".join(found) + "."
        )
