"""Do all processes hold the same tree? Asked once, before anything is averaged."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from .._support.types import PyTree
from ..tree import leaf_names

Description = list[tuple[str, str]]
"""Name and type of every leaf, in flattening order."""

_VALUES = " of values "


def is_of_host(x: Any) -> bool:
    """Whether this process alone knows `x`.

    Not arrays over several processes, nor shapes without values or values under a trace, which are
    all of the whole.
    """
    if isinstance(x, jax.ShapeDtypeStruct | Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(arrays: Sequence[Any]) -> str:
    """16 letters that stand for the bits of arrays that this process has."""
    found = hashlib.blake2b(digest_size=8)
    for x in arrays:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def describe(tree: PyTree, *, with_values: bool = False) -> Description:
    """Name and type, such as `("layer/w", "float32[3,4]")`, of every leaf.

    Args:
      tree: of arrays.
      with_values: also a digest of the values that this process alone knows.
    """
    seen: Counter[str] = Counter()
    lines = []
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name} (no. {seen[name]})"
        shape = ",".join(map(str, np.shape(leaf)))
        values = f"{_VALUES}{digest([leaf])}" if with_values and is_of_host(leaf) else ""
        lines.append((unique, f"{jax.typeof(leaf).dtype}[{shape}]{values}"))
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
    compare_trees(params)


def compare_trees(params: PyTree, *, with_values: bool = False) -> None:
    """`check_same_tree`, also of the values that each process has by itself."""
    if jax.process_count() == 1:
        return
    described = describe(params, with_values=with_values)
    payload = np.frombuffer(json.dumps(described).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: payload.size] = payload
    gathered = multihost_utils.process_allgather(padded).reshape(lengths.size, -1)
    told: list[Description] = [
        [(name, what) for name, what in json.loads(bytes(row[:length]).decode())]
        for row, length in zip(gathered, lengths, strict=True)
    ]
    types = [[(name, what.partition(_VALUES)[0]) for name, what in own] for own in told]
    found = differences(types) or _few(differences(told))
    if found:
        raise ValueError(
            f"params: the parameter trees differ between processes: {'; '.join(found)}."
        )


_NUM_VALUES = 4


def _few(found: list[str]) -> list[str]:
    """Some of the leaves of other values, which may be all there are, and what to do."""
    if not found:
        return []
    more = [f"{len(found) - _NUM_VALUES} more"] if len(found) > _NUM_VALUES else []
    return [*found[:_NUM_VALUES], *more, "all must start from the same seed or file"]
