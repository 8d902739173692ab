"""Bags of ids: a variable number per example, in padded arrays of a fixed size; their pooling."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import check_names, checked_int, checks_flags
from .._support.types import PyTree
from ..tree import at_least_float32
from ._stores import OWNER

# Values in the place of a slot: why an id has no slot.
PADDING, DROPPED, OUTSIDE = -1, -2, -3


class Bags(NamedTuple):
    """The ids of a batch for one feature, as a tree of arrays that can be part of a batch.

    Attributes:
      ids: (batch, max_length) integers of any type, or (batch,) for one id each; negative numbers
        are padding.
      weights: factors of the vectors, of the shape of `ids`; None: 1. The weights of padding are
        ignored.
    """

    ids: Any
    weights: Any = None


@checks_flags("bags")
def bags(
    rows: Any,
    *,
    max_length: int | None = None,
    lengths: Any = None,
    offsets: Any = None,
    weights: Any = None,
    truncate: bool = False,
) -> Bags:
    """Return `Bags` from lists of ids, on the host.

    Args:
      rows: a sequence of sequences of ids, one per bag; or with `lengths` or `offsets` the ids of
        all bags in one flat sequence, as in torchrec's KeyedJaggedTensor.
      max_length: number of ids that a bag has room for; None: the length of the longest bag, so
        that each new length compiles another program.
      lengths: (batch,) number of ids in each bag.
      offsets: (batch + 1,) index of the first id of each bag, and at the end the number of ids.
      weights: factors of the vectors, with the structure of `rows`; None: 1.
      truncate: whether to drop the ids of a bag beyond `max_length`, which are otherwise an error.

    Returns:
      `Bags` of NumPy arrays; ids are int32 where they fit, and -1 is padding. Weights are float32.

    Raises:
      ValueError: a bag that is too long, ids that are negative or not integers, weights of another
        structure, lengths or offsets that don't add up, both lengths and offsets.

    Example:
      >>> bags([[3, 1], [], [7]], max_length=2).ids.tolist()
      [[3, 1], [-1, -1], [7, -1]]
      >>> bags([3, 1, 7], lengths=[2, 0, 1], max_length=2).ids.tolist()
      [[3, 1], [-1, -1], [7, -1]]

    Communication: none.
    """
    if lengths is None and offsets is None:
        rows, lengths = _flatten("rows", rows)
        if weights is not None:
            weights, weights_per_bag = _flatten("weights", weights)
            if not np.array_equal(lengths, weights_per_bag):
                raise ValueError(
                    f"bags: `weights` must be one per id, {lengths.tolist()} in the bags, got "
                    f"{weights_per_bag.tolist()}."
                )
    values = np.asarray(rows)
    sizes = _lengths("bags", lengths, offsets, values)
    return _pad_bags("bags", values, sizes, weights, max_length=max_length, truncate=truncate)


@checks_flags("jagged")
def jagged(
    values: Any,
    *,
    features: Sequence[str],
    lengths: Any = None,
    offsets: Any = None,
    weights: Any = None,
    max_length: int | Mapping[str, int] | None = None,
    truncate: bool = False,
) -> dict[str, Bags]:
    """Return `Bags` by feature from one flat array of ids, on the host.

    The arguments are the parts of a torchrec `KeyedJaggedTensor` (`keys`, `values()`, `lengths()`,
    `offsets()`, `weights()`): ids are ordered by feature, and for each feature by example.

    Args:
      values: the ids of all features in one flat sequence.
      features: names of the features, in the order of the ids.
      lengths: (features * batch,) number of ids in each bag.
      offsets: (features * batch + 1,) index of the first id of each bag, and at the end the number
        of ids; in place of `lengths`.
      weights: factors of the vectors, one for each id; None: 1.
      max_length: number of ids that a bag has room for, for all features or by feature; None, or a
        feature that is not named: the length of the feature's longest bag (see
        `js.embedding.bags`).
      truncate: whether to drop the ids of a bag beyond `max_length`, which are otherwise an error.

    Returns:
      `Bags` of NumPy arrays by feature, which can be part of a batch.

    Raises:
      ValueError: what `js.embedding.bags` refuses; a number of bags that the features do not
        divide; a feature that occurs twice; a `max_length` for another feature; neither lengths nor
        offsets.

    Example:
      >>> found = jagged([3, 1, 7, 9], features=["user", "item"], lengths=[2, 0, 1, 1])
      >>> {name: bags.ids.tolist() for name, bags in found.items()}
      {'user': [[3, 1], [-1, -1]], 'item': [[7], [9]]}

    Communication: none.
    """
    values, names = np.asarray(values), list(features)
    if isinstance(features, str):
        raise ValueError(f"jagged: `features` must be a sequence of names, got {features!r}.")
    if isinstance(max_length, Mapping):
        check_names("jagged: `max_length`", max_length, names, "features")
    sizes = _lengths("jagged", lengths, offsets, values)
    if not names or len({*names}) < len(names) or sizes.size % len(names):
        count = sizes.size
        raise ValueError(
            f"jagged: `features` must be different names that divide {count} bags, got {names}."
        )
    by_feature = sizes.reshape(len(names), -1)
    ends = np.cumsum(by_feature.sum(axis=1))[:-1]
    if weights is not None:
        weights = _checked_weights("jagged", weights, values)
    factors = [None] * len(names) if weights is None else np.split(weights, ends)
    bags_by_feature = {}
    parts = zip(names, by_feature, np.split(values, ends), factors, strict=True)
    for name, sizes_of_bags, ids, weight in parts:
        room = max_length.get(name) if isinstance(max_length, Mapping) else max_length
        owner = f"jagged: feature {name!r}"
        bags_by_feature[name] = _pad_bags(
            owner, ids, sizes_of_bags, weight, max_length=room, truncate=truncate
        )
    return bags_by_feature


def _pad_bags(
    owner: str,
    values: np.ndarray,
    lengths: np.ndarray,
    weights: Any,
    *,
    max_length: int | None,
    truncate: bool,
) -> Bags:
    """Return the bags of flat values, of which bag i has `lengths[i]`."""
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(f"{owner}: ids must be integers, got {values.dtype}.")
    if values.min(initial=0) < 0:
        raise ValueError(f"{owner}: ids must be >= 0, got {int(values.min())}.")
    # Larger ids stay as they are: the check against a table rejects them.
    fits_int32 = values.max(initial=0) <= np.iinfo(np.int32).max
    longest = int(lengths.max(initial=0))
    width = max(longest, 1)
    if max_length is not None:
        width = checked_int(f"{owner}: `max_length`", max_length, 1)
    if longest > width and not truncate:
        raise ValueError(
            f"{owner}: bag {int(lengths.argmax())} has {longest} ids, and `max_length` is {width} "
            "(truncate=True leaves out the rest)."
        )
    positions = np.arange(values.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    fits = positions < width
    places = np.repeat(np.arange(lengths.size), lengths)[fits], positions[fits]
    ids = np.full((lengths.size, width), -1, np.int32 if fits_int32 else values.dtype)
    ids[places] = values[fits]
    if weights is None:
        return Bags(ids)
    padded = np.zeros(ids.shape, np.float32)
    padded[places] = _checked_weights(owner, weights, values)[fits]
    return Bags(ids, padded)


def _checked_weights(owner: str, weights: Any, values: np.ndarray) -> np.ndarray:
    weights = np.asarray(weights, np.float32)
    if weights.shape != values.shape:
        raise ValueError(
            f"{owner}: `weights` must be one for each of {values.size} ids, got {weights.shape}."
        )
    return weights


def _flatten(argument: str, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all entries in one flat array, and the number of entries of each row."""
    parts = [np.asarray(row) for row in rows]
    if any(part.ndim != 1 for part in parts):
        raise ValueError(
            f"bags: `{argument}` must have a sequence per bag; a flat one needs `lengths` or "
            "`offsets`."
        )
    full = [part for part in parts if part.size]
    values = np.concatenate(full) if full else np.zeros(0, np.int32)
    return values, np.array([part.size for part in parts], np.int64)


def _lengths(owner: str, lengths: Any, offsets: Any, values: np.ndarray) -> np.ndarray:
    """Return the number of ids of each bag, and check that they sum to the number of values."""
    if (lengths is None) == (offsets is None):
        which = "neither" if lengths is None else "both"
        raise ValueError(f"{owner}: give either `lengths` or `offsets`, got {which}.")
    argument = "lengths" if offsets is None else "offsets"
    array = np.asarray(lengths if offsets is None else offsets)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{owner}: `{argument}` must be a sequence of integers, got {array!r}.")
    if offsets is not None and (array.size == 0 or array[0] != 0):
        raise ValueError(f"{owner}: `offsets` must begin with 0 and end with the number of ids.")
    array = array.astype(np.int64)
    sizes = array if offsets is None else np.diff(array)
    if values.ndim != 1:
        raise ValueError(f"{owner}: ids must be one flat sequence, got shape {values.shape}.")
    if (sizes < 0).any():
        first = int(np.argmax(sizes < 0))
        raise ValueError(
            f"{owner}: `{argument}` must give each bag ids, 0 or more, got {sizes[first]} for bag "
            f"{first}."
        )
    if sizes.sum() != values.size:
        raise ValueError(
            f"{owner}: `{argument}` must add up to all {values.size} ids, got {sizes.sum()}."
        )
    return sizes


def as_bags(feature: str, ids_or_bags: Any) -> Bags:
    """Return ids or `Bags` of one feature as `Bags`, after a check of shapes and types."""
    bags = Bags(*map(_as_array, ids_or_bags if isinstance(ids_or_bags, Bags) else (ids_or_bags,)))
    ids, weights = bags
    if not all(hasattr(part, "dtype") for part in bags if part is not None):
        what, rule = "", "arrays or js.embedding.Bags (js.embedding.bags makes them of lists)"
    elif not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim not in (1, 2):
        what, rule = "the ids of ", "integers of shape (batch,) or (batch, max_length)"
    elif weights is not None and (
        weights.shape != ids.shape or not jnp.issubdtype(weights.dtype, jnp.floating)
    ):
        what, rule = "the weights of ", f"floating, and of the shape of the ids {ids.shape}"
    else:
        return bags
    value = {"": ids_or_bags, "the ids of ": ids, "the weights of ": weights}[what]
    is_array = hasattr(value, "dtype")
    actual = f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__
    raise ValueError(f"{OWNER}: {what}feature {feature!r} must be {rule}, got {actual}.")


def _as_array(x: Any) -> Any:
    """Return arrays of other libraries, such as torch on CPU, as NumPy arrays; keep all else."""
    is_native = isinstance(x, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    return np.asarray(x) if hasattr(x, "__array__") and not is_native else x


def bags_of(batch: PyTree, features: tuple[str, ...], inputs: Any) -> dict[str, Bags]:
    """Return the bags of a batch by feature; leave out features that the batch lacks.

    Raises:
      ValueError: the batch has none of the features, or `inputs` returns one that no table has.
    """
    if inputs is not None:
        by_feature = inputs(batch)
        if not isinstance(by_feature, Mapping):
            raise ValueError(
                f"{OWNER}: `inputs` must return ids or js.embedding.Bags by feature, got "
                f"{type(by_feature).__name__}."
            )
    elif isinstance(batch, Mapping):
        by_feature = {feature: batch[feature] for feature in features if feature in batch}
    else:
        kind = type(batch).__name__
        raise ValueError(f"{OWNER}: a batch that is no mapping needs `inputs`, got {kind}.")
    check_names(f"{OWNER}: `inputs`", by_feature, features, "features of the tables")
    if not by_feature:
        raise ValueError(f"{OWNER}: the batch must have some of the features {features}.")
    return {feature: as_bags(feature, ids_or_bags) for feature, ids_or_bags in by_feature.items()}


def pool(
    vectors: jax.Array,
    slots: jax.Array,
    pooling: Literal["sum", "mean"] | None,
    weights: jax.Array | None = None,
    position_weights: jax.Array | None = None,
) -> jax.Array:
    """Return the vectors of one feature, pooled in at least float32.

    Args:
      vectors: (n, dim) vectors of the stored array.
      slots: (batch,) or (batch, max_length) int32, as `Requests.slots`. Padding and dropped ids
        count as zeros, ids out of range as NaN.
      pooling: how vectors are combined, as `Table.pooling`.
      weights: factors of the vectors, of the shape of `slots`; None: 1.
      position_weights: (max_length,) factors of the places of a bag; None: 1.

    Returns:
      (batch, dim), or `(*slots.shape, dim)` without pooling, in the dtype of `vectors`.

    Communication: none.
    """
    wide = vectors.astype(at_least_float32(vectors.dtype))
    padding = (slots == PADDING)[..., None]
    # `at` would count slots below 0 from the end.
    rows = jnp.where(slots < 0, jnp.int32(vectors.shape[0]), slots)
    gathered = wide.at[rows].get(mode="fill", fill_value=0)
    gathered = jnp.where((slots == OUTSIDE)[..., None], jnp.nan, gathered)
    if weights is not None:
        # The weight of padding may be NaN or infinite, and 0 times it must be 0.
        gathered = gathered * jnp.where(padding, 0, weights.astype(wide.dtype)[..., None])
    if position_weights is not None:
        factors = position_weights.astype(wide.dtype)[:, None]
        gathered = gathered * (factors if slots.ndim == 1 else factors[None])
    if pooling is None or slots.ndim == 1:
        return gathered.astype(vectors.dtype)
    total = jnp.sum(gathered, axis=1)
    if pooling == "mean":
        count = jnp.sum(~padding, axis=1, dtype=wide.dtype)
        total = total / jnp.maximum(count, 1)
    return total.astype(vectors.dtype)
