"""The exchange of requests for rows, in a fixed number of slots per owner, and of the rows."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import gather_slices
from ..gradients.sparse import OUT_OF_RANGE, distinct_rows, pad_invalid
from ..mesh import axis_names, axis_size, max_over
from ..transform import run_if
from ._bags import DROPPED, OUTSIDE, PADDING, Bags
from ._stores import Capacity, Store, TableLayout, TablePlacement

BagsByTable = Mapping[str, Mapping[str, Bags]]
Stored = dict[str, jax.Array]
Counts = dict[str, jax.Array]

PREFIX, COUNTS = "embeddings/", ("asked", "overflow", "invalid")


def all_to_all_blocks(
    blocks: Mapping[str, jax.Array], axis_name: str | None
) -> dict[str, jax.Array]:
    """Send entry d of each block to device d, and return the received entries by sender.

    Args:
      blocks: arrays (devices, *s).
      axis_name: axis of the devices; None: there is only one device.

    Returns:
      Arrays of the same shapes; entry d comes from device d.

    Communication: one all-to-all of all blocks of one dtype over `axis_name`; none on one device.
    """
    if axis_size(axis_name or ()) == 1:
        return dict(blocks)
    return send_by_dtype(
        blocks,
        partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True),
    )


def send_by_dtype(
    blocks: Mapping[str, jax.Array], send: Callable[[jax.Array], jax.Array]
) -> dict[str, jax.Array]:
    """Return what `send` makes of the first dimension of blocks; it is called once per dtype."""
    arrived = {}
    for dtype in sorted({block.dtype for block in blocks.values()}, key=str):
        chosen = {name: block for name, block in blocks.items() if block.dtype == dtype}
        flat = send(jnp.concatenate([x.reshape(len(x), -1) for x in chosen.values()], axis=1))
        parts = lax.split(flat, [x.size // len(x) for x in chosen.values()], axis=1)
        for (name, block), part in zip(chosen.items(), parts, strict=True):
            arrived[name] = part.reshape(-1, *block.shape[1:])
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
    used: Counter[tuple[str, int]] = Counter()
    for name, by_feature in bags.items():
        place, num_ids = layout.places[name], sum(b.ids.size for b in by_feature.values())
        most = max(1, min(num_ids, place.rows_per_owner))
        num_slots[name] = min(capacity[name] or most, most)
        # Tables on one owner follow each other in its slots; each owner's slots begin at 0.
        shared = (place.store, place.first_owner)
        first[name] = used[shared]
        used[shared] += num_slots[name]
        width[place.store] = max(width.get(place.store, 0), used[shared])
    requested = {}
    for store, slots_of_owner in width.items():
        senders, local_rows = layout.stores[store].row_shards, layout.stores[store].local_rows
        requested[store] = jnp.full((senders, slots_of_owner), local_rows, jnp.int32)
    slots, weights, counts = {}, {}, {}
    for name, by_feature in bags.items():
        place = layout.places[name]
        rows = [rows_of_ids(b.ids, place.num_rows).reshape(-1) for b in by_feature.values()]
        requested[place.store], slots_of_ids, numbers = _request_table(
            requested[place.store], jnp.concatenate(rows), place, first[name], num_slots[name]
        )
        flat = lax.split(slots_of_ids, [part.size for part in rows])
        for (feature, b), x in zip(by_feature.items(), flat, strict=True):
            slots[feature] = x.reshape(b.ids.shape)
            if b.weights is not None:
                weights[feature] = jnp.asarray(b.weights)
        counts |= {f"{PREFIX}{name}/{what}": x[None] for what, x in numbers.items()}
    # Every device holds some columns of all rows of a split array, so it receives all requests.
    split = {name: block for name, block in requested.items() if layout.is_split(name)}
    sent = {name: block for name, block in requested.items() if name not in split}
    asked = all_to_all_blocks(sent, layout.axis_name)
    asked |= send_by_dtype(split, partial(gather_slices, local_axes=layout.axis_name or ()))
    return Requests(slots, weights, asked, counts)


def rows_of_ids(ids: jax.Array, num_rows: int) -> jax.Array:
    """Return row numbers as int32: `PADDING` for negative ids, `num_rows` for ids out of range.

    The ids are compared in their own dtype: an unsigned one has no padding, and int8 holds no 256.
    """
    ids = jnp.asarray(ids)
    return jnp.where(ids < 0, jnp.int32(PADDING), pad_invalid(ids, num_rows))


def _mark_missing(rows: jax.Array, slots: jax.Array, num_rows: int) -> jax.Array:
    """Return the slots of ids that are rows of the table, and for others why they have none."""
    return jnp.where(rows == PADDING, rows, jnp.where(rows == num_rows, jnp.int32(OUTSIDE), slots))


def _request_table(
    block: jax.Array, rows: jax.Array, place: TablePlacement, first: int, num_slots: int
) -> tuple[jax.Array, jax.Array, Counts]:
    """Request the distinct rows of one table from their owners.

    Args:
      block: (senders, slots) int32, requests for rows of the stored array by owner.
      rows: (ids,) int32, as `rows_of_ids` returns them.
      place: placement of the table in its stored array.
      first: first slot of the table in those of each of its owners.
      num_slots: number of its slots for each owner.

    Returns:
      The block with the requests of this table; (ids,) int32, the slot of each id, see `Requests`;
      and () int32 for each of `COUNTS`.
    """
    size = max(1, min(rows.size, place.num_positions))
    # Positions are sorted by owner. `starts`: index of the first distinct position of each owner.
    positions, places, count = distinct_rows(place.positions(rows), place.num_positions, size)
    begins = jnp.arange(place.owners, dtype=jnp.int32) * jnp.int32(place.rows_per_owner)
    starts = jnp.searchsorted(positions, begins).astype(jnp.int32)
    owner = jnp.minimum(positions // place.rows_per_owner, place.owners - 1)
    in_owner = jnp.arange(size, dtype=jnp.int32) - starts[owner]
    fits = (in_owner < num_slots) & (positions < place.num_positions)
    sender, slot = place.first_owner + owner, first + in_owner
    row = positions - owner * place.rows_per_owner + place.first_row
    block = block.at[sender, jnp.where(fits, slot, jnp.int32(OUT_OF_RANGE))].set(row, mode="drop")
    slots = jnp.where(fits, sender * block.shape[1] + slot, jnp.int32(DROPPED))
    slots = slots.at[places].get(mode="fill", fill_value=DROPPED)
    overflow = count - jnp.sum(fits, dtype=jnp.int32)
    invalid = jnp.sum(rows == place.num_rows, dtype=jnp.int32)
    counts = dict(zip(COUNTS, (count, overflow, invalid), strict=True))
    return block, _mark_missing(rows, slots, place.num_rows), counts


def rows_as_slots(layout: TableLayout, name: str, ids: jax.Array) -> jax.Array:
    """Return the slots of a table's ids if the vectors are the whole stored array itself."""
    num_rows = layout.places[name].num_rows
    rows = rows_of_ids(ids, num_rows)
    return _mark_missing(rows, layout.stored_rows(name, rows), num_rows)


def blocks_to_slots(store: Store, arrived: jax.Array) -> jax.Array:
    """Return vectors (slots, dim) from the blocks of each sender, (devices, capacity, columns)."""
    grid = arrived.reshape(store.row_shards, store.column_shards, -1, store.local_dim)
    return grid.transpose(0, 2, 1, 3).reshape(-1, store.dim)


def slots_to_blocks(store: Store, vectors: jax.Array) -> jax.Array:
    """Return the block for each device, (devices, capacity, columns), from vectors (slots, dim)."""
    rows, columns = store.row_shards, store.column_shards
    grid = vectors.reshape(rows, -1, columns, store.local_dim).transpose(0, 2, 1, 3)
    return grid.reshape(rows * columns, -1, store.local_dim)


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
    arrived = all_to_all_blocks(rows, layout.axis_name)
    return {name: blocks_to_slots(layout.stores[name], block) for name, block in arrived.items()}


def refresh_vectors(
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
    asked, stores = requests.asked, layout.stores
    hits = {}  # which requested rows are in the sorted `changed`; padding may match, too
    for name, rows in asked.items():
        numbers = changed.get(name, jnp.full(1, OUT_OF_RANGE, jnp.int32))
        place = jnp.minimum(jnp.searchsorted(numbers, rows), numbers.size - 1)
        hits[name] = numbers[place] == rows
    rooms = {name: max(1, math.ceil(room * rows.shape[1])) for name, rows in asked.items()}

    def send_all(vectors: Stored) -> Stored:
        del vectors
        return send_rows(layout, read_rows(tables, asked))

    def send_hits(vectors: Stored) -> Stored:
        places, numbers = {}, {}
        for name, rows in asked.items():
            # The first hits for each device, padded by the number of slots; rows of padding are
            # not read.
            size = rows.shape[1]
            hit = jnp.where(hits[name], jnp.arange(size, dtype=jnp.int32), jnp.int32(size))
            places[name] = jnp.sort(hit, axis=1)[:, : rooms[name]]
            padding = stores[name].local_rows
            numbers[name] = jnp.take_along_axis(
                rows, places[name], axis=1, mode="fill", fill_value=padding
            )
        places = all_to_all_blocks(places, layout.axis_name)
        new = {}
        for name, rows in all_to_all_blocks(read_rows(tables, numbers), layout.axis_name).items():
            blocks = slots_to_blocks(stores[name], vectors[name])
            device = jnp.arange(len(blocks), dtype=jnp.int32)[:, None]
            blocks = blocks.at[device, places[name]].set(rows, mode="drop")
            new[name] = blocks_to_slots(stores[name], blocks)
        return new

    axes, sends_all = axis_names(layout.axis_name or ()), everything
    if everything is not True:
        too_many = [jnp.any(jnp.sum(hit, axis=1) > rooms[name]) for name, hit in hits.items()]
        sends_all |= max_over(jnp.any(jnp.stack(too_many)).astype(jnp.int32), axes) > 0
    vectors = run_if(sends_all, send_all, send_hits, vectors, axes=axes)
    counts = {}
    for name, hit in hits.items():
        is_sent = (hit | sends_all) & (asked[name] < stores[name].local_rows)
        if layout.is_split(name):
            # All devices receive all requests, and each sends some columns: count one requester.
            is_sent = lax.dynamic_index_in_dim(is_sent, lax.axis_index(layout.axis_name))
        counts[name] = jnp.sum(is_sent, dtype=jnp.int32)
    return vectors, counts
