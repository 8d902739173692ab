"""The exchange of requests for rows, in a fixed number of slots per owner, and of the rows."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import gather_slices
from ..gradients.sparse import NOWHERE, distinct_rows, inside
from ..mesh import axis_names, axis_size
from ..transform import run_if
from ._bags import DROPPED, OUTSIDE, PADDING, Bags
from ._stores import Store, TableLayout, TablePlace
from ._table import Capacity

BagsByTable = Mapping[str, Mapping[str, Bags]]
Stored = dict[str, jax.Array]
Counts = dict[str, jax.Array]

PREFIX, COUNTS = "embeddings/", ("asked", "overflow", "invalid")


def num_devices(axis_name: str | None) -> int:
    """Return the number of devices along the axis; 1 without an axis."""
    return 1 if axis_name is None else axis_size(axis_name)


def swap_blocks(blocks: Sequence[jax.Array], axis_name: str | None) -> list[jax.Array]:
    """Send entry d of each block to device d, and return the received entries by sender.

    Args:
      blocks: arrays (devices, *s).
      axis_name: axis of the devices; None: there is only one device.

    Returns:
      Arrays of the same shapes; entry d comes from device d.

    Communication: one all-to-all of all blocks of one dtype over `axis_name`; none on one device.
    """
    size = num_devices(axis_name)
    if size == 1:
        return list(blocks)
    arrived: list[jax.Array] = list(blocks)
    for dtype in sorted({block.dtype for block in blocks}, key=str):
        chosen = [i for i, block in enumerate(blocks) if block.dtype == dtype]
        flat = jnp.concatenate([blocks[i].reshape(size, -1) for i in chosen], axis=1)
        flat = lax.all_to_all(flat, axis_name, split_axis=0, concat_axis=0, tiled=True)
        parts = lax.split(flat, [blocks[i].size // size for i in chosen], axis=1)
        for i, part in zip(chosen, parts, strict=True):
            arrived[i] = part.reshape(blocks[i].shape)
    return arrived


class Requests(NamedTuple):
    """The rows that this device uses and the rows that it sends; see `Embeddings.exchange_ids`.

    Attributes:
      slots: maps a feature to int32 of the shape of its ids: the index of each id's vector in the
        vectors of its stored array. Below 0 it has none: padding, beyond the capacity, or out of
        range.
      weights: maps each feature with weights to an array of the shape of its ids.
      asked: maps a stored array to (devices, capacity) int32: the local row numbers that each
        device requests from this one; padding is the number of local rows.
      counts: maps a name of `Embeddings.metrics` to (1,) int32.
    """

    slots: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    asked: dict[str, jax.Array]
    counts: dict[str, jax.Array]


def request_rows(layout: TableLayout, bags: BagsByTable, capacity: Capacity) -> Requests:
    """Assign slots to the ids of a device, and request their rows; see `exchange_ids`."""
    num_slots, first, width = {}, {}, {}
    used: dict[tuple[str, int], int] = {}
    for name, by_feature in bags.items():
        place, num_ids = layout.places[name], sum(b.ids.size for b in by_feature.values())
        most, limit = max(1, min(num_ids, place.rows_per_owner)), capacity[name]
        num_slots[name] = most if limit is None else min(limit, most)
        # Tables on one owner follow each other in its slots; each owner's slots begin at 0.
        shared = (place.store, place.first_owner)
        first[name] = used.get(shared, 0)
        used[shared] = first[name] + num_slots[name]
        width[place.store] = max(width.get(place.store, 0), used[shared])
    requested = {}
    for store, slots_of_owner in width.items():
        senders, local_rows = layout.stores[store].num_senders, layout.stores[store].local_rows
        requested[store] = jnp.full((senders, slots_of_owner), local_rows, jnp.int32)
    slots, weights, counts = {}, {}, {}
    for name, by_feature in bags.items():
        ids, place = [jnp.reshape(b.ids, -1) for b in by_feature.values()], layout.places[name]
        numbered = _number_ids(ids, place, num_slots[name])
        block = requested[place.store]
        owner = place.first_owner + numbered.owner
        slot = jnp.where(numbered.fits, first[name] + numbered.in_owner, jnp.int32(NOWHERE))
        row = numbered.row + place.first_row
        requested[place.store] = block.at[owner, slot].set(row, mode="drop")
        slot = jnp.where(numbered.fits, owner * block.shape[1] + slot, jnp.int32(DROPPED))
        slot = slot.at[numbered.places].get(mode="fill", fill_value=DROPPED)
        slot = _in_their_slots(numbered.rows, numbered.padding, slot, place.num_rows)
        flat = lax.split(slot, [part.size for part in ids])
        for (feature, b), x in zip(by_feature.items(), flat, strict=True):
            slots[feature] = x.reshape(b.ids.shape)
            if b.weights is not None:
                weights[feature] = jnp.asarray(b.weights)
        counts |= {f"{PREFIX}{name}/{what}": x[None] for what, x in numbered.counts.items()}
    split = [name for name in requested if layout.is_split(name)]
    sent = [name for name in requested if name not in split]
    received = swap_blocks([requested[name] for name in sent], layout.axis_name)
    asked = requested | dict(zip(sent, received, strict=True))
    if split and layout.axis_name is not None:
        # Every device holds columns of all rows, so it receives the requests of all devices.
        flat = jnp.concatenate([requested[name] for name in split], axis=1)
        parts = lax.split(gather_slices(flat, layout.axis_name), [width[n] for n in split], axis=1)
        asked |= dict(zip(split, parts, strict=True))
    return Requests(slots, weights, asked, counts)


class Numbered(NamedTuple):
    """The ids of one table, and the owners of its distinct rows."""

    rows: jax.Array  # (k,) int32, row number of each id; the number of rows for none
    padding: jax.Array  # (k,) bool
    places: jax.Array  # (k,) int32, index of each id among the distinct rows
    row: jax.Array  # (n,) int32, row at the owner
    owner: jax.Array  # (n,) int32, index of the owner among those of the table
    in_owner: jax.Array  # (n,) int32, index among the distinct rows of that owner
    fits: jax.Array  # (n,) bool, whether the row has a slot
    counts: Counts  # () int32 for each of `COUNTS`


def rows_of_ids(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return row numbers as int32, `num_rows` for no row, and a mask of padding.

    The ids are compared in their own dtype: an unsigned one has no padding, and int8 holds no 256.
    """
    ids = jnp.asarray(ids)
    return inside(ids, num_rows), ids < 0


def _in_their_slots(rows: jax.Array, padding: jax.Array, slots: jax.Array, num_rows: int):
    """Return the slots of ids that are rows of the table, and for others why they have none."""
    no_slot = jnp.where(padding, jnp.int32(PADDING), jnp.int32(OUTSIDE))
    return jnp.where(rows < num_rows, slots, no_slot)


def _number_ids(ids: Sequence[jax.Array], place: TablePlace, num_slots: int) -> Numbered:
    """Find the distinct rows of one table, and their owners, of which each has `num_slots`.

    Args:
      ids: flat integer arrays of any dtype, which are concatenated; negative numbers are padding.
      place: placement of the table in its stored array.
      num_slots: number of slots for each owner.
    """
    pairs = [rows_of_ids(part, place.num_rows) for part in ids]
    rows, padding = (jnp.concatenate(parts) for parts in zip(*pairs, strict=True))
    total, size = place.num_positions, max(1, min(rows.size, place.num_positions))
    # Positions are sorted by owner. `starts`: index of the first distinct position of each owner.
    positions, places, count = distinct_rows(place.positions(rows), total, size)
    begins = jnp.arange(place.owners, dtype=jnp.int32) * jnp.int32(place.rows_per_owner)
    starts = jnp.searchsorted(positions, begins).astype(jnp.int32)
    owner = jnp.minimum(positions // place.rows_per_owner, place.owners - 1)
    in_owner = jnp.arange(size, dtype=jnp.int32) - starts[owner]
    per_owner = jnp.diff(starts, append=jnp.reshape(count, 1))
    overflow = jnp.sum(jnp.maximum(per_owner - num_slots, 0), dtype=jnp.int32)
    invalid = jnp.sum(~padding & (rows == place.num_rows), dtype=jnp.int32)
    return Numbered(
        rows=rows,
        padding=padding,
        places=places,
        row=positions - owner * place.rows_per_owner,
        owner=owner,
        in_owner=in_owner,
        fits=(in_owner < num_slots) & (positions < total),
        counts=dict(zip(COUNTS, (count, overflow, invalid), strict=True)),
    )


def rows_as_slots(place: TablePlace, store: Store, ids: jax.Array) -> jax.Array:
    """Return the slots of ids if the vectors are the whole stored array itself."""
    rows, padding = rows_of_ids(ids, place.num_rows)
    slots = place.positions(rows) + place.first_in(store)
    return _in_their_slots(rows, padding, slots, place.num_rows)


def in_slots(store: Store, arrived: jax.Array) -> jax.Array:
    """Return vectors (slots, dim) from the blocks of each sender, (devices, capacity, columns)."""
    if store.kind == "column":
        arrived = arrived.transpose(1, 0, 2)
    return arrived.reshape(-1, store.dim)


def in_blocks(store: Store, vectors: jax.Array) -> jax.Array:
    """Return the block for each device, (devices, capacity, columns), from vectors (slots, dim)."""
    if store.kind == "column":
        return vectors.reshape(-1, store.num_shards, store.local_dim).transpose(1, 0, 2)
    return vectors.reshape(store.num_shards, -1, store.dim)


def read_rows(tables: Mapping[str, jax.Array], requested: Mapping[str, jax.Array]) -> Stored:
    """Return the rows of this device that other devices request; 0 in unused slots.

    Args:
      tables: this device's part of the stored arrays.
      requested: maps a stored array to the local numbers of the rows.

    Communication: none.
    """
    return {
        name: tables[name].at[rows].get(mode="fill", fill_value=0)
        for name, rows in requested.items()
    }


def send_rows(layout: TableLayout, rows: Mapping[str, jax.Array]) -> Stored:
    """Exchange rows that were read, and return those that this device requested, (slots, dim).

    Communication: one all-to-all of devices * capacity rows for all tables of one dtype.
    """
    arrived = swap_blocks(list(rows.values()), layout.axis_name)
    return {
        name: in_slots(layout.stores[name], block)
        for name, block in zip(rows, arrived, strict=True)
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
    """Update vectors that were looked up in older tables, with the axis bound.

    A lookup can then run during the previous step, and its vectors equal those of a lookup after
    that step bit for bit: rows that have changed since are sent again.

    Args:
      layout: placement of the tables on devices.
      tables: this device's part of the current stored tables.
      requests: result of `Embeddings.exchange_ids`.
      vectors: result of `Embeddings.lookup` in the older tables.
      changed: maps a stored array to the sorted local numbers of the rows of this device that have
        changed; numbers outside of its part are padding.
      room: fraction of each owner's slots that can be sent again, above 0 and up to 1.
      everything: whether all rows may have changed; equal on the devices that share the tables.

    Returns:
      The vectors; and for each stored array () int32, the number of rows that this device has sent,
      also to itself, to be summed over devices. These are the changed rows; or all requested ones
      with `everything`, or if there was no room for the changed rows.

    Communication: one all-reduce of 4 bytes; then, in a `lax.cond`, two all-to-alls, of numbers and
      rows, `room` times the slots each; or one of all slots, with `everything` or if some device
      has no room.
    """
    hits = {name: _is_among(rows, changed.get(name)) for name, rows in requests.asked.items()}
    rooms = {n: max(1, math.ceil(room * rows.shape[1])) for n, rows in requests.asked.items()}
    too_many = jnp.array(False)
    for name, hit in hits.items():
        too_many |= jnp.any(jnp.sum(hit, axis=1, dtype=jnp.int32) > rooms[name])

    def send_all(vectors: Stored) -> tuple[Stored, Counts]:
        del vectors
        every = {n: jnp.ones_like(hit) for n, hit in hits.items()}
        new = send_rows(layout, read_rows(tables, requests.asked))
        return new, _counts(layout, requests, every)

    def send_changed(vectors: Stored) -> tuple[Stored, Counts]:
        places, numbers = {}, {}
        for name, asked in requests.asked.items():
            # The first hits for each device, padded by the number of slots; rows of padding are
            # not read.
            size = asked.shape[1]
            hit = jnp.where(hits[name], jnp.arange(size, dtype=jnp.int32), jnp.int32(size))
            places[name] = jnp.sort(hit, axis=1)[:, : rooms[name]]
            numbers[name] = jnp.take_along_axis(
                asked,
                places[name],
                axis=1,
                mode="fill",
                fill_value=layout.stores[name].local_rows,
            )
        received = swap_blocks(list(places.values()), layout.axis_name)
        rows = swap_blocks(list(read_rows(tables, numbers).values()), layout.axis_name)
        new = {}
        for name, place, block in zip(places, received, rows, strict=True):
            store = layout.stores[name]
            blocks = in_blocks(store, vectors[name])
            device = jnp.arange(len(blocks), dtype=jnp.int32)[:, None]
            new[name] = in_slots(store, blocks.at[device, place].set(block, mode="drop"))
        return new, _counts(layout, requests, hits)

    if everything is True:
        return send_all(vectors)
    flag = too_many.astype(jnp.int32)
    if num_devices(layout.axis_name) > 1:
        flag = lax.pmax(flag, layout.axis_name)
    fall_back = flag > 0
    if everything is not False:
        fall_back |= everything
    axes = axis_names(layout.axis_name or ())
    return run_if(fall_back, send_all, send_changed, vectors, axes=axes)


def _is_among(requested: jax.Array, changed: jax.Array | None) -> jax.Array:
    """Return a mask of requested rows that are in the sorted `changed`; padding may match, too."""
    if changed is None or changed.size == 0:
        return jnp.zeros(requested.shape, bool)
    place = jnp.minimum(jnp.searchsorted(changed, requested), changed.size - 1)
    return changed[place] == requested


def _counts(layout: TableLayout, requests: Requests, hits: Mapping[str, jax.Array]) -> Counts:
    """Return for each stored array how many requested rows are hits that this device sends."""
    counts = {}
    for name, hit in hits.items():
        is_sent = hit & (requests.asked[name] < layout.stores[name].local_rows)
        if layout.is_split(name) and layout.axis_name is not None:
            # All devices receive all requests, and each sends some columns: count one requester.
            is_sent = lax.dynamic_index_in_dim(is_sent, lax.axis_index(layout.axis_name))
        counts[name] = jnp.sum(is_sent, dtype=jnp.int32)
    return counts
