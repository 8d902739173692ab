"""What devices exchange: requests for rows, in a fixed number of slots per owner, and the rows."""

import dataclasses
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


def gather_blocks(blocks: Sequence[jax.Array], axis_name: str | None) -> list[jax.Array]:
    """Return the blocks of every device on all devices, typed as equal on them.

    Args:
      blocks: arrays (k,) of one dtype.
      axis_name: axis of the devices; None: there is only one device.

    Returns:
      Arrays (devices, k).

    Communication: one all-gather of all blocks over `axis_name`; none on one device.
    """
    if not blocks or axis_name is None:
        return [block[None] for block in blocks]
    flat = gather_slices(jnp.concatenate(blocks)[None], axis_name)
    return list(lax.split(flat, [block.size for block in blocks], axis=1))


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
    num_ids = {
        name: sum(b.ids.size for b in by_feature.values()) for name, by_feature in bags.items()
    }
    plan = slot_plan(layout, num_ids, capacity)
    stores = {name: layout.stores[name] for name in plan.width}
    requested = {
        name: jnp.full(store.num_senders * plan.width[name], store.local_rows, jnp.int32)
        for name, store in stores.items()
    }
    slots, weights, counts = {}, {}, {}
    for name, by_feature in bags.items():
        ids, place = [jnp.reshape(b.ids, -1) for b in by_feature.values()], layout.places[name]
        numbered = _number_ids(ids, place, plan, name)
        requested[place.store] = (
            requested[place.store].at[numbered.slot_of_row].set(numbered.row, mode="drop")
        )
        flat = lax.split(numbered.slots, [part.size for part in ids])
        for (feature, b), x in zip(by_feature.items(), flat, strict=True):
            slots[feature] = x.reshape(b.ids.shape)
            if b.weights is not None:
                weights[feature] = jnp.asarray(b.weights)
        counts |= {f"{PREFIX}{name}/{what}": x[None] for what, x in numbered.counts.items()}
    blocks = {n: requested[n].reshape(stores[n].num_senders, -1) for n in plan.width}
    split = [name for name in blocks if layout.is_split(name)]
    sent = [name for name in blocks if name not in split]
    received = swap_blocks([blocks[name] for name in sent], layout.axis_name)
    gathered = gather_blocks([blocks[name][0] for name in split], layout.axis_name)
    by_store = dict(zip([*sent, *split], [*received, *gathered], strict=True))
    return Requests(slots, weights, {name: by_store[name] for name in plan.width}, counts)


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """The slots of tables and stored arrays; static.

    Attributes:
      capacity: maps a table to its number of slots per owner.
      first: maps a table to the index of its first slot among those of the stored array.
      width: maps a stored array to its number of slots per owner.
    """

    capacity: Mapping[str, int]
    first: Mapping[str, int]
    width: Mapping[str, int]


def slot_plan(layout: TableLayout, num_ids: Mapping[str, int], capacity: Capacity) -> SlotPlan:
    """Return the slots for a number of ids per table that a device looks up.

    Args:
      layout: placement of the tables on devices.
      num_ids: maps each table that is looked up to the number of ids on a device.
      capacity: maps a table to its maximum number of slots per owner; None: as many as there can
        be distinct rows.
    """
    slots, first, width = {}, {}, {}
    used: dict[tuple[str, int], int] = {}
    for name, count in num_ids.items():
        place = layout.places[name]
        num_rows = max(1, min(count, place.rows_per_owner))
        limit = capacity[name]
        slots[name] = num_rows if limit is None else min(limit, num_rows)
        # Tables on one owner follow each other in its slots; each owner's slots begin at 0.
        shared = (place.store, place.first_owner)
        first[name] = used.get(shared, 0)
        used[shared] = first[name] + slots[name]
        width[place.store] = max(width.get(place.store, 0), used[shared])
    return SlotPlan(slots, first, width)


class Numbered(NamedTuple):
    """The slots of the ids of one table."""

    slots: jax.Array  # (k,) int32, as `Requests.slots`
    slot_of_row: jax.Array  # (n,) int32, slot of each entry of `row`; NOWHERE: not sent
    row: jax.Array  # (n,) int32, local row number at the owner
    counts: dict[str, jax.Array]  # () int32 for each of `COUNTS`


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


def _number_ids(
    ids: Sequence[jax.Array], place: TablePlace, plan: SlotPlan, table: str
) -> Numbered:
    """Assign slots to all ids of one table; equal ids share a slot.

    Args:
      ids: flat integer arrays of any dtype, which are concatenated; negative numbers are padding.
      place: placement of the table in its stored array.
      plan: available slots.
      table: name of the table.
    """
    pairs = [rows_of_ids(part, place.num_rows) for part in ids]
    rows, padding = (jnp.concatenate(parts) for parts in zip(*pairs, strict=True))
    total, capacity, width = place.num_positions, plan.capacity[table], plan.width[place.store]
    size = max(1, min(rows.size, total))
    # Positions are sorted by owner. `starts`: index of the first distinct position of each owner.
    positions, places, count = distinct_rows(place.positions(rows), total, size)
    begins = jnp.arange(place.owners, dtype=jnp.int32) * jnp.int32(place.rows_per_owner)
    starts = jnp.searchsorted(positions, begins).astype(jnp.int32)
    owner = jnp.minimum(positions // place.rows_per_owner, place.owners - 1)
    in_owner = jnp.arange(size, dtype=jnp.int32) - starts[owner]
    fits = (in_owner < capacity) & (positions < total)
    slot = place.first_owner * width + plan.first[table] + owner * width + in_owner
    slots = (
        jnp.where(fits, slot, jnp.int32(DROPPED)).at[places].get(mode="fill", fill_value=DROPPED)
    )
    per_owner = jnp.diff(starts, append=jnp.reshape(count, 1))
    counts = (
        count,
        jnp.sum(jnp.maximum(per_owner - capacity, 0), dtype=jnp.int32),
        jnp.sum(~padding & (rows == place.num_rows), dtype=jnp.int32),
    )
    return Numbered(
        slots=_in_their_slots(rows, padding, slots, place.num_rows),
        slot_of_row=jnp.where(fits, slot, jnp.int32(NOWHERE)),
        row=positions - owner * place.rows_per_owner + place.first_row,
        counts=dict(zip(COUNTS, counts, strict=True)),
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
        places = {name: _first_hits(hit, rooms[name]) for name, hit in hits.items()}
        # Rows without a place are not read: `_at` gives padding there.
        numbers = {
            name: _at(rows, places[name], layout.stores[name].local_rows)
            for name, rows in requests.asked.items()
        }
        received = swap_blocks(list(places.values()), layout.axis_name)
        rows = swap_blocks(list(read_rows(tables, numbers).values()), layout.axis_name)
        new = {
            name: _with_rows(layout, name, vectors[name], place, block)
            for name, place, block in zip(places, received, rows, strict=True)
        }
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


def _first_hits(hit: jax.Array, room: int) -> jax.Array:
    """Return the indices of the first hits in each row, (devices, room) int32; its size pads."""
    size = hit.shape[1]
    numbers = jnp.where(hit, jnp.arange(size, dtype=jnp.int32), jnp.int32(size))
    return jnp.sort(numbers, axis=1)[:, :room]


def _with_rows(
    layout: TableLayout, name: str, vectors: jax.Array, places: jax.Array, rows: jax.Array
) -> jax.Array:
    """Return `vectors` with the rows that each device has sent, at the places that it has sent."""
    store = layout.stores[name]
    blocks = in_blocks(store, vectors)
    device = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return in_slots(store, blocks.at[device, places].set(rows, mode="drop"))


def _at(rows: jax.Array, places: jax.Array, padding: int) -> jax.Array:
    """Return the entries of each row of `rows` at its places; padding for places past the end."""
    return jnp.take_along_axis(rows, places, axis=1, mode="fill", fill_value=padding)


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
