"""Stored arrays: the placement of table rows in them, initial values, and the way back."""

import dataclasses
import math
import zlib
from collections import Counter
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
    odd, residues, bits = parts // PARTS, np.arange(parts), PARTS.bit_length() - 1
    reverse = np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(PARTS)])
    return (residues % odd * PARTS + reverse[residues // odd]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Store:
    """A stored array; static.

    Attributes:
      kind: how devices share the array, as `Table.shard`.
      num_rows: number of rows of the whole array.
      dim: number of columns of the whole array.
      dtype: dtype of the array.
      row_shards: number of devices over which the rows are split.
      column_shards: number of devices over which the columns are split.
      optimizer: optimizer of its rows; None in a layout without optimizers.
    """

    kind: Literal["row", "column", "table"]
    num_rows: int
    dim: int
    dtype: jnp.dtype
    row_shards: int
    column_shards: int
    optimizer: Any

    @property
    def local_rows(self) -> int:
        """The number of rows that a device holds."""
        return self.num_rows // self.row_shards

    @property
    def local_dim(self) -> int:
        """The number of columns that a device holds."""
        return self.dim // self.column_shards


@dataclasses.dataclass(frozen=True)
class TablePlacement:
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

    def positions(self, ids: jax.Array) -> jax.Array:
        """Return the position of each row when the blocks of all owners are concatenated.

        Args:
          ids: int32 row numbers of the table; other numbers mean no row.
        """
        part = jnp.asarray(part_of_residue(self.parts))[ids % self.parts]
        positions = part * (self.num_positions // self.parts) + ids // self.parts
        is_row = (ids >= 0) & (ids < self.num_rows)
        return jnp.where(is_row, positions, jnp.int32(self.num_positions))

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the index of the owner of each row, for NumPy ids that are in the table."""
        return part_of_residue(self.parts)[ids % self.parts] // (self.parts // self.owners)


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """The stored arrays, the placement of tables in them, and the axis of the devices; static."""

    stores: Mapping[str, Store]
    places: Mapping[str, TablePlacement]
    axis_name: str | None

    def is_split(self, store: str) -> bool:
        """Return whether an axis splits a stored array's columns, so that devices have all rows."""
        return self.stores[store].kind == "column" and self.axis_name is not None

    def stored_rows(self, name: str, ids: jax.Array | None = None) -> jax.Array:
        """Return the numbers of a table's rows in its whole stored array, int32.

        Args:
          name: name of the table.
          ids: int32 row numbers of the table; None: all of them, in order.
        """
        place = self.places[name]
        first = place.first_owner * self.stores[place.store].local_rows + place.first_row
        ids = jnp.arange(place.num_rows, dtype=jnp.int32) if ids is None else ids
        return first + place.positions(ids)


def layout_of(tables: Tables, num_shards: int, axis_name: str | None = None) -> TableLayout:
    """Return the placement of the tables on a number of devices along an axis.

    Raises:
      ValueError: columns that the devices cannot share evenly; more rows than int32 can number.
    """
    stores: dict[str, Store] = {}
    places: dict[str, TablePlacement] = {}
    for store, members in _group_tables(tables, num_shards).items():
        first = next(iter(members.values()))
        if first.shard == "table":
            own, rows = _assign_tables(store, members, num_shards)
        else:
            (name,) = members
            is_row_sharded = first.shard == "row"
            owners, parts = (num_shards, math.lcm(PARTS, num_shards)) if is_row_sharded else (1, 1)
            rows = parts * -(-first.num_rows // parts)
            own = {name: TablePlacement(store, first.num_rows, owners, parts, rows // owners, 0, 0)}
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
        grid = (1, num_shards) if first.shard == "column" else (num_shards, 1)
        dtype = jnp.dtype(first.dtype)
        stores[store] = Store(first.shard, rows, first.dim, dtype, *grid, first.optimizer)
        places |= own
    return TableLayout(stores, places, axis_name)


def _group_tables(tables: Tables, num_shards: int) -> dict[str, dict[str, Table]]:
    """Return the tables of each stored array, by its name.

    Tables with `shard="table"` share one if they have one width, dtype and optimizer. The number of
    devices is in its name, and the tables are where a width and dtype have several optimizers: both
    change the order of the tables, not always the shape, and a checkpoint must not be restored in
    another order.
    """
    optimizers: list[Any] = []  # a list, since a schedule may have no hash
    alike: dict[tuple[str, int, int], dict[str, Table]] = {}
    for name, table in tables.items():
        if table.shard == "table":
            if table.optimizer not in optimizers:
                optimizers.append(table.optimizer)
            kind = jnp.dtype(table.dtype).name, table.dim, optimizers.index(table.optimizer)
            alike.setdefault(kind, {})[name] = table
    groups = {name: {name: table} for name, table in tables.items() if table.shard != "table"}
    num_alike = Counter(kind[:2] for kind in alike)
    for (dtype, dim, _), members in alike.items():
        names = f"_{zlib.crc32(repr(sorted(members)).encode()):08x}"
        suffix = names if num_alike[dtype, dim] > 1 else ""
        groups[f"tables_{dtype}_{dim}{suffix}_over_{num_shards}"] = members
    return groups


def _assign_tables(
    store: str, tables: Tables, num_shards: int
) -> tuple[dict[str, TablePlacement], int]:
    """Return the placement of each table, and the number of rows of the array.

    Each table, the largest first, goes to the device with the fewest rows so far. (All tables of an
    array have the same width, so rows measure bytes.)
    """
    used_rows = [0] * num_shards
    places = {}
    for name in sorted(tables, key=lambda n: (-tables[n].num_rows, n)):
        rows = tables[name].num_rows
        owner = used_rows.index(min(used_rows))
        places[name] = TablePlacement(store, rows, 1, 1, rows, owner, used_rows[owner])
        used_rows[owner] += rows
    return places, num_shards * max(used_rows)


def check_shapes(what: str, shapes: Mapping[str, tuple[int, int]], tables: Any) -> None:
    """Raise `ValueError` unless `tables` maps the names of `shapes` to arrays of these shapes."""
    actual: Any = type(tables).__name__
    if isinstance(tables, Mapping):
        actual = {name: jnp.shape(table) for name, table in tables.items()}
    if actual != shapes:
        raise ValueError(f"{what} of the shapes {shapes}, got {actual}.")


def unshard_explicit(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Replicate arrays that are split over Explicit mesh axes, whose types hold the sharding.

    Other arrays stay as they are: the compiler can index arrays that are split.
    """

    def whole(x: Any) -> Any:
        sharding = jax.typeof(x).sharding
        is_whole = all(entry is None for entry in sharding.spec)
        return x if is_whole else jax.sharding.reshard(x, NamedSharding(sharding.mesh, P()))

    return {name: whole(x) for name, x in arrays.items()}


def _init_rows(table: Table, key: Any, parts: int, residue: jax.Array) -> jax.Array:
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


def init_block(
    tables: Tables, layout: TableLayout, store_name: str, key: Any, device: jax.Array
) -> jax.Array:
    """Return the initial values of a device's part of a stored array; make no others.

    Communication: none.
    """
    store = layout.stores[store_name]

    def table_block(name: str) -> jax.Array:
        place, parts, residues = layout.places[name], PARTS, jnp.arange(PARTS, dtype=jnp.int32)
        # The key does not depend on the other tables.
        table, table_key = tables[name], jax.random.fold_in(key, zlib.crc32(name.encode()))
        if store.kind == "row":
            parts, num_parts = place.parts, place.parts // place.owners
            numbers = device * num_parts + jnp.arange(num_parts, dtype=jnp.int32)
            residues = jnp.asarray(np.argsort(part_of_residue(parts)).astype(np.int32))[numbers]
        first_column = device * store.local_dim if store.kind == "column" else 0

        def residue_rows(residue: jax.Array) -> jax.Array:  # only these rows exist with all columns
            rows = _init_rows(table, table_key, parts, residue)
            return lax.dynamic_slice_in_dim(rows, first_column, store.local_dim, 1)

        blocks = lax.map(residue_rows, residues)
        if store.kind == "row":
            return blocks.reshape(store.local_rows, store.dim)
        return blocks.transpose(1, 0, 2).reshape(-1, store.local_dim)[: table.num_rows]

    if store.kind != "table":
        return table_block(store_name)
    block = jnp.zeros((store.local_rows, store.dim), store.dtype)
    for name, place in layout.places.items():
        if place.store == store_name:

            def write_table(block: jax.Array, name: str = name, first: int = place.first_row):
                return lax.dynamic_update_slice(block, table_block(name), (first, 0))

            block = lax.cond(device == place.first_owner, write_table, lambda block: block, block)
    return block
