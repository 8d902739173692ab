"""Which rows a device asks for, in a fixed number of slots per owner, and how it tells them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..collectives import gather_slices
from ..gradients.sparse import NOWHERE, distinct_rows, row_numbers
from ..mesh import axis_size, settle
from ._bags import Bags
from ._stores import Store, TableLayout, TablePlace
from ._table import Capacity

BagsByTable = Mapping[str, Mapping[str, Bags]]

# In the place of a slot: why an id has none.
PADDING, DROPPED, OUTSIDE = -1, -2, -3


def num_devices(axis_name: str | None) -> int:
    """Devices along the axis; 1 where there is none."""
    return 1 if axis_name is None else axis_size(axis_name)


def swap_blocks(blocks: Sequence[jax.Array], axis_name: str | None) -> list[jax.Array]:
    """Sends entry d of each block to device d: what arrives stands where its sender's number is.

    Args:
      blocks: (devices, *s) each.
      axis_name: axis of the devices; None: there is one.

    Returns:
      Arrays of the same shapes.

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
    """Every device's blocks on all of them, typed as equal there.

    Args:
      blocks: (k,) each, of one dtype.
      axis_name: axis of the devices; None: there is one.

    Returns:
      Arrays (devices, k).

    Communication: one all-gather of all blocks over `axis_name`; none on one device.
    """
    if not blocks or axis_name is None:
        return [block[None] for block in blocks]
    if axis_size(axis_name) == 1:
        return [settle(block, axis_name)[None] for block in blocks]
    flat = gather_slices(jnp.concatenate(blocks)[None], axis_name, like=jnp.zeros([]))
    return list(lax.split(flat, [block.size for block in blocks], axis=1))


class Requests(NamedTuple):
    """What `Embeddings.exchange_ids` returns: which rows this device uses, and which it sends.

    Attributes:
      slots: by feature, of the shape of its ids, int32: where in its array's vectors the vector of
        each id is; below 0 it has none: padding, no place within the capacity, out of range.
      weights: by feature that has them, of the shape of its ids.
      asked: by stored array, (devices, capacity) int32: the rows of this device that each device
        asked for, as numbered here; padding is the number of rows.
      asked_for: by table, (1,) int32: distinct rows that this device needs of it.
      overflow: by table, (1,) int32: how many of these found no slot.
      invalid: by table, (1,) int32: ids of this device that are not in the table.
    """

    slots: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    asked: dict[str, jax.Array]
    asked_for: dict[str, jax.Array]
    overflow: dict[str, jax.Array]
    invalid: dict[str, jax.Array]


def ask_for_rows(layout: TableLayout, bags: BagsByTable, capacity: Capacity) -> Requests:
    """Numbers the ids of a device and tells the owners of their rows; see `exchange_ids`."""
    num_ids = {name: sum(b.ids.size for b in own.values()) for name, own in bags.items()}
    plan = slot_plan(layout, num_ids, capacity)
    numbered, slots = {}, {}
    for name, own in bags.items():
        ids = [jnp.reshape(b.ids, -1) for b in own.values()]
        numbered[name] = number_ids(ids, layout.places[name], plan, name)
        flat = lax.split(numbered[name].slots, [part.size for part in ids])
        slots |= {f: x.reshape(b.ids.shape) for (f, b), x in zip(own.items(), flat, strict=True)}
    asking = {}
    for store, width in plan.width.items():
        members = [one for name, one in numbered.items() if layout.places[name].store == store]
        asking[store] = rows_to_ask(layout.stores[store], width, members)
    weights = {f: b.weights for own in bags.values() for f, b in own.items()}
    return Requests(
        slots=slots,
        weights={f: jnp.asarray(w) for f, w in weights.items() if w is not None},
        asked=_tell_owners(layout, asking),
        asked_for={name: one.asked_for[None] for name, one in numbered.items()},
        overflow={name: one.overflow[None] for name, one in numbered.items()},
        invalid={name: one.invalid[None] for name, one in numbered.items()},
    )


def _tell_owners(layout: TableLayout, asking: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What each device asked this one for. Rows whose columns are split are asked of all."""
    split = [name for name in asking if layout.is_split(name)]
    sent = [name for name in asking if name not in split]
    told = swap_blocks([asking[name] for name in sent], layout.axis_name)
    everywhere = gather_blocks([asking[name][0] for name in split], layout.axis_name)
    known = dict(zip([*sent, *split], [*told, *everywhere], strict=True))
    return {name: known[name] for name in asking}


def specs_of_requests(layout: TableLayout, bags: BagsByTable) -> PyTree:
    """A `PartitionSpec` for every array of `ask_for_rows`."""
    split = P(layout.axis_name)
    found = {f: b for own in bags.values() for f, b in own.items()}
    stores = {layout.places[name].store for name in bags}
    each = dict.fromkeys(bags, split)
    weighted = [feature for feature, b in found.items() if b.weights is not None]
    asked = {store: P() if layout.is_split(store) else split for store in stores}
    slots, weights = dict.fromkeys(found, split), dict.fromkeys(weighted, split)
    return Requests._make((slots, weights, asked, each, each, each))


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """How many slots there are for what; static.

    Attributes:
      capacity: by table, slots of each owner.
      first: by table, the first of them among those of the stored array.
      width: by stored array, slots of each owner.
    """

    capacity: Mapping[str, int]
    first: Mapping[str, int]
    width: Mapping[str, int]


def slot_plan(layout: TableLayout, num_ids: Mapping[str, int], capacity: Capacity) -> SlotPlan:
    """Slots for tables of which so many ids are looked up on a device.

    Args:
      layout: where the tables lie.
      num_ids: by table that is looked up.
      capacity: most slots per owner, by table; None: as many as there can be distinct rows.
    """
    own, first, width = {}, {}, {}
    used: dict[tuple[str, int], int] = {}
    for name, count in num_ids.items():
        place = layout.places[name]
        most = max(1, min(count, place.rows_per_owner))
        limit = capacity[name]
        own[name] = most if limit is None else min(limit, most)
        # Tables on one owner share its slots; those on others begin at 0, too.
        shared = (place.store, place.first_owner)
        first[name] = used.get(shared, 0)
        used[shared] = first[name] + own[name]
        width[place.store] = max(width.get(place.store, 0), used[shared])
    return SlotPlan(own, first, width)


class Numbered(NamedTuple):
    """The ids of one table, in slots."""

    slots: jax.Array  # (k,) int32, as `Requests.slots`
    slot_of_row: jax.Array  # (k,) int32, of each entry of `row`; NOWHERE: not sent
    row: jax.Array  # (k,) int32, number at the owner
    asked_for: jax.Array  # () int32
    overflow: jax.Array  # () int32
    invalid: jax.Array  # () int32


def rows_of_ids(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows as int32, `num_rows` where there is none; which ids are padding, and which are rows.

    In the ids' own type: -1 is padding where a type has it, and 256 need not fit.
    """
    ids = jnp.asarray(ids)
    padding, rows = ids < 0, row_numbers(ids)
    within = ~padding & (rows >= 0) & (rows < num_rows)
    return jnp.where(within, rows, jnp.int32(num_rows)), padding, within


def _no_slot(padding: jax.Array) -> jax.Array:
    return jnp.where(padding, jnp.int32(PADDING), jnp.int32(OUTSIDE))


def number_ids(ids: Sequence[jax.Array], place: TablePlace, plan: SlotPlan, table: str) -> Numbered:
    """Slots for all ids of one table, of which equal ones share one.

    Args:
      ids: flat arrays of integers of any type, joined here; negative numbers are padding.
      place: where the table lies.
      plan: the slots that there are.
      table: its name.
    """
    found = [rows_of_ids(part, place.num_rows) for part in ids]
    rows, padding, within = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    positions = place.positions(rows)
    total, count = place.num_positions, positions.shape[0]
    order, places, distinct = distinct_rows(positions, total)
    ordered = positions[order]
    kept = jnp.full(count, total, jnp.int32).at[places].set(ordered, mode="drop")
    # Positions are sorted by owner; where those of each begin among the distinct ones:
    begins = jnp.arange(place.owners, dtype=jnp.int32) * jnp.int32(place.rows_per_owner)
    starts = jnp.searchsorted(kept, begins).astype(jnp.int32)
    owner = jnp.minimum(ordered // place.rows_per_owner, place.owners - 1)
    in_owner = places - starts[owner]
    fits = in_owner < plan.capacity[table]  # that of padding is far beyond it
    first = place.first_owner * plan.width[place.store] + plan.first[table]
    slot = first + owner * plan.width[place.store] + in_owner
    slots = jnp.full(count, DROPPED, jnp.int32).at[order].set(jnp.where(fits, slot, DROPPED))
    slots = jnp.where(within, slots, _no_slot(padding))
    per_owner = jnp.diff(starts, append=jnp.reshape(distinct, 1))
    overflow = jnp.sum(jnp.maximum(per_owner - plan.capacity[table], 0), dtype=jnp.int32)
    return Numbered(
        slots=slots,
        slot_of_row=jnp.where(fits, slot, jnp.int32(NOWHERE)),
        row=ordered - owner * place.rows_per_owner + place.first_row,
        asked_for=distinct,
        overflow=overflow,
        invalid=jnp.sum(~padding & ~within, dtype=jnp.int32),
    )


def rows_to_ask(store: Store, width: int, tables: Sequence[Numbered]) -> jax.Array:
    """(owners, width) int32: what to ask each owner of a stored array for."""
    asked = jnp.full(store.num_senders * width, store.local_rows, jnp.int32)
    for table in tables:
        asked = asked.at[table.slot_of_row].set(table.row, mode="drop")
    return asked.reshape(store.num_senders, width)


def rows_as_slots(place: TablePlace, store: Store, ids: jax.Array) -> jax.Array:
    """Slots of ids where the vectors are the whole stored array itself."""
    rows, padding, within = rows_of_ids(ids, place.num_rows)
    return jnp.where(within, place.positions(rows) + place.first_in(store), _no_slot(padding))


def in_slots(store: Store, arrived: jax.Array) -> jax.Array:
    """(slots, dim) out of what each device has sent, (devices, capacity, own columns)."""
    if store.kind == "column":
        arrived = arrived.transpose(1, 0, 2)
    return arrived.reshape(-1, store.dim)


def in_blocks(store: Store, vectors: jax.Array) -> jax.Array:
    """What each device gets, (devices, capacity, own columns), out of (slots, dim)."""
    if store.kind == "column":
        return vectors.reshape(-1, store.num_shards, store.local_dim).transpose(1, 0, 2)
    return vectors.reshape(store.num_shards, -1, store.dim)
