"""Embedding tables that the devices of a replica share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..gradients.sparse import RowGradient, add_up_rows
from ..mesh import is_bound, require_axes
from ._bags import Bags, bags_of
from ._batch_checks import (
    check_capacities,
    check_width,
    host_checked,
    metrics_of,
    num_refused,
    refuse,
    slots_needed,
)
from ._optimizers import RowwiseOptimizer, RowwiseState, apply_row_gradients, first_state
from ._requests import (
    Requests,
    ask_for_rows,
    in_blocks,
    num_devices,
    rows_as_slots,
    specs_of_requests,
    swap_blocks,
)
from ._stores import (
    TableLayout,
    first_local_values,
    first_values,
    layout_of,
    read_tables,
    whole_on_each,
    write_tables,
)
from ._table import OWNER, Table
from ._vectors import pool, position_weights_in, read_rows, send_rows

Stored = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Embeddings:
    """Tables, how devices share them and how their rows move; made by `js.embeddings`.

    "Stored" tables are a dict of arrays: one per table, but one for all tables of a width and dtype
    with `shard="table"`. Vectors and gradients of rows go by the names of the stored arrays.

    Attributes:
      tables: by name.
      axis_name: axis of the devices that share them; None: one holds all.
      capacity: by table, slots per owner; None: as many as there can be distinct ids.
      optimizer: how rows move.
      inputs: finds the ids in a batch.
      overflow: what becomes of ids without a slot.
      num_shards: devices along the axis where that is known (`over`), else None.
    """

    tables: Mapping[str, Table]
    axis_name: str | None
    capacity: Mapping[str, int | None]
    optimizer: RowwiseOptimizer
    inputs: Callable[[Any], Mapping[str, Any]] | None
    overflow: Literal["error", "drop"]
    num_shards: int | None = None

    @property
    def features(self) -> dict[str, str]:
        """The table of each feature, by name."""
        return {
            feature: name
            for name, table in self.tables.items()
            for feature in table.features_of(name)
        }

    @property
    def specs(self) -> dict[str, P]:
        """How each stored array lies over the axis; (rows, columns)."""
        layout, axis = self.layout(), self.axis_name
        return {
            store: P(None, axis) if layout.is_split(store) else P(axis, None)
            for store in layout.stores
        }

    @property
    def optimizer_specs(self) -> RowwiseState:
        """How the optimizer's state lies over the axis; that of split columns is on all devices."""
        layout = self.layout()
        stores = layout.stores if self.optimizer.initial is not None else ()
        by_name = {s: P() if layout.is_split(s) else P(self.axis_name) for s in stores}
        return RowwiseState._make((P(), by_name))

    def over(self, mesh: Any) -> "Embeddings":
        """These tables for a mesh whose axis has a size.

        Args:
          mesh: a mesh with the axis, or the number of devices along it.

        Raises:
          ValueError: the mesh lacks the axis; the devices cannot share the tables (see `js.Table`).
        """
        if self.axis_name is None:
            return self
        if not isinstance(mesh, int) and self.axis_name not in mesh.shape:
            raise ValueError(
                f"{OWNER}: `axis_name` {self.axis_name!r} is not an axis of the mesh, which has "
                f"{', '.join(map(repr, mesh.shape))}."
            )
        size = mesh if isinstance(mesh, int) else mesh.shape[self.axis_name]
        sized = dataclasses.replace(self, num_shards=size)
        sized.layout()
        return sized

    def layout(self) -> TableLayout:
        """Where the rows lie, on as many devices as the axis has here."""
        if self.axis_name is None:
            return layout_of(self.tables, 1)
        if is_bound(self.axis_name):
            return layout_of(self.tables, num_devices(self.axis_name), self.axis_name)
        if self.num_shards is None and any(t.shard == "table" for t in self.tables.values()):
            raise ValueError(
                f'{OWNER}: where tables with shard="table" lie depends on the number of devices: '
                "say it with `over(mesh)`."
            )
        # Others are stored alike for 1, 2, 4, ... 64 devices.
        return layout_of(self.tables, self.num_shards or 1, self.axis_name)

    def bags_of(self, batch: PyTree) -> dict[str, Bags]:
        """The bags of a batch by feature, as `inputs` finds them; see `js.embeddings`.

        Raises:
          ValueError: the batch has none of the features, or `inputs` returns something else.
        """
        return bags_of(batch, tuple(self.features), self.inputs)

    def exchange_ids(self, bags: Mapping[str, Any]) -> Requests:
        """Makes the ids of this device distinct and tells the devices that hold their rows.

        Depends on the ids alone, so it can run while a step computes. Under the axis.

        Args:
          bags: of this device, ids or `js.Bags` by feature; features may be missing.

        Returns:
          What `lookup`, `pooled` and `send_back` need.

        Communication: one all-to-all of devices * capacity int32 for all tables together; for those
          with `shard="column"` one all-gather instead, of as many.
        """
        self._require_axis("exchange_ids")
        return ask_for_rows(self.layout(), self._by_table(bags), self.capacity)

    def request_specs(self, bags: Mapping[str, Any]) -> Any:
        """The `PartitionSpec` of every array of the `Requests` for such bags, for shard_map."""
        return specs_of_requests(self.layout(), self._by_table(bags))

    def metrics(self, requests: Requests) -> dict[str, jax.Array]:
        """What a step reports of this device's requests, each () int32, to be summed over devices.

        Returns:
          By table: `embeddings/NAME/asked`, distinct rows it needs; `embeddings/NAME/overflow`,
          those of them without a slot; `embeddings/NAME/invalid`, ids that are not in the table.

        Communication: none.
        """
        return metrics_of(requests)

    def num_refused(self, counts: Mapping[str, Any]) -> Any:
        """Return how many ids `refuse` would raise for, () int32, from what `metrics` returns.

        Communication: none.
        """
        return num_refused(counts, drop=self.overflow == "drop")

    def refuse(self, metrics: Mapping[str, Any]) -> None:
        """Raise `ValueError` where these metrics tell of what must not be; waits for them.

        Args:
          metrics: with those of `metrics`, summed or stacked; others are passed over.

        Raises:
          ValueError: ids that are not in their table; with `overflow="error"` ids without a slot.
        """
        refuse(metrics, self.tables, self.capacity, drop=self.overflow == "drop")

    def check(self, bags: Mapping[str, Any], *, num_parts: int = 1) -> None:
        """Looks at bags of the host in NumPy; those on devices are passed over.

        Args:
          bags: ids or `js.Bags` by feature.
          num_parts: equal parts, one behind the other, that the batch is split into, a device each.

        Raises:
          ValueError: an id that is not in its table, naming table, feature, id and row of the
            batch; padding of 64 bits below what devices can hold; with `overflow="error"` more
            distinct ids in a part than there are slots.
        """
        by_table = self._by_table(bags)
        for feature, given in bags_of(bags, tuple(self.features), lambda bags: bags).items():
            check_width(feature, given.ids)
        if self.overflow == "error":
            check_capacities(self.layout(), by_table, self.capacity, num_parts)

    def slots_needed(self, bags: Mapping[str, Any], *, num_parts: int = 1) -> dict[str, int]:
        """A `capacity` that would do for these bags of the host, by table.

        Args:
          bags: ids or `js.Bags` by feature; tables of which some ids are on devices are left out.
          num_parts: as in `check`.
        """
        found = slots_needed(self.layout(), self._by_table(bags), num_parts)
        return {name: max(parts) for name, parts in found.items()}

    def lookup(self, tables: Stored, requests: Requests) -> Stored:
        """The rows that this device asked for, in its slots. Under the axis.

        Args:
          tables: this device's part of the stored tables.
          requests: of `exchange_ids`.

        Returns:
          By stored array (slots, dim); an unused slot is 0.

        Communication: one all-to-all of devices * capacity rows for all tables of one dtype.
        """
        self._require_axis("lookup")
        return send_rows(self.layout(), read_rows(tables, requests.asked))

    def pooled(
        self, vectors: Stored, requests: Requests, params: PyTree | None = None
    ) -> dict[str, jax.Array]:
        """One vector per bag, or one per id where there is no pooling; local and differentiable.

        Args:
          vectors: of `lookup`.
          requests: of `exchange_ids`.
          params: dense parameters, for tables with `position_weights`.

        Returns:
          By feature, (batch, dim), or (batch, max_length, dim) without pooling.

        Raises:
          ValueError: weights of positions that `params` lacks, or of another shape.

        Communication: none. The same bits however the tables are shared.
        """
        places, tables_of = self.layout().places, self.features
        found = {}
        for feature, slots in requests.slots.items():
            own, weights = vectors[places[tables_of[feature]].store], requests.weights.get(feature)
            found[feature] = self._pool(feature, own, slots, weights, params)
        return found

    def send_back(self, gradients: Stored, requests: Requests) -> dict[str, RowGradient]:
        """The gradients of vectors, sent to where their rows lie and added up. Under the axis.

        Args:
          gradients: with respect to the vectors of `lookup`.
          requests: of `exchange_ids`.

        Returns:
          By stored array the sum over devices: distinct rows of this device, sorted, and float32
          values; padding is the number of rows. The sums are made device by device, in one order.

        Communication: one all-to-all of devices * capacity rows for all tables of one dtype, in it.
        """
        self._require_axis("send_back")
        stores = self.layout().stores
        blocks = [in_blocks(stores[name], gradients[name]) for name in requests.asked]
        arrived = swap_blocks(blocks, self.axis_name)
        return {
            name: add_up_rows(asked, values, stores[name].local_rows)
            for (name, asked), values in zip(requests.asked.items(), arrived, strict=True)
        }

    def apply(
        self,
        tables: Stored,
        state: RowwiseState,
        gradients: Mapping[str, RowGradient],
        *,
        active: jax.Array | None = None,
    ) -> tuple[Stored, RowwiseState]:
        """Moves the rows that have a gradient, and touches no others. Under the axis.

        Args:
          tables: this device's part of the stored tables.
          state: its part of the optimizer's state.
          gradients: of `send_back`; rows must be distinct.
          active: () bool; where False nothing changes, the number of updates included.

        Returns:
          New tables and state; donated ones are updated in place.

        Communication: as the optimizer states.
        """
        self._require_axis("apply")
        return apply_row_gradients(self.optimizer, self.layout(), tables, state, gradients, active)

    def init(self, key: Any) -> Stored:
        """First values of all stored tables, whole; those of `init_local` on all devices.

        Args:
          key: a PRNG key. A table's values depend on it, on the table's name and on nothing else,
            so they are the same for 1, 2, 4, ... 64 devices and however the table is shared.

        Communication: none.
        """
        return first_values(self.tables, self.layout(), key)

    def init_local(self, key: Any) -> Stored:
        """First values of this device's part, without ever making a whole table. Under the axis.

        Communication: none.
        """
        self._require_axis("init_local")
        return first_local_values(self.tables, self.layout(), key)

    def init_optimizer(self, tables: Stored) -> RowwiseState:
        """The optimizer's state before any update, for stored tables, whole or a device's part.

        Communication: none.
        """
        return first_state(self.optimizer, tables)

    def read(self, tables: Stored) -> Stored:
        """The tables (num_rows, dim) by name out of whole stored arrays.

        Communication: none under jit on one device; else what the compiler makes of it.
        """
        return read_tables(self.layout(), tables)

    def write(self, tables: Stored) -> Stored:
        """Whole stored arrays from tables (num_rows, dim) by name; undoes `read`.

        Raises:
          ValueError: a table that is missing, unknown or of another shape.
        """
        return write_tables(self.layout(), tables)

    def reference(
        self, tables: Stored, bags: Mapping[str, Any], params: PyTree | None = None
    ) -> dict[str, jax.Array]:
        """What `pooled` gives, from whole stored tables on one device, without the axis.

        Args:
          tables: whole stored tables.
          bags: ids or `js.Bags` by feature.
          params: as in `pooled`.

        Communication: none under jit on one device; else what the compiler makes of it.
        """
        layout, found, tables = self.layout(), {}, whole_on_each(tables)
        for name, own in self._by_table(bags).items():
            place = layout.places[name]
            for feature, b in own.items():
                slots = rows_as_slots(place, layout.stores[place.store], b.ids)
                found[feature] = self._pool(feature, tables[place.store], slots, b.weights, params)
        return found

    def _require_axis(self, method: str) -> None:
        """Raise `ValueError` unless the axis is bound here, with as many devices as was said."""
        if self.axis_name is None:
            return
        require_axes(f"{OWNER}.{method}", "axis_name", self.axis_name)
        size = num_devices(self.axis_name)
        if self.num_shards not in (None, size):
            raise ValueError(
                f"{OWNER}.{method}: axis {self.axis_name!r} has {size} devices here, and the "
                f"tables are for {self.num_shards} (see `over`)."
            )

    def _by_table(self, bags: Mapping[str, Any]) -> dict[str, dict[str, Bags]]:
        """Checked bags by feature, by table; in the order of the tables."""
        given = bags_of(bags, tuple(self.features), lambda bags: bags)
        found: dict[str, dict[str, Bags]] = {}
        for feature, name in self.features.items():
            if feature in given:
                own = host_checked(name, feature, self.tables[name].num_rows, given[feature])
                found.setdefault(name, {})[feature] = own
        return found

    def _pool(
        self,
        feature: str,
        vectors: jax.Array,
        slots: jax.Array,
        weights: jax.Array | None,
        params: PyTree | None,
    ) -> jax.Array:
        table = self.tables[self.features[feature]]
        leaf = table.position_weights_of(feature)
        own = None if leaf is None else position_weights_in(params, leaf, feature, slots)
        return pool(vectors, slots, table.pooling, weights, own)
