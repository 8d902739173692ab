"""Blocks of consecutive layers, dealt to stages, and the arguments that say how many there are."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

Interval = tuple[int, int]
"""A block of layers: the first, and the one after the last."""


def dealt(blocks: Sequence[Interval], num_stages: int) -> list[list[Interval]]:
    """Per stage its blocks: block k belongs to stage k % `num_stages`."""
    return [list(blocks[stage::num_stages]) for stage in range(num_stages)]


def check_count(owner: str, name: str, value: Any) -> int:
    """`value` as an int; `ValueError` unless it is an integer >= 1."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{owner}: `{name}` must be an int >= 1, got {value!r}.")
    return count


def check_costs(owner: str, name: str, values: Iterable[Any]) -> np.ndarray:
    """One finite number >= 0 per layer, as a 1-D array of integers or doubles."""
    try:
        if isinstance(values, Mapping):
            raise TypeError
        found = np.asarray(values if hasattr(values, "__array__") else list(values))
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.dtype == jnp.bfloat16:  # no float to NumPy
        found = found.astype(np.float32)
    is_number = found.dtype.kind in "iuf"
    if found.ndim != 1 or not found.size or not is_number:
        raise ValueError(f"{owner}: `{name}` must hold one number per layer, got {values!r}.")
    wrong = [i for i, x in enumerate(found.tolist()) if not 0 <= x < float("inf")]
    if wrong:
        raise ValueError(
            f"{owner}: `{name}` must be finite and >= 0, got "
            f"{', '.join(f'{found[i]} for layer {i}' for i in wrong)}."
        )
    return found
