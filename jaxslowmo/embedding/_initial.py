"""First values of tables: the same whichever devices hold them, made by each for its own part."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..mesh import vary_over, varying_axes
from ._layout import PARTS, Layout, Store, part_of_residue
from ._table import OWNER, Table, Tables


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


def first_values(tables: Tables, layout: Layout, key: Any) -> dict[str, jax.Array]:
    """First values of all stored arrays, whole.

    Communication: none.
    """
    made = {}
    for name, store in layout.stores.items():
        devices = range(store.num_shards)
        blocks = [_first_block(tables, layout, name, key, jnp.int32(device)) for device in devices]
        made[name] = jnp.concatenate(blocks, axis=1 if store.kind == "column" else 0)
    return made


def first_local_values(tables: Tables, layout: Layout, key: Any) -> dict[str, jax.Array]:
    """What this device holds at first of each stored array; it makes nothing else of them.

    Communication: none.
    """
    if layout.axis_name is None:
        return first_values(tables, layout, key)
    device = lax.axis_index(layout.axis_name)
    made = {name: _first_block(tables, layout, name, key, device) for name in layout.stores}
    return vary_over(made, (layout.axis_name,))


def _first_block(
    tables: Tables, layout: Layout, store_name: str, key: Any, device: jax.Array
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
    tables: Tables, layout: Layout, store: Store, key: Any, device: jax.Array
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
