"""`js.embeddings` and the class `Embeddings`: tables that the devices of a replica share."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.checks import check_choice, check_names, checked_int
from .._support.types import PyTree
from ..gradients.sparse import RowGradient, add_in_order, distinct_rows
from ..mesh import axis_size, is_bound, is_shared_leaf, replica_count, sum_over
from ..transform import prevent_fusion
from ..tree import leaf_names
from ._bags import Bags, bags_of, pool
from ._exchange import (
    PREFIX,
    BagsByTable,
    Requests,
    all_to_all_blocks,
    read_rows,
    request_rows,
    rows_as_slots,
    send_by_dtype,
    send_rows,
    slots_to_blocks,
)
from ._optimizers import Kept, RowwiseOptimizer, RowwiseState
from ._stores import (
    MAKERS,
    OWNER,
    Table,
    TableLayout,
    check_shapes,
    checked_tables,
    init_block,
    layout_of,
    unshard_explicit,
)

Stored = dict[str, jax.Array]
Overflow = Literal["error", "drop"]


@dataclasses.dataclass(frozen=True, eq=False)
class Embeddings:
    """Embedding tables, how devices share them, and their optimizers; made by `js.embeddings`.

    "Stored" tables are a dict of arrays: one per table, but one for all tables of a width, a dtype
    and an optimizer with `shard="table"`. Vectors and gradients of rows have the names of the
    stored arrays.

    Attributes:
      tables: mapping from names to tables, each with its optimizer.
      axis_name: axis of the devices that share the tables; None: one device holds all.
      capacity: maps a table to its slots per owner; None: as many as there can be distinct ids.
      inputs: function that returns the ids of a batch by feature; None: `batch[feature]`.
      overflow: what to do with ids without a slot, see `js.embeddings`.
      num_shards: number of devices along the axis, set by `over`; None: not known yet.
    """

    tables: Mapping[str, Table]
    axis_name: str | None
    capacity: Mapping[str, int | None]
    inputs: Callable[[Any], Mapping[str, Any]] | None
    overflow: Overflow
    num_shards: int | None = None

    @property
    def features(self) -> dict[str, str]:
        """The name of the table of each feature."""
        return {
            feature: name
            for name, table in self.tables.items()
            for feature in table.features_of(name)
        }

    @property
    def specs(self) -> dict[str, P]:
        """The `PartitionSpec` (rows, columns) of each stored array over the axis."""
        layout, axis = self.layout(), self.axis_name
        return {
            store: P(None, axis) if layout.is_split(store) else P(axis, None)
            for store in layout.stores
        }

    @property
    def optimizer_specs(self) -> RowwiseState:
        """The specs of the optimizers' state.

        What is kept per element is split like the table. What is kept per row is split over the
        devices with its rows; for split columns it is equal on all of them.
        """
        specs = self.specs

        def spec_of(store: str, array: Kept) -> P:
            return P(specs[store][0]) if array.per_row else specs[store]

        return RowwiseState._make((P(), self._map_kept(spec_of)))

    def _map_kept(self, fn: Callable[[str, Kept], Any]) -> dict[str, Any]:
        """Return `fn(store, array)` for all that optimizers keep, by stored array."""
        stores = self.layout().stores
        kept = {n: jax.tree.map(partial(fn, n), s.optimizer.kept) for n, s in stores.items()}
        return {name: arrays for name, arrays in kept.items() if arrays is not None}

    def over(self, mesh: Any) -> "Embeddings":
        """Return these tables for a mesh, or for a number of devices.

        Args:
          mesh: a mesh with the axis `axis_name`, or the number of devices along that axis.

        Raises:
          ValueError: the mesh lacks the axis; the devices cannot share the tables (see `js.Table`).
        """
        if self.axis_name is None:
            return self
        size = mesh if isinstance(mesh, int) else replica_count(OWNER, mesh, self.axis_name)
        sized = dataclasses.replace(self, num_shards=size)
        sized.layout()
        return sized

    def layout(self) -> TableLayout:
        """Return the placement of the rows on the devices of the axis.

        Raises:
          ValueError: the bound axis has another number of devices than `over` was given, or no
            number is known and the placement depends on it.
        """
        if self.axis_name is None:
            return layout_of(self.tables, 1)
        if is_bound(self.axis_name):
            size = axis_size(self.axis_name)
            if self.num_shards not in (None, size):
                raise ValueError(
                    f"{OWNER}: axis {self.axis_name!r} has {size} devices, and `over` was given "
                    f"{self.num_shards}."
                )
            return layout_of(self.tables, size, self.axis_name)
        if self.num_shards is None and any(t.shard == "table" for t in self.tables.values()):
            raise ValueError(
                f'{OWNER}: tables with shard="table" need a number of devices: call `over(mesh)`.'
            )
        # Other tables have the same stored arrays for 1, 2, 4, ... 64 devices.
        return layout_of(self.tables, self.num_shards or 1, self.axis_name)

    def bags_of(self, batch: PyTree) -> dict[str, Bags]:
        """Return the bags of a batch by feature, from `inputs`; see `js.embeddings`.

        Raises:
          ValueError: the batch has none of the features, or `inputs` returns something else.
        """
        return bags_of(batch, tuple(self.features), self.inputs)

    def exchange_ids(self, bags: Mapping[str, Any]) -> Requests:
        """Find the distinct ids of this device, and request their rows from the owners.

        This depends only on the ids, so it can run during a step. Needs the axis to be bound.

        Args:
          bags: ids or `js.embedding.Bags` of this device by feature; features may be missing.

        Returns:
          The `js.embedding.Requests` that `lookup`, `pooled` and `send_back` need.

        Communication: one all-to-all of devices * capacity int32 for all tables together; for those
          with `shard="column"` one all-gather of the same size instead.
        """
        return request_rows(self.layout(), self._bags_by_table(bags), self.capacity)

    def request_specs(self, bags: Mapping[str, Any]) -> Any:
        """Return the `PartitionSpec`s of the `Requests` for such bags, a prefix of their tree."""
        layout, split = self.layout(), P(self.axis_name)
        stores = {layout.places[name].store for name in self._bags_by_table(bags)}
        asked = {store: P() if layout.is_split(store) else split for store in stores}
        return Requests._make((split, split, asked, split))

    def metrics(self, requests: Requests) -> dict[str, jax.Array]:
        """Return the metrics of this device's requests, each () int32, to be summed over devices.

        Returns:
          For each table `embeddings/NAME/asked`: distinct rows that are needed; `.../overflow`:
          needed rows without a slot; `.../invalid`: ids that are not in the table.

        Communication: none.
        """
        return {name: count[0] for name, count in requests.counts.items()}

    def num_errors(self, counts: Mapping[str, Any]) -> Any:
        """Return the number of ids in `metrics` for which `refuse` would raise, () int32.

        Communication: none.
        """
        refused = [f"{PREFIX}{name}/{what}" for name in self.tables for what in self._error_kinds]
        return sum(counts[name] for name in refused if name in counts)

    @property
    def _error_kinds(self) -> tuple[str, ...]:
        """The counts in `metrics` of ids that are an error."""
        return ("invalid",) if self.overflow == "drop" else ("invalid", "overflow")

    def refuse(self, metrics: Mapping[str, Any]) -> None:
        """Raise `ValueError` if these metrics count wrong ids; wait for the metrics.

        Args:
          metrics: values from `metrics`, summed or stacked; other entries are ignored.

        Raises:
          ValueError: ids that are not in their table; with `overflow="error"` ids without a slot.
        """
        for name, table in self.tables.items():
            features = ", ".join(f"feature {feature!r}" for feature in table.features_of(name))
            problems = {
                "invalid": f"ids of {features} were not in table {name!r}, which has the rows 0 to "
                f"{table.num_rows - 1}",
                "overflow": f"distinct ids of table {name!r} had no slot: `capacity` is "
                f"{self.capacity[name]} for each owner",
            }
            for what in self._error_kinds:
                count = int(np.sum(metrics.get(f"{PREFIX}{name}/{what}", 0)))
                if count:
                    raise ValueError(
                        f"{OWNER}: in an earlier batch, whose update was skipped, {count} "
                        f"{problems[what]}."
                    )

    def check(self, bags: Mapping[str, Any], *, num_parts: int = 1) -> None:
        """Check the ids of bags that are NumPy arrays; ignore those on devices.

        Args:
          bags: ids or `js.embedding.Bags` by feature.
          num_parts: number of equal consecutive parts of the batch, one per device.

        Raises:
          ValueError: an id that is not in its table, naming table, feature, id and row of the
            batch; padding below -2**31; with `overflow="error"` more distinct ids in a part than
            there are slots.
        """
        limited = {
            name: by_feature
            for name, by_feature in self._bags_by_table(bags).items()
            if self.overflow == "error" and self.capacity[name] is not None
        }
        for name, needed in self._slots_by_part(limited, num_parts).items():
            slots, most = self.capacity[name] or 0, max(needed)
            if most > slots:
                raise ValueError(
                    f"{OWNER}: `capacity` of table {name!r} is {slots} for each owner, and part "
                    f"{needed.index(most)} of {num_parts} of the batch has {most} distinct ids of "
                    "one."
                )

    def slots_needed(self, bags: Mapping[str, Any], *, num_parts: int = 1) -> dict[str, int]:
        """Return the `capacity` that these NumPy bags need, by table.

        Args:
          bags: ids or `js.embedding.Bags` by feature; a table with some ids on devices is left out.
          num_parts: number of equal consecutive parts of the batch, one per device.
        """
        needed = self._slots_by_part(self._bags_by_table(bags), num_parts)
        return {name: max(parts) for name, parts in needed.items()}

    def _slots_by_part(self, bags: BagsByTable, num_parts: int) -> dict[str, list[int]]:
        """Return the largest number of distinct ids of one owner, by table and part of a batch.

        It is at least 1, the minimum capacity. Tables with some ids on devices are left out.
        """
        number, needed = checked_int(f"{OWNER}: `num_parts`", num_parts, 1), {}
        for name, by_feature in bags.items():
            ids = [b.ids for b in by_feature.values()]
            if all(isinstance(i, np.ndarray) for i in ids):
                place = self.layout().places[name]
                ids = [np.repeat(i, number, axis=0) if is_shared_leaf(i) else i for i in ids]
                if wrong := [len(i) for i in ids if len(i) % number]:
                    raise ValueError(
                        f"{OWNER}: the batch of table {name!r} must divide into {number} parts, a "
                        f"device each, got {wrong[0]} rows."
                    )
                parts = np.concatenate([i.reshape(number, -1) for i in ids], axis=1)
                owners = [place.owners_of(np.unique(part[part >= 0])) for part in parts]
                needed[name] = [max(1, *np.bincount(own, minlength=1).tolist()) for own in owners]
        return needed

    def lookup(self, tables: Stored, requests: Requests) -> Stored:
        """Return the rows that this device requested, in its slots. Needs the axis to be bound.

        Args:
          tables: this device's part of the stored tables.
          requests: result of `exchange_ids`.

        Returns:
          For each stored array (slots, dim); an unused slot is 0.

        Communication: one all-to-all of devices * capacity rows for all tables of one dtype.
        """
        return send_rows(self.layout(), read_rows(tables, requests.asked))

    def pooled(
        self, vectors: Stored, requests: Requests, params: PyTree | None = None
    ) -> dict[str, jax.Array]:
        """Return a vector per bag, or per id without pooling; the function is differentiable.

        Args:
          vectors: result of `lookup`.
          requests: result of `exchange_ids`.
          params: dense parameters, for tables with `position_weights`.

        Returns:
          For each feature (batch, dim), or (batch, max_length, dim) without pooling.

        Raises:
          ValueError: position weights that `params` lacks, or of another shape.

        Communication: none. The result does not depend on how the tables are shared, except for
          its last bit.
        """
        places, tables_of, pooled = self.layout().places, self.features, {}
        named: dict[Any, Any] = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
        for feature, slots in requests.slots.items():
            name = tables_of[feature]
            leaf = self.tables[name].position_weights_of(feature)
            factors, shape = named.get(leaf), slots.shape[1:] or (1,)
            if leaf is not None and getattr(factors, "shape", None) != shape:
                leaves = {name: jnp.shape(x) for name, x in named.items()}
                raise ValueError(
                    f"{OWNER}: `params` must have {leaf!r} of shape {shape}, the position weights "
                    f"of feature {feature!r}, got {leaves or 'none'}."
                )
            rows, weights = vectors[places[name].store], requests.weights.get(feature)
            pooled[feature] = pool(rows, slots, self.tables[name].pooling, weights, factors)
        return pooled

    def send_back(self, gradients: Stored, requests: Requests) -> dict[str, RowGradient]:
        """Sum gradients of vectors on the owners of their rows. Needs the axis to be bound.

        Args:
          gradients: gradients with respect to the vectors of `lookup`.
          requests: result of `exchange_ids`.

        Returns:
          For each stored array the sum over devices: distinct rows of this device, sorted, and
          float32 values; padding is the number of rows. Devices are added in a fixed order.

        Communication: one all-to-all of devices * capacity rows per table dtype, in that dtype.
        """
        stores = self.layout().stores
        blocks = {name: slots_to_blocks(stores[name], gradients[name]) for name in requests.asked}
        received, sums = all_to_all_blocks(blocks, self.axis_name), {}
        for name, rows in requests.asked.items():
            num_rows = stores[name].local_rows
            distinct, places, _ = distinct_rows(rows, num_rows, min(rows.size, num_rows))
            sums[name] = RowGradient(
                distinct, add_in_order(places, received[name], distinct.size), num_rows
            )
        return sums

    def apply(
        self,
        tables: Stored,
        state: RowwiseState,
        gradients: Mapping[str, RowGradient],
        *,
        active: jax.Array | bool = True,
    ) -> tuple[Stored, RowwiseState]:
        """Update only the rows that have a gradient. Needs the axis to be bound.

        Args:
          tables: this device's part of the stored tables.
          state: this device's part of the optimizer's state.
          gradients: result of `send_back`; rows must be distinct.
          active: () bool; if False nothing changes, including the number of updates. The default is
            True.

        Returns:
          New tables and state; donated ones are updated in place.

        Communication: see the optimizer.
        """
        layout = self.layout()
        squares = _mean_squares(layout, gradients)
        new_tables, accumulators = dict(tables), dict(state.accumulators)
        for name, gradient in gradients.items():
            # Without an update all rows become padding, so that the table is not written.
            rows = jnp.where(active, gradient.rows, jnp.int32(gradient.num_rows))
            gradient = dataclasses.replace(gradient, rows=rows)
            arrays, optimizer = (
                (tables[name], accumulators.get(name)),
                layout.stores[name].optimizer,
            )
            updated = optimizer.update_rows(arrays, gradient, squares.get(name), state.count)
            new_tables[name], kept = updated
            if kept is not None:
                accumulators[name] = kept
        count = state.count + jnp.asarray(active).astype(jnp.int32)
        return new_tables, RowwiseState(count, accumulators)

    def init(self, key: Any) -> Stored:
        """Return the initial values of all stored tables, whole; equal to those of `init_local`.

        Args:
          key: a PRNG key. A table's values depend only on the key and the table's name, so they
            are the same for 1, 2, 4, ... 64 devices and any `shard`.

        Communication: none.
        """
        layout, arrays = self.layout(), {}
        for name, store in layout.stores.items():
            devices = range(store.row_shards * store.column_shards)
            blocks = [init_block(self.tables, layout, name, key, jnp.int32(i)) for i in devices]
            arrays[name] = jnp.concatenate(blocks, axis=int(store.kind == "column"))
        return arrays

    def init_local(self, key: Any) -> Stored:
        """Return the initial values of only this device's part. Needs the axis to be bound.

        Communication: none.
        """
        layout, axis = self.layout(), self.axis_name
        device = jnp.int32(0) if axis is None else lax.axis_index(axis)
        return {name: init_block(self.tables, layout, name, key, device) for name in layout.stores}

    def init_optimizer(self, tables: Stored) -> RowwiseState:
        """Return the initial optimizer state for stored tables, whole or a device's part.

        Communication: none.
        """

        def init_array(store: str, array: Kept) -> jax.Array:
            shape = tables[store].shape
            return jnp.full(shape[:1] if array.per_row else shape, array.initial, jnp.float32)

        return RowwiseState(jnp.zeros([], jnp.int32), self._map_kept(init_array))

    def read(self, tables: Stored) -> Stored:
        """Return the tables (num_rows, dim) by name from whole stored arrays.

        Other arrays with an entry for each stored row, such as `RowwiseState.accumulators` holds,
        are read in the same way, and arrays may be left out.

        Raises:
          ValueError: something else, such as arrays that are stacked over replicas.

        Communication: none under jit on one device; else what the compiler inserts.
        """
        layout = self.layout()
        rows: Any = {name: store.num_rows for name, store in layout.stores.items()}
        shapes: Any = type(tables).__name__
        if isinstance(tables, Mapping):
            shapes = {name: jnp.shape(x) for name, x in tables.items()}
        if not isinstance(shapes, dict) or any(x[:1] != (rows.get(n),) for n, x in shapes.items()):
            raise ValueError(
                f"{OWNER}: `read` needs stored arrays of one replica, as in `step.consensus(state)"
                f".tables`, with {rows} rows, got {shapes}."
            )
        stored = unshard_explicit(tables)
        with jax.transfer_guard("allow"):  # of row numbers
            return {
                name: jnp.asarray(stored[place.store])[layout.stored_rows(name)]
                for name, place in layout.places.items()
                if place.store in stored
            }

    def write(self, tables: Stored) -> Stored:
        """Return whole stored arrays from tables (num_rows, dim) by name; undoes `read`.

        Rows of padding are 0.

        Raises:
          ValueError: a table that is missing, unknown or of another shape.
        """
        layout = self.layout()
        shapes = {name: (table.num_rows, table.dim) for name, table in self.tables.items()}
        check_shapes(f"{OWNER}: `write` needs tables", shapes, tables)
        with jax.transfer_guard("allow"):  # of row numbers
            stored = {n: jnp.zeros((s.num_rows, s.dim), s.dtype) for n, s in layout.stores.items()}
            for name, table in unshard_explicit(tables).items():
                store, rows = layout.places[name].store, layout.stored_rows(name)
                table = jnp.asarray(table, stored[store].dtype)
                stored[store] = stored[store].at[rows].set(table)
        return stored

    def reference(
        self, tables: Stored, bags: Mapping[str, Any], params: PyTree | None = None
    ) -> dict[str, jax.Array]:
        """Return what `pooled` returns, from whole stored tables on one device, without the axis.

        Args:
          tables: whole stored tables.
          bags: ids or `js.embedding.Bags` by feature.
          params: dense parameters, for tables with `position_weights`.

        Communication: none under jit on one device; else what the compiler inserts.
        """
        layout, slots, weights = self.layout(), {}, {}
        for name, by_feature in self._bags_by_table(bags).items():
            for feature, b in by_feature.items():
                slots[feature] = rows_as_slots(layout, name, b.ids)
                weights[feature] = b.weights
        return self.pooled(unshard_explicit(tables), Requests(slots, weights, {}, {}), params)

    def _bags_by_table(self, bags: Mapping[str, Any]) -> dict[str, dict[str, Bags]]:
        """Return checked bags by feature for each table, in the order of the tables."""
        by_feature = bags_of(bags, tuple(self.features), lambda bags: bags)
        by_table: dict[str, dict[str, Bags]] = {}
        for feature, name in self.features.items():
            if feature in by_feature:
                valid = _cast_host_ids(
                    name, feature, self.tables[name].num_rows, by_feature[feature]
                )
                by_table.setdefault(name, {})[feature] = valid
        return by_table


def _mean_squares(layout: TableLayout, gradients: Mapping[str, RowGradient]) -> Stored:
    """Return the mean square of each row's gradient over all columns: (k,) float32 by array.

    Arrays whose optimizer keeps nothing per row are left out.

    Communication: for arrays whose columns are split, one all-reduce of all their sums.
    """

    def sum_of_squares(rows: jax.Array, values: jax.Array) -> jax.Array:
        # Two isolated steps: a fused multiply-add would change the last bit.
        squares = prevent_fusion(jnp.square, rows, values.astype(jnp.float32))
        return prevent_fusion(lambda x: jnp.sum(x, axis=1), rows, squares)

    sums = {
        name: sum_of_squares(g.rows, g.values)
        for name, g in gradients.items()
        if layout.stores[name].optimizer.uses_mean_squares
    }
    split = {name: x[None] for name, x in sums.items() if layout.is_split(name)}
    whole = send_by_dtype(split, partial(sum_over, axis_name=layout.axis_name or ()))
    sums |= {name: x[0] for name, x in whole.items()}
    return {name: total / layout.stores[name].dim for name, total in sums.items()}


def _cast_host_ids(table: str, feature: str, num_rows: int, bags: Bags) -> Bags:
    """Return `bags` with NumPy ids as int32: jax would truncate 64 bits to 32, and -2**63 to 0.

    Raises:
      ValueError: a NumPy id that is not in the table, or padding below int32.
    """
    ids, least = bags.ids, np.iinfo(np.int32).min
    if not isinstance(ids, np.ndarray) or not ids.size:
        return bags
    if int(ids.min()) < least:
        raise ValueError(
            f"{OWNER}: feature {feature!r}: padding must be at least {least}, such as -1, got "
            f"{int(ids.min())}."
        )
    if int(ids.max()) < num_rows:
        return bags._replace(ids=ids.astype(np.int32))
    index = np.unravel_index(int(np.argmax(ids >= num_rows)), ids.shape)
    place = f"row {index[0]}" + (f", place {index[1]}" if len(index) > 1 else "")
    raise ValueError(
        f"{OWNER}: feature {feature!r}: ids of table {table!r} must be below {num_rows}, got "
        f"{int(ids[index])} in {place} of the batch."
    )


def embeddings(
    tables: Mapping[str, Table],
    *,
    axis_name: str | None,
    optimizer: RowwiseOptimizer | None = None,
    capacity: Literal["auto"] | int | Mapping[str, int] = "auto",
    inputs: Callable[[Any], Mapping[str, Any]] | None = None,
    overflow: Overflow = "error",
) -> Embeddings:
    """Make embedding tables that the devices of a replica share, with bags and row-wise updates.

    The devices exchange only ids, the rows of these ids, and the gradients of these rows. The
    gradient of a table never exists as a whole, and an update touches only rows that were looked
    up.

    Args:
      tables: maps names to `js.Table`.
      axis_name: mesh axis whose devices share the tables, over which a replica's batch is split;
        None: each replica has its tables on one device.
      optimizer: `js.rowwise_adagrad(...)`, `rowwise_sgd(...)` or `rowwise_adam(...)`, for
        the tables that have none of their own (`js.Table(optimizer=...)`).
      capacity: number of slots for the distinct ids that a device requests from one owner (a device
        that holds rows), for every table or by name. "auto": as many as there can be, so that no id
        is left out. All slots are sent, used or not. A device needs about its number of distinct
        ids divided by the number of devices, and some more because ids spread unevenly.
      inputs: function `inputs(batch)` that returns ids or `js.embedding.Bags` by feature and
        depends on the batch alone. None: `batch[feature]`.
      overflow: what to do with ids beyond the capacity. `"error"`: for NumPy batches the training
        step raises before it runs; for batches on devices it skips the update, and its second call
        after that raises. `"drop"`: their vectors are 0, and the metrics count them.

    Returns:
      `Embeddings`, for `js.make_train_step(embeddings=...)`, or for your own training loop.

    Raises:
      ValueError: values that are not `js.Table`, or two tables with a feature of one name; a
        capacity below 1 or for an unknown table; another `overflow` or optimizer; a table without
        an optimizer (named).

    Communication: none here; see the methods of `Embeddings`.

    Source: torchrec's sharded embedding bags (sharded by rows, columns or whole tables).
    """
    if axis_name is not None and not isinstance(axis_name, str):
        raise ValueError(f"{OWNER}: `axis_name` must be one name or None, got {axis_name!r}.")
    if not isinstance(optimizer, RowwiseOptimizer | None):
        raise ValueError(f"{OWNER}: `optimizer` must be made by {MAKERS}, got {optimizer!r}.")
    checked = checked_tables(tables, optimizer)
    if inputs is not None and not callable(inputs):
        raise ValueError(f"{OWNER}: `inputs` must be a function of the batch, got {inputs!r}.")
    check_choice("overflow", overflow, Overflow, OWNER)
    by_name = capacity if isinstance(capacity, Mapping) else dict.fromkeys(checked, capacity)
    check_names(f"{OWNER}: `capacity`", by_name, checked, "tables")
    slots: dict[str, int | None] = {}
    for name in checked:
        what = f'{OWNER}: `capacity` of table {name!r}, if not "auto",'
        own = by_name.get(name, "auto")
        slots[name] = None if own == "auto" else checked_int(what, own, 1)
    return Embeddings(checked, axis_name, slots, inputs, overflow)
