"""Bags of ids: variable numbers of them in arrays of a fixed size."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import checked_int
from .._support.types import PyTree
from ._table import OWNER


class Bags(NamedTuple):
    """Ids of a batch for one feature; a tree of arrays, so that it can be part of a batch.

    Attributes:
      ids: (batch, max_length) integers of any type, or (batch,) for one id each; negative numbers
        are padding.
      weights: of the shape of `ids`, what each vector is multiplied with; None: 1. Those of padding
        do not count.
    """

    ids: Any
    weights: Any = None


def bags(
    rows: Any,
    *,
    max_length: int | None = None,
    lengths: Any = None,
    offsets: Any = None,
    weights: Any = None,
    truncate: bool = False,
) -> Bags:
    """`Bags` from lists of ids, on the host.

    Args:
      rows: a sequence of sequences of ids, a bag each; or with `lengths` or `offsets` the ids of
        all bags, one behind the other, as in torch's KeyedJaggedTensor.
      max_length: ids that a bag has room for; None: as many as the longest has, which makes another
        program for every other length.
      lengths: (batch,) ids in each bag.
      offsets: (batch + 1,) where each bag begins, and at the end the number of ids.
      weights: of the structure of `rows`.
      truncate: leaves out what a bag has beyond `max_length`, which is otherwise an error.

    Returns:
      `Bags` of NumPy arrays; ids are int32 where they fit, and -1 is padding. Weights are float32.

    Raises:
      ValueError: a bag that is too long, ids that are no integers or negative, weights of another
        structure, lengths or offsets that don't add up, both of them.

    Example:
      >>> bags([[3, 1], [], [7]], max_length=2).ids.tolist()
      [[3, 1], [-1, -1], [7, -1]]
      >>> bags([3, 1, 7], lengths=[2, 0, 1], max_length=2).ids.tolist()
      [[3, 1], [-1, -1], [7, -1]]

    Communication: none.
    """
    if lengths is not None and offsets is not None:
        raise ValueError("bags: give `lengths` or `offsets`, not both.")
    if lengths is None and offsets is None:
        values, lengths = _flat("rows", rows)
        if weights is not None:
            weights, of_weights = _flat("weights", weights)
            if not np.array_equal(lengths, of_weights):
                raise ValueError(
                    f"bags: `weights` must be one for each id: bags have {lengths.tolist()} ids "
                    f"and {of_weights.tolist()} weights."
                )
    else:
        values = np.asarray(rows)
        lengths = _lengths(lengths, offsets, values)
    values = _checked_ids(values)
    longest = int(lengths.max(initial=0))
    width = max(longest, 1)
    if max_length is not None:
        width = checked_int("bags: `max_length`", max_length, 1)
    if longest > width and not truncate:
        raise ValueError(
            f"bags: bag {int(lengths.argmax())} has {longest} ids, and `max_length` is "
            f"{width} (truncate=True leaves out the rest)."
        )
    place = np.arange(values.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    bag, kept = np.repeat(np.arange(lengths.size), lengths), place < width
    ids = np.full((lengths.size, width), -1, values.dtype)
    ids[bag[kept], place[kept]] = values[kept]
    if weights is None:
        return Bags(ids)
    weights = np.asarray(weights, np.float32)
    if weights.shape != values.shape:
        raise ValueError(
            f"bags: `weights` must be one for each of {values.size} ids, got {weights.shape}."
        )
    padded = np.zeros(ids.shape, np.float32)
    padded[bag[kept], place[kept]] = weights[kept]
    return Bags(ids, padded)


def _flat(argument: str, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """All entries one behind the other, and how many each row has."""
    parts = [np.asarray(row) for row in rows]
    if any(part.ndim != 1 for part in parts):
        raise ValueError(
            f"bags: `{argument}` must be a sequence of sequences, a bag each (a flat one needs "
            "`lengths` or `offsets`)."
        )
    full = [part for part in parts if part.size]
    values = np.concatenate(full) if full else np.zeros(0, np.int32)
    return values, np.array([part.size for part in parts], np.int64)


def _lengths(lengths: Any, offsets: Any, values: np.ndarray) -> np.ndarray:
    """How many ids each bag has, of which there are as many as `values` has."""
    argument = "lengths" if offsets is None else "offsets"
    given = np.asarray(lengths if offsets is None else offsets)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"bags: `{argument}` must be a sequence of integers, got {given!r}.")
    if offsets is not None and (given.size == 0 or given[0] != 0):
        raise ValueError("bags: `offsets` must begin with 0 and end with the number of ids.")
    given = given.astype(np.int64)
    found = given if offsets is None else np.diff(given)
    if values.ndim != 1 or (found < 0).any() or found.sum() != values.size:
        raise ValueError(
            f"bags: `{argument}` must be those of all {values.size} ids (in one flat sequence, "
            f"got shape {values.shape}) and not decrease below 0, but add up to {found.sum()}."
        )
    return found


def _checked_ids(values: np.ndarray) -> np.ndarray:
    """Ids as int32, or int64 where they are too large (what checks ids against a table says so)."""
    if values.size == 0:
        return values.astype(np.int32)
    if values.dtype.kind not in "iu":
        raise ValueError(f"bags: ids must be integers, got {values.dtype}.")
    if values.min() < 0:
        raise ValueError(
            f"bags: ids must not be negative (that is padding), got {int(values.min())}."
        )
    return values.astype(np.int32) if values.max() <= np.iinfo(np.int32).max else values


def as_bags(feature: str, given: Any) -> Bags:
    """`given` ids or `Bags` of one feature as `Bags`, of which shapes and types are right."""
    found = Bags(*map(_as_array, given if isinstance(given, Bags) else (given,)))
    for part in found:
        if part is not None and not hasattr(part, "dtype"):
            raise ValueError(
                f"{OWNER}: feature {feature!r} must be an array of ids or js.Bags (js.bags makes "
                f"them of lists), got {type(given).__name__}."
            )
    ids, weights = found
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim not in (1, 2):
        raise ValueError(
            f"{OWNER}: the ids of feature {feature!r} must be integers of shape (batch,) or "
            f"(batch, max_length), got {ids.dtype}{list(ids.shape)}."
        )
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            f"{OWNER}: the weights of feature {feature!r} must have the shape of its ids "
            f"{ids.shape}, got {weights.shape}."
        )
    if weights is not None and not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{OWNER}: the weights of feature {feature!r} must be floating, got {weights.dtype}."
        )
    return found


def _as_array(x: Any) -> Any:
    """Arrays of other libraries, such as torch's on CPU, as NumPy's; what is no array stays."""
    is_known = isinstance(x, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    return np.asarray(x) if hasattr(x, "__array__") and not is_known else x


def bags_of(batch: PyTree, features: tuple[str, ...], inputs: Any) -> dict[str, Bags]:
    """The bags of a batch by feature; features that the batch lacks are left out.

    Raises:
      ValueError: there is none, or one that no table has.
    """
    if inputs is not None:
        found = inputs(batch)
        if not isinstance(found, Mapping):
            raise ValueError(
                f"{OWNER}: `inputs` must return ids or js.Bags by feature, got "
                f"{type(found).__name__}."
            )
    elif isinstance(batch, Mapping):
        found = {feature: batch[feature] for feature in features if feature in batch}
    else:
        raise ValueError(
            f"{OWNER}: a batch that is no mapping needs `inputs`, a function that finds the ids in "
            f"it, got {type(batch).__name__}."
        )
    known = ", ".join(map(repr, features))
    unknown = [feature for feature in found if feature not in features]
    if unknown:
        raise ValueError(
            f"{OWNER}: `inputs` returns {', '.join(map(repr, unknown))}, but the tables have the "
            f"features {known}."
        )
    if not found:
        raise ValueError(f"{OWNER}: the batch has none of the features {known}.")
    return {feature: as_bags(feature, given) for feature, given in found.items()}
