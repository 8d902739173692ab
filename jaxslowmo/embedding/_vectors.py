"""Vectors of rows: sent to who asked for them, sent again where they change, and pooled."""

import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..mesh import varying_axes
from ..transform import run_if
from ..tree import at_least_float32, leaf_names
from ._requests import OUTSIDE, PADDING, Requests, in_blocks, in_slots, num_devices, swap_blocks
from ._stores import TableLayout
from ._table import OWNER

Stored = dict[str, jax.Array]
Counts = dict[str, jax.Array]


def read_rows(tables: Mapping[str, jax.Array], asked: Mapping[str, jax.Array]) -> Stored:
    """The rows of this device that others asked for; an unused slot is 0.

    Args:
      tables: this device's part of the stored arrays.
      asked: by stored array, row numbers.

    Communication: none.
    """
    return {
        name: tables[name].at[rows].get(mode="fill", fill_value=0) for name, rows in asked.items()
    }


def send_rows(layout: TableLayout, rows: Mapping[str, jax.Array]) -> Stored:
    """The rows that this device asked for, in its slots, (slots, dim), from all that were read.

    Communication: one all-to-all of devices * capacity rows for all tables of one dtype.
    """
    arrived = swap_blocks(list(rows.values()), layout.axis_name)
    return {
        name: in_slots(layout.stores[name], own) for name, own in zip(rows, arrived, strict=True)
    }


def typed_as_equal(layout: TableLayout, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Row numbers that came from outside of the axis, typed as they are.

    Where columns are split all devices have the same rows, and what is kept of these, such as the
    sums of Adagrad, is equal on them by type. Stacked by device, the type is lost.

    Communication: for arrays whose columns are split one all-reduce of the numbers.
    """
    axis = layout.axis_name
    return {
        name: lax.pmax(x, axis) if layout.is_split(name) and axis in varying_axes(x) else x
        for name, x in rows.items()
    }


def patched_rows(
    layout: TableLayout,
    tables: Mapping[str, jax.Array],
    requests: Requests,
    vectors: Stored,
    changed: Mapping[str, jax.Array],
    *,
    room: float,
    everything: bool | jax.Array = False,
) -> tuple[Stored, Counts]:
    """Vectors that were looked up in older tables, brought up to date. Under the axis.

    A lookup can then run beside the step before its own, and the vectors are those of a lookup
    after it, bit by bit: rows that have changed since are sent again.

    Args:
      layout: where the tables lie.
      tables: this device's part, as it is now.
      requests: of `Embeddings.exchange_ids`.
      vectors: of `Embeddings.lookup`, in the tables as they were.
      changed: by stored array, the rows of this device that have changed, as numbered here, sorted;
        numbers outside of its part are padding.
      room: the part of each owner's slots that can be sent again, above 0 and up to 1.
      everything: whether all rows may have changed; equal on the devices that share the tables.

    Returns:
      The vectors, and by stored array () int32, how many rows this device has sent, to itself too,
      to be summed over devices: those that have changed, or where there was no room for these, or
      everything has changed, all that were asked for.

    Communication: one all-reduce of 4 bytes; then, in a `lax.cond`, two all-to-alls, of numbers and
      rows, `room` times the slots each; or, where on some device there is no room, or with
      `everything`, one of all slots.
    """
    hits = {name: _is_among(asked, changed.get(name)) for name, asked in requests.asked.items()}
    rooms = {n: max(1, math.ceil(room * asked.shape[1])) for n, asked in requests.asked.items()}
    too_many = jnp.array(False)
    for name, hit in hits.items():
        too_many |= jnp.any(jnp.sum(hit, axis=1, dtype=jnp.int32) > rooms[name])

    def anew(vectors: Stored) -> tuple[Stored, Counts]:
        del vectors
        every = {n: jnp.ones_like(hit) for n, hit in hits.items()}
        new = send_rows(layout, read_rows(tables, requests.asked))
        return new, _counts(layout, requests, every)

    def again(vectors: Stored) -> tuple[Stored, Counts]:
        places = {name: _first_hits(hit, rooms[name]) for name, hit in hits.items()}
        # What has no place is not read either.
        numbers = {
            name: _at(rows, places[name], layout.stores[name].local_rows)
            for name, rows in requests.asked.items()
        }
        told = swap_blocks(list(places.values()), layout.axis_name)
        rows = swap_blocks(list(read_rows(tables, numbers).values()), layout.axis_name)
        new = {
            name: _with_rows(layout, name, vectors[name], place, own)
            for name, place, own in zip(places, told, rows, strict=True)
        }
        return new, _counts(layout, requests, hits)

    if everything is True:
        return anew(vectors)
    flag = too_many.astype(jnp.int32)
    if num_devices(layout.axis_name) > 1:
        flag = lax.pmax(flag, layout.axis_name)
    fall_back = flag > 0
    if everything is not False:
        fall_back |= everything
    return run_if(fall_back, anew, again, vectors)


def _is_among(asked: jax.Array, changed: jax.Array | None) -> jax.Array:
    """Which of the rows asked for are among some sorted ones; padding of both may be, too."""
    if changed is None or changed.size == 0:
        return jnp.zeros(asked.shape, bool)
    place = jnp.minimum(jnp.searchsorted(changed, asked), changed.size - 1)
    return changed[place] == asked


def _first_hits(hit: jax.Array, room: int) -> jax.Array:
    """(devices, room) int32: where in each row the first hits stand; its size for none."""
    size = hit.shape[1]
    numbers = jnp.where(hit, jnp.arange(size, dtype=jnp.int32), jnp.int32(size))
    return jnp.sort(numbers, axis=1)[:, :room]


def _with_rows(
    layout: TableLayout, name: str, vectors: jax.Array, places: jax.Array, rows: jax.Array
) -> jax.Array:
    """`vectors` with the rows that each device has sent, in the places it has named."""
    store = layout.stores[name]
    blocks = in_blocks(store, vectors)
    device = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return in_slots(store, blocks.at[device, places].set(rows, mode="drop"))


def _at(rows: jax.Array, places: jax.Array, padding: int) -> jax.Array:
    """The entries of `rows` at some places of each of its rows; beyond its end padding."""
    return jnp.take_along_axis(rows, places, axis=1, mode="fill", fill_value=padding)


def _counts(layout: TableLayout, requests: Requests, hits: Mapping[str, jax.Array]) -> Counts:
    """By stored array, how many of the rows that a device was asked for are hit."""
    found = {}
    for name, hit in hits.items():
        real = hit & (requests.asked[name] < layout.stores[name].local_rows)
        if layout.is_split(name) and layout.axis_name is not None:
            # All devices are asked for all rows, of which each sends some columns.
            real = lax.dynamic_index_in_dim(real, lax.axis_index(layout.axis_name))
        found[name] = jnp.sum(real, dtype=jnp.int32)
    return found


def pool(
    vectors: jax.Array,
    slots: jax.Array,
    pooling: Literal["sum", "mean"] | None,
    weights: jax.Array | None = None,
    position_weights: jax.Array | None = None,
) -> jax.Array:
    """The vectors of one feature, pooled in at least float32.

    Args:
      vectors: (n, dim).
      slots: (batch,) or (batch, max_length) int32; below 0 as `Requests.slots` says: padding and
        what was dropped counts as zeros, what is out of range is NaN.
      pooling: as `Table.pooling`.
      weights: of the shape of `slots`.
      position_weights: (max_length,).

    Returns:
      (batch, dim), or `(*slots.shape, dim)` without pooling, in the dtype of `vectors`.

    Communication: none.
    """
    wide = vectors.astype(at_least_float32(vectors.dtype))
    padding = (slots == PADDING)[..., None]
    # Slots below 0 would count from the end.
    inside = jnp.where(slots < 0, jnp.int32(vectors.shape[0]), slots)
    found = wide.at[inside].get(mode="fill", fill_value=0)
    found = jnp.where((slots == OUTSIDE)[..., None], jnp.nan, found)
    if weights is not None:
        # The weight of padding may be anything, and 0 times it must be 0.
        found = found * jnp.where(padding, 0, weights.astype(wide.dtype)[..., None])
    if position_weights is not None:
        factors = position_weights.astype(wide.dtype)[:, None]
        found = found * (factors if slots.ndim == 1 else factors[None])
    if pooling is None or slots.ndim == 1:
        return found.astype(vectors.dtype)
    total = jnp.sum(found, axis=1)
    if pooling == "mean":
        count = jnp.sum(~padding, axis=1, dtype=wide.dtype)
        total = total / jnp.maximum(count, 1)
    return total.astype(vectors.dtype)


def position_weights_in(params: PyTree, leaf: str, feature: str, slots: jax.Array) -> jax.Array:
    """The leaf of the dense parameters that weighs the positions of a feature.

    Raises:
      ValueError: there is none of this name, or it has another shape.
    """
    named = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    if leaf not in named:
        given = ", ".join(map(repr, named)) or "none (give `params`)"
        raise ValueError(
            f"{OWNER}: the position weights of feature {feature!r} are leaf {leaf!r} of the dense "
            f"parameters, which are {given}."
        )
    wanted = (slots.shape[1] if slots.ndim == 2 else 1,)
    if named[leaf].shape != wanted:
        raise ValueError(
            f"{OWNER}: the position weights {leaf!r} of feature {feature!r} must have the shape "
            f"{wanted}, one for each place of a bag, got {named[leaf].shape}."
        )
    return named[leaf]
