"""Stored arrays: where the rows of every table lie in them, their first values, and back."""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import vary_over, varying_axes
from ._table import MOST_ROWS, OWNER, Table, Tables

PARTS = 64
"""Rows are dealt out to so many parts, so that 1, 2, 4, ... 64 devices store one array alike."""


def part_of_residue(parts: int) -> np.ndarray:
    """The part of the rows r, r + parts, r + 2 * parts, ... for each r < parts.

    Devices hold neighbouring parts, and neighbouring rows shall lie on different devices, for every
    number of them: so r is read backwards, in binary (of `parts` the odd factor comes first).

    Args:
      parts: `PARTS` times an odd number.
    """
    odd, bits = parts // PARTS, PARTS.bit_length() - 1
    residues = np.arange(parts)
    rest, reverse = residues // odd, np.zeros(parts, np.int64)
    for bit in range(bits):
        reverse |= (rest >> bit & 1) << (bits - 1 - bit)
    return (residues % odd * PARTS + reverse).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Store:
    """A stored array; static.

    Attributes:
      name: of the table, or made of width and dtype where several share it.
      kind: as `Table.shard`.
      num_rows: of the whole array.
      dim: of the whole array.
      dtype: of the whole array.
      num_shards: devices that hold it.
    """

    name: str
    kind: Literal["row", "column", "table"]
    num_rows: int
    dim: int
    dtype: jnp.dtype
    num_shards: int

    @property
    def local_rows(self) -> int:
        """Rows that a device holds."""
        return self.num_rows if self.kind == "column" else self.num_rows // self.num_shards

    @property
    def local_dim(self) -> int:
        """Columns that a device holds."""
        return self.dim // self.num_shards if self.kind == "column" else self.dim

    @property
    def num_senders(self) -> int:
        """Devices that send a requester rows of their own: all, or where columns are split none."""
        return 1 if self.kind == "column" else self.num_shards


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """Where one table lies in its stored array; static.

    Attributes:
      store: name of the array.
      num_rows: rows of the table; ids are below it.
      owners: devices that its rows are dealt out to, in `parts` parts; 1: one holds all of them.
      parts: a multiple of `owners`.
      rows_per_owner: rows that an owner holds, padding included.
      first_owner: number of the (first) owner.
      first_row: where in the owner's block the table begins.
    """

    store: str
    num_rows: int
    owners: int
    parts: int
    rows_per_owner: int
    first_owner: int
    first_row: int

    @property
    def num_positions(self) -> int:
        """Positions of all owners; this number itself stands for no row."""
        return self.owners * self.rows_per_owner

    def first_in(self, store: Store) -> int:
        """Return the row of the whole stored array at which the table begins."""
        return self.first_owner * store.local_rows + self.first_row

    def positions(self, ids: jax.Array) -> jax.Array:
        """The number of each row as it lies on the owners, one behind the other.

        Args:
          ids: int32, of rows; `num_rows` stands for no row.
        """
        positions = ids
        if self.parts > 1:
            part = jnp.asarray(part_of_residue(self.parts))[ids % self.parts]
            positions = part * (self.num_positions // self.parts) + ids // self.parts
        return jnp.where(ids < self.num_rows, positions, jnp.int32(self.num_positions))

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Which of the owners holds each row, for ids of the host that are in the table."""
        if self.owners == 1:
            return np.zeros(ids.shape, np.int64)
        return part_of_residue(self.parts)[ids % self.parts] // (self.parts // self.owners)


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """All stored arrays, where the tables lie in them, and the axis of the devices; static."""

    stores: Mapping[str, Store]
    places: Mapping[str, TablePlace]
    axis_name: str | None

    def is_split(self, store: str) -> bool:
        """Whether the devices share the columns of a stored array, so that all have its rows."""
        return self.stores[store].kind == "column"


def layout_of(tables: Tables, num_shards: int, axis_name: str | None = None) -> TableLayout:
    """Return where the tables lie on so many devices along an axis.

    Raises:
      ValueError: columns that the devices cannot share evenly; more rows than int32 can number; two
        arrays of one name.
    """
    stores: dict[str, Store] = {}
    places: dict[str, TablePlace] = {}
    groups: dict[str, dict[str, Table]] = {}
    for name, table in tables.items():
        if table.shard == "table":
            # Arrays of one shape hold the tables in another order on another number of devices, and
            # a checkpoint of these must not be taken for one of those.
            group = f"tables_{jnp.dtype(table.dtype).name}_{table.dim}_over_{num_shards}"
            groups.setdefault(group, {})[name] = table
            continue
        if table.shard == "column" and table.dim % num_shards:
            raise ValueError(
                f'{OWNER}: table {name!r}: with shard="column" the number of devices '
                f"({num_shards}) must divide `dim`, got {table.dim}."
            )
        is_dealt = table.shard == "row"
        owners, parts = (num_shards, math.lcm(PARTS, num_shards)) if is_dealt else (1, 1)
        rows = parts * -(-table.num_rows // parts)
        stores[name] = _store(name, table, rows, num_shards)
        places[name] = TablePlace(name, table.num_rows, owners, parts, rows // owners, 0, 0)
    for name, members in groups.items():
        if name in stores:
            raise ValueError(f"{OWNER}: {name!r} is the name of an array of several tables.")
        first = next(iter(members.values()))
        own, rows = _spread(name, members, num_shards)
        stores[name] = _store(name, first, rows * num_shards, num_shards)
        places |= own
    for store in stores.values():
        if store.num_rows > MOST_ROWS:
            raise ValueError(
                f"{OWNER}: array {store.name!r} has {store.num_rows} rows with padding, and can "
                f"have at most {MOST_ROWS}."
            )
    return TableLayout(stores, places, axis_name)


def _store(name: str, table: Table, num_rows: int, num_shards: int) -> Store:
    return Store(name, table.shard, num_rows, table.dim, jnp.dtype(table.dtype), num_shards)


def _spread(store: str, tables: Tables, num_shards: int) -> tuple[dict[str, TablePlace], int]:
    """The device of each table, and the rows that the fullest one holds.

    Tables of one array have one width, so rows are bytes. The largest first, each to the device
    that has the fewest rows.
    """
    taken = [0] * num_shards
    places = {}
    for name in sorted(tables, key=lambda n: (-tables[n].num_rows, n)):
        rows = tables[name].num_rows
        owner = taken.index(min(taken))
        places[name] = TablePlace(store, rows, 1, 1, rows, owner, taken[owner])
        taken[owner] += rows
    return places, max(taken)


def read_tables(layout: TableLayout, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The tables (num_rows, dim) by name out of whole stored arrays."""
    found, stored = {}, whole_on_each(stored)
    for name, place in layout.places.items():
        store = layout.stores[place.store]
        whole = stored[place.store]
        if store.kind == "row":
            blocks = whole.reshape(place.parts, -1, store.dim)[part_of_residue(place.parts)]
            whole = blocks.transpose(1, 0, 2).reshape(-1, store.dim)
        first = place.first_in(store)
        found[name] = whole[first : first + place.num_rows]
    return found


def write_tables(layout: TableLayout, tables: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Whole stored arrays that hold the tables; undoes `read_tables`. Padding is 0.

    Raises:
      ValueError: a table that is missing, unknown or of another shape.
    """
    places = layout.places
    wanted = {name: (p.num_rows, layout.stores[p.store].dim) for name, p in places.items()}
    given = {name: tuple(jnp.shape(table)) for name, table in tables.items()}
    tables = whole_on_each(tables)
    if wanted != given:
        raise ValueError(f"{OWNER}: `write` needs tables of the shapes {wanted}, got {given}.")
    stored = {n: jnp.zeros((s.num_rows, s.dim), s.dtype) for n, s in layout.stores.items()}
    for name, place in places.items():
        store = layout.stores[place.store]
        table = jnp.asarray(tables[name]).astype(store.dtype)
        if store.kind == "row":
            padded = jnp.pad(table, ((0, store.num_rows - place.num_rows), (0, 0)))
            blocks = padded.reshape(-1, place.parts, store.dim).transpose(1, 0, 2)
            blocks = blocks[np.argsort(part_of_residue(place.parts))]
            stored[name] = blocks.reshape(store.num_rows, store.dim)
        else:
            first = place.first_in(store)
            stored[place.store] = stored[place.store].at[first : first + place.num_rows].set(table)
    return stored


def whole_on_each(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays whose layout over Explicit axes is part of their type, with all of them everywhere.

    Others are left to the compiler, which knows how to index what is split.
    """

    def whole(x: Any) -> Any:
        sharding = jax.typeof(x).sharding
        is_whole = all(entry is None for entry in sharding.spec)
        return x if is_whole else jax.sharding.reshard(x, NamedSharding(sharding.mesh, P()))

    return {name: whole(x) for name, x in arrays.items()}


def table_key(key: Any, name: str) -> Any:
    """The key of one table, which does not change with the other tables."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _first_rows(table: Table, key: Any, parts: int, residue: jax.Array) -> jax.Array:
    """Rows `residue`, `residue + parts`, ... of a table, and zeros up to the size of all parts."""
    per_part = -(-table.num_rows // parts)
    shape = (per_part, table.dim)
    own = jax.random.fold_in(key, residue)
    if table.init is None:
        bound = table.num_rows**-0.5
        values = jax.random.uniform(own, shape, jnp.float32, -bound, bound)
    else:
        values = table.init(own, shape, table.dtype)
        if jnp.shape(values) != shape:
            raise ValueError(
                f"{OWNER}: `init` of a table of {table.num_rows} rows must return an array of the "
                f"shape that it is given, here {shape}, got {jnp.shape(values)}."
            )
    numbers = residue + parts * jnp.arange(per_part, dtype=jnp.int32)
    return jnp.where((numbers < table.num_rows)[:, None], values, 0).astype(table.dtype)


def first_values(tables: Tables, layout: TableLayout, key: Any) -> dict[str, jax.Array]:
    """First values of all stored arrays, whole.

    Communication: none.
    """
    made = {}
    for name, store in layout.stores.items():
        devices = range(store.num_shards)
        blocks = [_first_block(tables, layout, name, key, jnp.int32(device)) for device in devices]
        made[name] = jnp.concatenate(blocks, axis=1 if store.kind == "column" else 0)
    return made


def first_local_values(tables: Tables, layout: TableLayout, key: Any) -> dict[str, jax.Array]:
    """What this device holds at first of each stored array; it makes nothing else of them.

    Communication: none.
    """
    if layout.axis_name is None:
        return first_values(tables, layout, key)
    device = lax.axis_index(layout.axis_name)
    made = {name: _first_block(tables, layout, name, key, device) for name in layout.stores}
    return vary_over(made, (layout.axis_name,))


def _first_block(
    tables: Tables, layout: TableLayout, store_name: str, key: Any, device: jax.Array
) -> jax.Array:
    """What a device holds of a stored array at first."""
    store = layout.stores[store_name]
    if store.kind == "table":
        return _own_tables(tables, layout, store, key, device)
    table, place = tables[store_name], layout.places[store_name]
    key = table_key(key, store_name)
    if store.kind == "column":
        return _own_columns(table, key, store.local_dim, device)
    own_parts = place.parts // place.owners
    numbers = device * own_parts + jnp.arange(own_parts, dtype=jnp.int32)
    residues = jnp.asarray(np.argsort(part_of_residue(place.parts)).astype(np.int32))[numbers]
    blocks = lax.map(lambda residue: _first_rows(table, key, place.parts, residue), residues)
    return blocks.reshape(store.local_rows, store.dim)


def _own_columns(table: Table, key: Any, num_columns: int, device: jax.Array) -> jax.Array:
    """All rows of a table, and of these the columns of a device; never all columns of all rows."""

    def of_residue(residue: jax.Array) -> jax.Array:
        rows = _first_rows(table, key, PARTS, residue)
        return lax.dynamic_slice_in_dim(rows, device * num_columns, num_columns, 1)

    dealt = lax.map(of_residue, jnp.arange(PARTS, dtype=jnp.int32))
    return dealt.transpose(1, 0, 2).reshape(-1, num_columns)[: table.num_rows]


def _own_tables(
    tables: Tables, layout: TableLayout, store: Store, key: Any, device: jax.Array
) -> jax.Array:
    """The tables of a device, one behind the other; it makes no others."""
    block = jnp.zeros((store.local_rows, store.dim), store.dtype)
    block = vary_over(block, varying_axes(device))
    for name, place in layout.places.items():
        if place.store != store.name:
            continue
        table, own = tables[name], table_key(key, name)

        def filled(block: jax.Array, table=table, own=own, place=place) -> jax.Array:
            values = _own_columns(table, own, table.dim, jnp.int32(0))
            axes = varying_axes(block)
            return lax.dynamic_update_slice(block, vary_over(values, axes), (place.first_row, 0))

        block = lax.cond(device == place.first_owner, filled, lambda block: block, block)
    return block
