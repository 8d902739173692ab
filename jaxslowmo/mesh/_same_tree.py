"""Do all processes hold the same tree? Asked once, before anything is averaged."""

import json
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._typing import PyTree
from ..tree import leaf_names

Description = list[tuple[str, str]]
"""Name and type of every leaf, in flattening order."""


def describe(tree: PyTree) -> Description:
    """Name and type, such as `("layer/w", "float32[3,4]")`, of every leaf."""
    seen: Counter[str] = Counter()
    lines = []
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name} (no. {seen[name]})"
        shape = ",".join(map(str, np.shape(leaf)))
        lines.append((unique, f"{jax.typeof(leaf).dtype}[{shape}]"))
    return lines


def differences(
    descriptions: Sequence[Description], processes: Sequence[int] | None = None
) -> list[str]:
    """One line for each leaf that is not the same everywhere: what it is on which processes.

    Args:
      descriptions: one per process.
      processes: their numbers; None: 0, 1, ...
    """
    numbers = range(len(descriptions)) if processes is None else processes
    by_process = dict(zip(numbers, map(dict, descriptions), strict=True))
    names = dict.fromkeys(name for types in by_process.values() for name in types)
    found = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for process, types in by_process.items():
            groups.setdefault(types.get(name, "missing"), []).append(process)
        if len(groups) > 1:
            parts = [f"{what} on {name_processes(where)}" for what, where in groups.items()]
            found.append(f"{name}: {', '.join(parts)}")
    if not found:
        orders = [[name for name, _ in description] for description in descriptions]
        other = [
            process for process, order in zip(numbers, orders, strict=True) if order != orders[0]
        ]
        if other:
            found.append(
                f"the same leaves in another order than process {numbers[0]} on "
                f"{name_processes(other)}"
            )
    return found


def name_processes(which: Sequence[int]) -> str:
    """Such as "processes 0, 3"."""
    return f"process{'es' if len(which) > 1 else ''} {', '.join(map(str, which))}"


def check_same_tree(params: PyTree) -> None:
    """Check that all processes hold the same tree: names, shapes and dtypes of its leaves.

    `js.replicate`, `js.init` and `js.TrainState.create` (so `step.init` too) do this by themselves.
    All processes must call it. Values are not compared: see `js.check_in_sync`.

    Args:
      params: any tree of arrays.

    Raises:
      ValueError: some leaf differs or is missing somewhere; raised on every process with the same
        text, which lists each such leaf, what it is, and on which processes.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    if jax.process_count() == 1:
        return
    payload = np.frombuffer(json.dumps(describe(params)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: payload.size] = payload
    gathered = multihost_utils.process_allgather(padded).reshape(lengths.size, -1)
    found = differences(
        [
            [(name, what) for name, what in json.loads(bytes(row[:length]).decode())]
            for row, length in zip(gathered, lengths, strict=True)
        ]
    )
    if found:
        raise ValueError(
            f"params: the parameter trees differ between processes: {'; '.join(found)}."
        )
