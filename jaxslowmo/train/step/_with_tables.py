"""An update with embedding tables: what their rows add to the loss, the optimizer, the exchange.

Parameters are `WithTables(dense, tables)`, and so is the state of the optimizer. Everything up to
the exchange of parameters runs on each device's own part of the tables. The exchange handles tables
like other leaves that are sharded inside a replica.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ..._support.types import Phase, PyTree
from ...embedding import (
    PREFIX,
    BatchWithVectors,
    Embeddings,
    PrefetchedRows,
    PrefetchOptions,
    Requests,
    WithTables,
    init_table_state,
    read_rows,
    refresh_vectors,
    replicate_tables,
    send_rows,
)
from ...gradients import ReadyOrder
from ...gradients.precision import (
    DynamicLossScaleState,
    any_over,
    did_skip,
    revert_if,
    scale_metrics,
    zero_if,
)
from ...gradients.sparse import WithRows, mean_rows
from ...mesh import AnyMesh, Roles, axis_size, sum_over
from ...transform import (
    StackedReplicas,
    prevent_fusion,
    spec_of,
    unless_idle,
    unreplicate_number,
    unseen_zero,
)
from ...tree import all_finite, parts_of
from .._train_state import TrainState
from ._averaging import Averaging
from ._checks import check_optimizer_with_tables
from ._gradients import (
    BatchGradients,
    Gradients,
    GradientWindow,
    LossData,
    Metrics,
    StepInputs,
    merge_metrics,
    restore_statistics_if,
)
from ._update import Layout, PendingUpdate, ReducedGradients, Update, with_update_key


class PendingWithTables(NamedTuple):
    """The results of an update before the exchange of parameters.

    Attributes:
      dense: the update of the dense parameters.
      tables: this device's part of the tables, after their update.
      tables_state: its part of the state of their optimizer.
    """

    dense: PendingUpdate
    tables: PyTree
    tables_state: PyTree


class RequestedBatch(NamedTuple):
    """A device's part of a batch and the rows that it requested.

    Attributes:
      batch: the batch as the step received it.
      requests: the rows that this device uses, and those that others request from it.
      vectors: requested rows by stored array.
      counts: `Embeddings.metrics` of the requests, summed over the devices of the replica; zeros on
        a replica of weight 0, whose batch may hold anything.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree
    counts: dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class TableBatches(BatchGradients):
    """The loss function of batches that come as `RequestedBatch`, with the rows that they need.

    Attributes:
      embeddings: the tables.
    """

    embeddings: Embeddings

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch; see `BatchGradients.evaluate`."""
        batch, _ = self._pool(inputs.batch, state.params)
        metrics = super().evaluate(state, inputs._replace(batch=batch))
        return merge_metrics(metrics, inputs.batch.counts)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which gradients of dense leaves are ready."""

        def pooled_batch(batch: PyTree, params: PyTree) -> BatchWithVectors:
            return self._pool(batch, params)[0]

        return super().ready_order(state, jax.eval_shape(pooled_batch, batch, state.params))

    def _pool(
        self, requested: RequestedBatch, params: PyTree
    ) -> tuple[BatchWithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
        """Return a batch with its pooled vectors, and the function that pulls back their gradients.

        That function returns the gradients of the rows and of `params`, the dense parameters.
        """
        pool = partial(self.embeddings.pooled, requests=requested.requests)
        embedded, pull = jax.vjp(lambda x, p: pool(x, params=p), requested.vectors, params)
        return BatchWithVectors(requested.batch, embedded), pull

    def _batch_gradients(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        requested, key, model_state = data
        embeddings = self.embeddings

        def compute(
            requested: RequestedBatch, params: PyTree, key: Any, model_state: PyTree
        ) -> Any:
            batch, pull = self._pool(requested, params)
            results, grads, of_embedded = self.differentiate(state, params, batch, key, model_state)
            of_vectors, of_dense = pull(of_embedded)
            # Position weights are dense parameters that are used before the loss.
            grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
            return results, grads, of_vectors, batch

        source = next(iter(requested.vectors.values()))
        results, grads, of_vectors, batch = prevent_fusion(
            compute, source, requested, state.params, key, model_state
        )
        metrics, new_model_state = results
        if "loss_weight" in metrics:
            raise ValueError(
                "`loss_fn` with `embeddings` must return the mean loss of a device's examples, got "
                "a pair (sum, weight), by which rows are not weighted."
            )
        devices = axis_size(embeddings.axis_name or ())
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, of_vectors)
        rows = embeddings.send_back(scaled, requested.requests)
        metrics = self._replica_metrics(metrics, weight)
        refused = embeddings.num_errors(requested.counts)
        data = LossData(batch, key, model_state)
        return Gradients(grads, metrics, new_model_state, weight, data, rows, refused)


@dataclass(frozen=True, kw_only=True)
class UpdateWithTables(Update):
    """An update of a step with tables, which also starts the lookup of `inputs.upcoming`.

    Methods take `ahead`, which says how much of that lookup is done.
    """

    embeddings: Embeddings

    @classmethod
    def from_dense_update(cls, update: Update, embeddings: Embeddings) -> Self:
        """Return an update of tables, too, from one of dense parameters."""
        dense_loss = update.differentiated_loss

        def loss(params: PyTree, batch: BatchWithVectors, **context: Any) -> Any:
            return dense_loss.loss(params, batch.batch, embedded=batch.embedded, **context)

        fields: dict[str, Any] = {**vars(dense_loss), "loss": loss}
        differentiated_loss = TableBatches(**fields, embeddings=embeddings)
        fields = {**vars(update), "differentiated_loss": differentiated_loss}
        return cls(**fields, embeddings=embeddings)

    # One update.

    @property
    def pending_roles(self) -> Roles:
        """The roles of the first result of `prepare_update`."""
        return PendingWithTables._make(
            ("stacked", self.embeddings.specs, self.embeddings.optimizer_specs)
        )

    def prepare_update(
        self,
        state: TrainState,
        inputs: StepInputs,
        *,
        like: Any = None,
        computed: None = None,
        ahead: PrefetchOptions,
    ) -> tuple[PendingWithTables, Metrics, Any]:
        """Make one update of dense parameters and tables; see `Update.prepare_update`.

        The third result is the request of the next batch, and the rows that have changed.
        """
        dense, counts = with_update_key(dense_state(state)), Metrics()
        if inputs.batch is None:
            batch = jax.eval_shape(self._request_rows, state, StepInputs(like)).batch
        else:
            inputs = self._request_rows(state, inputs)
            batch, counts = inputs.batch, inputs.batch.counts
        lookup, read = self._start_lookup(state, inputs.upcoming, ahead)
        gradients, metrics = self.differentiated_loss.compute_gradients(dense, inputs)
        reduced = self.reduce_gradients(dense, gradients, batch)
        dense_pending, active = self._dense_update(dense, reduced, gradients)
        # Without a dependency XLA may order the update before the reads, and copies the whole table
        # so that they see the old values. (An optimization barrier is not enough: jax 0.10 removes
        # it before XLA decides on copies.)
        zero = sum(map(unseen_zero, jax.tree.leaves(read)), jnp.zeros([], jnp.int32))
        rows = reduced.grads.rows
        rows = {name: dataclasses.replace(g, rows=g.rows + zero) for name, g in rows.items()}
        with jax.named_scope("optimizer"):
            tables, tables_state = self.embeddings.apply(
                state.params.tables, state.opt_state.tables, rows, active=active
            )
        changed = {name: g.rows for name, g in rows.items()}
        scales = scale_metrics(dense.opt_state, dense_pending.optimizer_state)
        pending = PendingWithTables(dense_pending, tables, tables_state)
        return pending, merge_metrics(merge_metrics(metrics, counts), scales), (lookup, changed)

    def update_replicas(
        self,
        map_fn: Any,
        mesh: AnyMesh | AbstractMesh,
        state: TrainState,
        inputs: StepInputs,
        roles: StepInputs,
        *,
        phase: Phase | None = None,
        ahead: PrefetchOptions,
        **static: Any,
    ) -> tuple[TrainState, Metrics, PrefetchedRows | None]:
        """Run one update, and send rows of the next batch again that it has changed."""
        new, metrics, (lookup, changed) = super().update_replicas(
            *(map_fn, mesh, state, inputs, roles), phase=phase, ahead=ahead, **static
        )
        if lookup is None or not ahead.patches:
            return new, metrics, lookup
        moves: Any = self.sync is not None and phase != ()
        if self.sync is not None and phase is None:
            moves = self.sync.due(unreplicate_number(new.step, mesh=mesh, axis_name=self.axis_name))

        def patch(
            tables: PyTree, lookup: PrefetchedRows, changed: Any, moves: Any, weight: Any
        ) -> Any:
            layout, extra = self.embeddings.layout(), {"room": ahead.room, "everything": moves}
            vectors, resent = refresh_vectors(layout, tables, *lookup, changed, **extra)
            counts = {
                f"{PREFIX}{name}/resent": sum_over(n, self.inner_axes) for name, n in resent.items()
            }
            return lookup._replace(vectors=vectors), unless_idle(counts, weight)

        in_roles = self.embeddings.specs, "device", "device", "shared", "stacked"
        map_patch = map_fn(patch, in_roles, ("device", "stacked"))
        lookup, resent = map_patch(new.params.tables, lookup, changed, moves, inputs.weight)
        return new, {**metrics, **resent}, lookup

    def open_window(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int
    ) -> GradientWindow:
        """Return an empty window that can hold the rows of so many batches."""
        inputs = self._request_rows(state, inputs)
        return super().open_window(dense_state(state), inputs, num_batches=num_batches)

    def collect(
        self, state: TrainState, inputs: StepInputs, *, fits_window: bool, ahead: PrefetchOptions
    ) -> tuple[GradientWindow, Metrics, PrefetchedRows | None]:
        """Add a batch to a window. No row changes, so none is sent again for the next batch."""
        inputs = self._request_rows(state, inputs)
        lookup, _ = self._start_lookup(state, inputs.upcoming, ahead)
        window, metrics, _ = super().collect(dense_state(state), inputs, fits_window=fits_window)
        return window, merge_metrics(metrics, inputs.batch.counts), lookup

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass."""
        return super().evaluate(dense_state(state), self._request_rows(state, inputs))

    def start_lookup(
        self, state: TrainState, inputs: StepInputs, *, ahead: PrefetchOptions
    ) -> PrefetchedRows | None:
        """Start the lookup of a batch without a step; of a carry, read its rows in this state."""
        return self._start_lookup(state, inputs.batch, ahead, inputs.carry)[0]

    # Rows.

    def _request_rows(self, state: TrainState, inputs: StepInputs) -> StepInputs:
        """Return the inputs with a `RequestedBatch` as the batch.

        Communication: that of `_start_lookup`, unless an earlier step has done it already, and one
          all-reduce of the counts inside a replica.
        """
        carry = inputs.carry
        if carry is None or carry.vectors is None:
            carry, _ = self._start_lookup(state, inputs.batch, PrefetchOptions(vectors=True), carry)
        assert carry is not None, "there is a batch"
        metrics = self.embeddings.metrics(carry.requests)
        counts = {name: sum_over(count, self.inner_axes) for name, count in metrics.items()}
        batch = RequestedBatch(inputs.batch, *carry, unless_idle(counts, inputs.weight))
        return inputs._replace(batch=batch)

    def _start_lookup(
        self,
        state: TrainState,
        batch: PyTree,
        ahead: PrefetchOptions,
        carry: PrefetchedRows | None = None,
    ) -> tuple[PrefetchedRows | None, PyTree]:
        """Return the request of a batch, None without one, and the rows read for it.

        Of an earlier request `carry` only the rows are read again.

        Communication: that of `Embeddings.exchange_ids`; if rows are looked up, too, one all-to-all
          of them per table.
        """
        embeddings = self.embeddings
        if batch is None and carry is None:
            return None, ()
        if carry is None:
            carry = PrefetchedRows(embeddings.exchange_ids(embeddings.bags_of(batch)), None)
        if not ahead.vectors:
            return carry, ()
        read = read_rows(state.params.tables, carry.requests.asked)
        return carry._replace(vectors=send_rows(embeddings.layout(), read)), read

    # What tables add to other methods.

    def average_inner_axes(
        self, local_gradients: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> WithRows:
        """Return the gradients with those of rows, averaged over axes inside a replica."""
        dense = super().average_inner_axes(local_gradients, axes, order)
        # Devices along other inner axes have other examples, but the same rows.
        others = tuple(n for n in self.inner_axes if n != self.embeddings.axis_name)
        over = () if self.embeddings.axis_name is None else (self.embeddings.axis_name,)
        return WithRows(dense, mean_rows(local_gradients.rows, others), self.inner_axes, over)

    def unreduced_axes(
        self, state: PyTree, inner_axes: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        """Return the inner axes over which the step must average dense gradients."""
        axes, axis = super().unreduced_axes(state, inner_axes), self.embeddings.axis_name
        if self.gradients is None or axes or axis is None:
            return axes
        # A transform may reduce over the replicas only, and leave the axis of the tables.
        return () if axis in spec_of(self.gradients).axes else (axis,)

    def _dense_update(
        self, state: TrainState, reduced: ReducedGradients, local_gradients: Gradients
    ) -> tuple[PendingUpdate, jax.Array]:
        """Return the update of dense parameters, and whether rows are updated, () bool.

        An update whose batch has ids that are in no table changes nothing: its results are NaN.
        """
        grads, before, finite = reduced.grads, state.opt_state, None
        if parts_of(before, DynamicLossScaleState):
            finite = ~any_over(~all_finite(grads.rows), self.inner_axes, None)
        pending = self.compute_update(
            state, reduced._replace(grads=grads.dense), local_gradients, finite
        )
        refused = self._has_wrong_ids(state, local_gradients)
        skipped = did_skip(before, pending.optimizer_state)
        skipped = refused if skipped is None else refused | skipped
        pending = pending._replace(
            updates=zero_if(refused, pending.updates),
            optimizer_state=revert_if(refused, pending.optimizer_state, before),
            # Counters must count this update, since they decide when gradients are exchanged.
            gradients_state=restore_statistics_if(
                refused, pending.gradients_state, state.exchange.gradients
            ),
            model_state=restore_statistics_if(refused, pending.model_state, state.model_state),
        )
        return pending, ~skipped if pending.is_active is None else pending.is_active & ~skipped

    def _has_wrong_ids(self, state: TrainState, local_gradients: Gradients) -> jax.Array:
        """Return whether a batch of this update has wrong ids, () bool.

        If one replica refuses, the mean of gradients is useless on all.
        """
        assert local_gradients.refused is not None, "a `RequestedBatch` counts them"
        fraction = (local_gradients.refused > 0).astype(local_gradients.metrics["loss"].dtype)
        averaging = Averaging.from_transform(
            self.gradients, state.exchange.gradients, self.axis_name
        )
        return averaging.mean(fraction, None) > 0

    def exchange_params(
        self,
        state: TrainState,
        shared: PyTree,
        pending: PendingWithTables,
        count: jax.Array,
        phase: Phase | None,
        stacked: StackedReplicas,
    ) -> tuple[TrainState, PyTree]:
        """Return a replica's state, and the shared state, after the exchange of parameters.

        Tables take part as they are after their update.
        """
        dense, tables, tables_state = pending
        state = state._replace(params=WithTables(state.params.dense, tables))
        updates = WithTables(dense.updates, jax.tree.map(lambda _: None, tables))
        dense = dense._replace(updates=updates)
        new, shared = super().exchange_params(state, shared, dense, count, phase, stacked)
        return new._replace(opt_state=WithTables(new.opt_state, tables_state)), shared

    # States, and their layout.

    def loss_input_types(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return the types of what the loss function receives; see `Update.loss_input_types`."""

        def look_up(params: WithTables, batch: PyTree) -> PyTree:
            bags = self.embeddings.bags_of(batch)
            return self.embeddings.reference(params.tables, bags, params.dense)

        return params.dense, BatchWithVectors(batch, jax.eval_shape(look_up, params, batch))

    def dense(self, tree: PyTree) -> PyTree:
        """Return the part of a tree for the dense parameters; other values are returned as is."""
        return tree.dense if isinstance(tree, WithTables) else tree

    def check_optimizer(self, state: PyTree, unknown: list[PyTree]) -> None:
        """Raise `ValueError` for an optimizer that does what rows of tables would need, too."""
        check_optimizer_with_tables(state, unknown)

    def state_roles(self, state: TrainState) -> Roles:
        """Return the roles of a state, each of whose devices has its part of the tables."""
        roles: Any = TrainState._make(["stacked"] * len(TrainState._fields))
        roles = roles._replace(params=WithTables("stacked", self.embeddings.specs))
        if not state.opt_state:  # an evaluation has none
            return roles
        return roles._replace(opt_state=WithTables("stacked", self.embeddings.optimizer_specs))

    def init_optimizers(self, stacked: PyTree, mesh: AnyMesh) -> tuple[PyTree, PyTree]:
        """Return the first states of gradient transform and optimizers."""
        gradients, optimizer = super().init_optimizers(stacked.dense, mesh)
        mesh_kwargs: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        tables = init_table_state(self.embeddings, stacked.tables, **mesh_kwargs)
        return gradients, WithTables(optimizer, tables)

    def replicate_params(self, params: PyTree, seed: int, mesh: AnyMesh) -> WithTables:
        """Return dense parameters and tables of all replicas; tables that are not given are new."""
        dense, tables = params if isinstance(params, WithTables) else (params, None)
        mesh_kwargs: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        dense = super().replicate_params(dense, seed, mesh)
        return WithTables(dense, replicate_tables(self.embeddings, tables, seed, **mesh_kwargs))

    @property
    def maps_inner_axes(self) -> bool:
        """True: rows of tables are looked up for the examples of one device."""
        return True

    def layout(
        self, mesh: AnyMesh, sharded_axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> Layout:
        """Return the layout of states, in which tables have the specs with which they are made."""
        axis = self.embeddings.axis_name
        table_axes = frozenset(() if axis is None else (axis,))
        layout = super().layout(mesh, sharded_axes - table_axes, specs, params)
        if axis is None:
            return layout
        if specs is None:
            dense = P() if params is None else jax.tree.map(lambda _: P(), params.dense)
        else:
            dense = specs.dense
        return layout._replace(
            auto_axes=layout.auto_axes | table_axes,
            specs=WithTables(dense, self.embeddings.specs),
        )

    def with_layout(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        new = super().with_layout(layout)
        return dataclasses.replace(new, param_specs=self.dense(layout.specs))


def dense_state(state: TrainState) -> TrainState:
    """Return the state with dense parameters and the state of their optimizer only."""
    optimizer = state.opt_state.dense if state.opt_state else state.opt_state
    return state._replace(params=state.params.dense, opt_state=optimizer)
