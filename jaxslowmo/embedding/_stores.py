"""Embedding tables, `js.Table`, and the stored arrays that hold their rows on devices.

In the order of this file: tables and checks of them; the placement of rows; initial values.
"""

import dataclasses
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import checked_int
from .._support.types import PyTree
from ._optimizers import RowwiseOptimizer

OWNER = "embeddings"
MAKERS = "js.rowwise_adagrad, js.rowwise_sgd or js.rowwise_adam"
# Row numbers are int32, and some numbers above the largest row mean that there is no row.
MOST_ROWS = 2**31 - 2**20
# Parts of a table's rows, so that 1, 2, 4, ... 64 devices store equal arrays.
PARTS = 64


@dataclasses.dataclass(frozen=True)
class Table:
    """The description of one embedding table for `js.embeddings`.

    Attributes:
      num_rows: number of rows; ids are 0 to num_rows - 1.
      dim: length of a vector.
      shard: how the devices share the table. `"row"`: each device holds some rows, spread so that
        neighbouring ids are on different devices, since frequent ids are often the small ones.
        `"column"`: each device holds some columns of all rows; the number of devices must divide
        `dim`. `"table"`: one device holds the whole table. Tables of one `dim` and `dtype` are then
        spread over the devices in one array, so that each device has about the same number of rows.
        Every device allocates the rows of the fullest one, so use it for many tables, not for one.
      pooling: how the vectors of a bag are combined. `"sum"`; `"mean"`: their sum divided by the
        number of ids, whatever the weights; None: not combined. A bag without ids gives 0.
      features: names of the inputs that look up this table; None: only the table's name.
      position_weights: name of a leaf of the dense parameters, such as `"towers/position"`, of
        shape (max_length,): the vector at index i of a bag is multiplied by entry i before pooling.
        Or a mapping from features to such names. None: no such weights.
      init: function `init(key, shape, dtype)`, as in `jax.nn.initializers`. It is called for blocks
        of rows, so it must treat all rows alike. None: uniform in +-1/sqrt(num_rows).
      optimizer: optimizer of the rows, `js.rowwise_adagrad(...)`, `rowwise_sgd(...)` or
        `rowwise_adam(...)`; None: that of `js.embeddings`.
      dtype: dtype in which rows are stored and sent. Updates are computed in float32 and rounded to
        the nearest: in bfloat16 an update below about 1/256 of a weight is lost.
    """

    num_rows: int
    dim: int
    shard: Literal["row", "column", "table"] = "row"
    pooling: Literal["sum", "mean"] | None = "sum"
    features: Sequence[str] | None = None
    position_weights: str | Mapping[str, str] | None = None
    init: Callable[..., jax.Array] | None = None
    dtype: Any = jnp.float32
    optimizer: RowwiseOptimizer | None = None

    def features_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the inputs that look up this table, whose name is `name`."""
        return (name,) if self.features is None else tuple(self.features)

    def position_weights_of(self, feature: str) -> str | None:
        """Return the name of the leaf with the position weights of one input; None for none."""
        named = self.position_weights
        return named.get(feature) if isinstance(named, Mapping) else named


Tables = Mapping[str, Table]
"""A mapping from names to tables."""
Capacity = Mapping[str, int | None]
"""The slots per owner of each table; None means as many as there can be distinct ids."""


class WithTables(NamedTuple):
    """A pair of trees: one for the dense parameters, one for the embedding tables.

    Attributes:
      dense: dense parameters, or the state of their optimizer.
      tables: stored tables, or the state of the optimizers of their rows.
    """

    dense: PyTree
    tables: PyTree


def checked_tables(tables: Any, optimizer: RowwiseOptimizer | None) -> dict[str, Table]:
    """Return `tables` with plain ints, and with `optimizer` where a table has none of its own.

    Raises:
      ValueError: wrong tables, naming the table and the argument.
    """
    items = tables.items() if isinstance(tables, Mapping) else ()
    wrong = {k: x for k, x in items if not (isinstance(k, str) and isinstance(x, Table))}
    if wrong or not items:
        rule = "must map names to js.Table, and not be empty"
        raise ValueError(f"{OWNER}: `tables` {rule}, got {wrong or tables!r}.")
    checked: dict[str, Table] = {}
    users: dict[str, str] = {}
    for name, table in items:
        what, own = f"{OWNER}: table {name!r}:", table.optimizer
        table = checked[name] = dataclasses.replace(
            table,
            num_rows=checked_int(f"{what} `num_rows`", table.num_rows, 1),
            dim=checked_int(f"{what} `dim`", table.dim, 1),
            optimizer=optimizer if own is None else own,
        )
        for argument, is_right, rule in _rules(name, table):
            if not is_right:
                value = getattr(table, argument)
                raise ValueError(f"{what} `{argument}` must be {rule}, got {value!r}.")
        for feature in table.features_of(name):
            if feature in users:
                raise ValueError(
                    f"{OWNER}: feature {feature!r} must look up one table, got "
                    f"{users[feature]!r} and {name!r}."
                )
            users[feature] = name
    return checked


def _rules(name: str, table: Table) -> Iterator[tuple[str, bool, str]]:
    """Return arguments of a table, whether each is right, and what it must be."""
    yield "num_rows", table.num_rows <= MOST_ROWS, f"at most {MOST_ROWS}, as ids are int32"
    yield "shard", table.shard in ("row", "column", "table"), '"row", "column" or "table"'
    yield "pooling", table.pooling in ("sum", "mean", None), '"sum", "mean" or None'
    rule = "a floating type, of 64 bits only with jax_enable_x64"
    yield "dtype", _is_floating(table.dtype), rule
    yield "init", table.init is None or callable(table.init), "a function (key, shape, dtype)"
    names = () if isinstance(table.features, str) else table.features_of(name)
    is_right = len(names) > 0 and all(isinstance(feature, str) for feature in names)
    yield "features", is_right, "a sequence of names, or None"
    named = table.position_weights
    leaves = named if isinstance(named, Mapping) else {} if named is None else {None: named}
    is_right = all(isinstance(leaf, str) for leaf in leaves.values())
    is_right = is_right and leaves.keys() <= {None, *table.features_of(name)}
    yield "position_weights", is_right, "the name of a leaf, or one per feature of the table"
    rule = f"made by {MAKERS}, or be that of js.embeddings"
    yield "optimizer", isinstance(table.optimizer, RowwiseOptimizer), rule


def _is_floating(dtype: Any) -> bool:
    """Return whether `dtype` is a floating type that jax does not truncate."""
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        return False
    return jnp.issubdtype(parsed, jnp.floating) and jax.dtypes.canonicalize_dtype(parsed) == parsed


# The placement of rows.


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
                f'{OWNER}: table {store!r}: with shard="column" devices ({num_shards}) must divide '
                f"`dim`, got {first.dim}."
            )
        if rows > MOST_ROWS:
            raise ValueError(
                f"{OWNER}: array {store!r} must have at most {MOST_ROWS} rows, got {rows}."
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


# Initial values.


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
            got = jnp.shape(values)
            raise ValueError(f"{OWNER}: `init` must return an array of {shape}, got {got}.")
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
