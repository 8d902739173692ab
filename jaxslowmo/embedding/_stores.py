"""Stored arrays: the placement of table rows in them, initial values, and the way back."""

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

from ._table import MOST_ROWS, OWNER, Table, Tables

PARTS = 64
"""The number of parts of a table's rows, so that 1, 2, 4, ... 64 devices store equal arrays."""


def part_of_residue(parts: int) -> np.ndarray:
    """Return the part that holds the rows r, r + parts, r + 2 * parts, ..., for each r < parts.

    A device holds neighbouring parts, but neighbouring rows must be on different devices for every
    number of devices. So the part is r with its bits reversed (after the odd factor of `parts`).

    Args:
      parts: number of parts: 1, or `PARTS` times an odd number.
    """
    if parts == 1:
        return np.zeros(1, np.int32)
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
      name: name of the table, or of the group of tables that share the array.
      kind: how devices share the array, as `Table.shard`.
      num_rows: number of rows of the whole array.
      dim: number of columns of the whole array.
      dtype: dtype of the array.
      num_shards: number of devices that share the array.
      optimizer: optimizer of its rows; None in a layout without optimizers.
    """

    name: str
    kind: Literal["row", "column", "table"]
    num_rows: int
    dim: int
    dtype: jnp.dtype
    num_shards: int
    optimizer: Any

    @property
    def local_rows(self) -> int:
        """The number of rows that a device holds."""
        return self.num_rows if self.kind == "column" else self.num_rows // self.num_shards

    @property
    def local_dim(self) -> int:
        """The number of columns that a device holds."""
        return self.dim // self.num_shards if self.kind == "column" else self.dim

    @property
    def num_senders(self) -> int:
        """The number of devices with different rows; 1 if columns are split."""
        return 1 if self.kind == "column" else self.num_shards


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """The placement of one table in its stored array; static.

    Attributes:
      store: name of the stored array.
      num_rows: number of rows of the table; ids are below it.
      owners: number of devices over which the rows are spread; 1: each holder has all rows.
      parts: number of parts of the rows, a multiple of `owners`.
      rows_per_owner: number of rows that an owner holds, including padding.
      first_owner: index of the first owner among the devices.
      first_row: row of the owner's block at which the table begins.
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
        """The number of positions of all owners; as a position, it means no row."""
        return self.owners * self.rows_per_owner

    def first_in(self, store: Store) -> int:
        """Return the row of the whole stored array at which the table begins."""
        return self.first_owner * store.local_rows + self.first_row

    def positions(self, ids: jax.Array) -> jax.Array:
        """Return the position of each row when the blocks of all owners are concatenated.

        Args:
          ids: int32 row numbers of the table; `num_rows` means no row.
        """
        part = jnp.asarray(part_of_residue(self.parts))[ids % self.parts]
        positions = part * (self.num_positions // self.parts) + ids // self.parts
        return jnp.where(ids < self.num_rows, positions, jnp.int32(self.num_positions))

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the index of the owner of each row, for NumPy ids that are in the table."""
        return part_of_residue(self.parts)[ids % self.parts] // (self.parts // self.owners)


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """The stored arrays, the placement of tables in them, and the axis of the devices; static."""

    stores: Mapping[str, Store]
    places: Mapping[str, TablePlace]
    axis_name: str | None

    def is_split(self, store: str) -> bool:
        """Return whether columns of a stored array are split, so that each device has all rows."""
        return self.stores[store].kind == "column"


def layout_of(tables: Tables, num_shards: int, axis_name: str | None = None) -> TableLayout:
    """Return the placement of the tables on a number of devices along an axis.

    Raises:
      ValueError: columns that the devices cannot share evenly; more rows than int32 can number.
    """
    stores: dict[str, Store] = {}
    places: dict[str, TablePlace] = {}
    for store, members in _groups(tables, num_shards).items():
        first = next(iter(members.values()))
        if first.shard == "table":
            own, rows = _spread(store, members, num_shards)
        else:
            (name,) = members
            is_dealt = first.shard == "row"
            owners, parts = (num_shards, math.lcm(PARTS, num_shards)) if is_dealt else (1, 1)
            rows = parts * -(-first.num_rows // parts)
            own = {name: TablePlace(store, first.num_rows, owners, parts, rows // owners, 0, 0)}
        if first.shard == "column" and first.dim % num_shards:
            raise ValueError(
                f'{OWNER}: table {store!r}: with shard="column" the number of devices '
                f"({num_shards}) must divide `dim`, got {first.dim}."
            )
        if rows > MOST_ROWS:
            raise ValueError(
                f"{OWNER}: array {store!r} has {rows} rows with padding, and can have at most "
                f"{MOST_ROWS}."
            )
        dtype = jnp.dtype(first.dtype)
        stores[store] = Store(
            store, first.shard, rows, first.dim, dtype, num_shards, first.optimizer
        )
        places |= own
    return TableLayout(stores, places, axis_name)


def _groups(tables: Tables, num_shards: int) -> dict[str, dict[str, Table]]:
    """Return the tables of each stored array, by its name.

    Tables with `shard="table"` share one if they have one width, dtype and optimizer. The number of
    devices is in its name, and the tables are where a width and dtype have several optimizers: both
    change the order of the tables, not always the shape, and a checkpoint must not be restored in
    another order.
    """
    # Lists, since a schedule may have no hash.
    by_kind: dict[tuple[str, int], list[dict[str, Table]]] = {}
    for name, table in tables.items():
        if table.shard == "table":
            alike = by_kind.setdefault((jnp.dtype(table.dtype).name, table.dim), [])
            for members in alike:
                if next(iter(members.values())).optimizer == table.optimizer:
                    members[name] = table
                    break
            else:
                alike.append({name: table})
    groups = {name: {name: table} for name, table in tables.items() if table.shard != "table"}
    for (dtype, dim), alike in by_kind.items():
        for members in alike:
            names = f"_{zlib.crc32(repr(sorted(members)).encode()):08x}"
            suffix = names if len(alike) > 1 else ""
            groups[f"tables_{dtype}_{dim}{suffix}_over_{num_shards}"] = members
    return groups


def _spread(store: str, tables: Tables, num_shards: int) -> tuple[dict[str, TablePlace], int]:
    """Return the placement of each table, and the number of rows of the array.

    Each table, the largest first, goes to the device with the fewest rows so far. (All tables of an
    array have the same width, so rows measure bytes.)
    """
    used_rows = [0] * num_shards
    places = {}
    for name in sorted(tables, key=lambda n: (-tables[n].num_rows, n)):
        rows = tables[name].num_rows
        owner = used_rows.index(min(used_rows))
        places[name] = TablePlace(store, rows, 1, 1, rows, owner, used_rows[owner])
        used_rows[owner] += rows
    return places, num_shards * max(used_rows)


def read_tables(layout: TableLayout, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the tables (num_rows, dim) by name from whole stored arrays."""
    tables, stored = {}, whole_on_each(stored)
    for name, place in layout.places.items():
        if place.store in stored:
            first, whole = place.first_in(layout.stores[place.store]), stored[place.store]
            rows = whole[first : first + place.num_positions]
            blocks = rows.reshape(place.parts, -1, *rows.shape[1:])[part_of_residue(place.parts)]
            tables[name] = jnp.swapaxes(blocks, 0, 1).reshape(rows.shape)[: place.num_rows]
    return tables


def write_tables(layout: TableLayout, tables: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return whole stored arrays that hold the tables; undoes `read_tables`. Padding is 0.

    Raises:
      ValueError: a table that is missing, unknown or of another shape.
    """
    places = layout.places
    shapes = {name: (p.num_rows, layout.stores[p.store].dim) for name, p in places.items()}
    actual = {name: tuple(jnp.shape(table)) for name, table in tables.items()}
    tables = whole_on_each(tables)
    if shapes != actual:
        raise ValueError(f"{OWNER}: `write` needs tables of the shapes {shapes}, got {actual}.")
    stored = {n: jnp.zeros((s.num_rows, s.dim), s.dtype) for n, s in layout.stores.items()}
    for name, place in places.items():
        store = layout.stores[place.store]
        table = jnp.asarray(tables[name]).astype(store.dtype)
        padded = jnp.pad(table, ((0, place.num_positions - place.num_rows), (0, 0)))
        blocks = padded.reshape(-1, place.parts, store.dim).transpose(1, 0, 2)
        rows = blocks[np.argsort(part_of_residue(place.parts))].reshape(padded.shape)
        first = place.first_in(store)
        stored[place.store] = stored[place.store].at[first : first + len(rows)].set(rows)
    return stored


def whole_on_each(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Replicate arrays that are split over Explicit mesh axes, whose types hold the sharding.

    Other arrays stay as they are: the compiler can index arrays that are split.
    """

    def whole(x: Any) -> Any:
        sharding = jax.typeof(x).sharding
        is_whole = all(entry is None for entry in sharding.spec)
        return x if is_whole else jax.sharding.reshard(x, NamedSharding(sharding.mesh, P()))

    return {name: whole(x) for name, x in arrays.items()}


def table_key(key: Any, name: str) -> Any:
    """Return the key of one table, which does not depend on the other tables."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _first_rows(table: Table, key: Any, parts: int, residue: jax.Array) -> jax.Array:
    """Return rows `residue`, `residue + parts`, ... of a table, padded with zeros."""
    per_part = -(-table.num_rows // parts)
    shape = (per_part, table.dim)
    rows_key = jax.random.fold_in(key, residue)
    if table.init is None:
        bound = table.num_rows**-0.5
        values = jax.random.uniform(rows_key, shape, jnp.float32, -bound, bound)
    else:
        values = table.init(rows_key, shape, table.dtype)
        if jnp.shape(values) != shape:
            raise ValueError(
                f"{OWNER}: `init` of a table of {table.num_rows} rows must return an array of the "
                f"shape that it receives, here {shape}, got {jnp.shape(values)}."
            )
    numbers = residue + parts * jnp.arange(per_part, dtype=jnp.int32)
    return jnp.where((numbers < table.num_rows)[:, None], values, 0).astype(table.dtype)


def first_values(tables: Tables, layout: TableLayout, key: Any) -> dict[str, jax.Array]:
    """Return the initial values of all stored arrays, whole.

    Communication: none.
    """
    arrays = {}
    for name, store in layout.stores.items():
        devices = range(store.num_shards)
        blocks = [_first_block(tables, layout, name, key, jnp.int32(device)) for device in devices]
        arrays[name] = jnp.concatenate(blocks, axis=1 if store.kind == "column" else 0)
    return arrays


def first_local_values(tables: Tables, layout: TableLayout, key: Any) -> dict[str, jax.Array]:
    """Return the initial values of this device's part of each stored array, and make no others.

    Communication: none.
    """
    if layout.axis_name is None:
        return first_values(tables, layout, key)
    device = lax.axis_index(layout.axis_name)
    return {name: _first_block(tables, layout, name, key, device) for name in layout.stores}


def _first_block(
    tables: Tables, layout: TableLayout, store_name: str, key: Any, device: jax.Array
) -> jax.Array:
    """Return the initial values of a device's part of a stored array."""
    store = layout.stores[store_name]
    if store.kind == "table":
        block = jnp.zeros((store.local_rows, store.dim), store.dtype)
        for name, place in layout.places.items():
            if place.store == store_name:

                def filled(block: jax.Array, name: str = name, first: int = place.first_row):
                    rows = _some_columns(tables[name], table_key(key, name))
                    return lax.dynamic_update_slice(block, rows, (first, 0))

                block = lax.cond(device == place.first_owner, filled, lambda block: block, block)
        return block
    table, place = tables[store_name], layout.places[store_name]
    key = table_key(key, store_name)
    if store.kind == "column":
        return _some_columns(table, key, device * store.local_dim, store.local_dim)
    num_parts = place.parts // place.owners
    numbers = device * num_parts + jnp.arange(num_parts, dtype=jnp.int32)
    residues = jnp.asarray(np.argsort(part_of_residue(place.parts)).astype(np.int32))[numbers]
    blocks = lax.map(lambda residue: _first_rows(table, key, place.parts, residue), residues)
    return blocks.reshape(store.local_rows, store.dim)


def _some_columns(
    table: Table, key: Any, first: int | jax.Array = 0, num_columns: int | None = None
) -> jax.Array:
    """Return some columns of all rows, all by default; other columns exist for 1/64 of the rows."""

    def of_residue(residue: jax.Array) -> jax.Array:
        rows = _first_rows(table, key, PARTS, residue)
        return lax.dynamic_slice_in_dim(rows, first, num_columns or table.dim, 1)

    blocks = lax.map(of_residue, jnp.arange(PARTS, dtype=jnp.int32))
    return blocks.transpose(1, 0, 2).reshape(-1, blocks.shape[2])[: table.num_rows]
