"""An update with embedding tables: what their rows add to the loss, the optimizer, the exchange.

Parameters are `WithTables(dense, tables)`, and so is the state of the optimizer. Everything up to
the exchange of parameters runs on each device's own part of the tables. The exchange handles tables
like other leaves that are sharded inside a replica.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._support.types import Phase, PyTree
from ...embedding import (
    PREFIX,
    Ahead,
    Carry,
    Embeddings,
    Requests,
    WithTables,
    WithVectors,
    patched_rows,
    read_rows,
    send_rows,
    stacked_table_state,
    stacked_tables,
)
from ...gradients.precision import (
    DynamicLossScaleState,
    anywhere,
    as_before_if,
    scale_metrics,
    was_skipped,
    zero_if,
)
from ...gradients.reducer import ReadyOrder
from ...gradients.sparse import WithRows, mean_rows
from ...mesh import AnyMesh, Roles, axis_size, sum_over
from ...transform import StackedReplicas, prevent_fusion, spec_of, unless_idle, unseen_zero
from ...tree import all_finite, parts_of
from .._train_state import TrainState
from ._gradients import (
    BatchGradients,
    Gradients,
    GradientWindow,
    LossData,
    Metrics,
    StepInputs,
    joined,
    statistics_before_if,
)
from ._optimized import Averaging
from ._parts import Layout
from ._transforms import check_optimizer_with_tables
from ._update import Pending, Reduced, Update, keyed


class Done(NamedTuple):
    """The results of an update before the exchange of parameters.

    Attributes:
      pending: the update of the dense parameters.
      tables: this device's part of the tables, after their update.
      tables_state: its part of the state of their optimizer.
    """

    pending: Pending
    tables: PyTree
    tables_state: PyTree


class Requested(NamedTuple):
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
    """The loss function of batches that come as `Requested`, with the rows that they need.

    Attributes:
      embeddings: the tables.
    """

    embeddings: Embeddings

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch; see `BatchGradients.evaluated`."""
        seen, _ = self._pooled(inputs.batch, state.params)
        metrics = super().evaluated(state, inputs._replace(batch=seen))
        return joined(metrics, inputs.batch.counts)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which gradients of dense leaves are ready."""

        def seen(batch: PyTree, params: PyTree) -> WithVectors:
            return self._pooled(batch, params)[0]

        return super().ready_order(state, jax.eval_shape(seen, batch, state.params))

    def _pooled(
        self, requested: Requested, params: PyTree
    ) -> tuple[WithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
        """Return a batch with its pooled vectors, and the function that pulls back their gradients.

        That function returns the gradients of the rows and of `params`, the dense parameters.
        """
        pool = partial(self.embeddings.pooled, requests=requested.requests)
        embedded, pull = jax.vjp(lambda x, p: pool(x, params=p), requested.vectors, params)
        return WithVectors(requested.batch, embedded), pull

    def _of_batch(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        requested, key, seen = data
        embeddings = self.embeddings

        def compute(requested: Requested, params: PyTree, key: Any, seen: PyTree) -> Any:
            batch, pull = self._pooled(requested, params)
            results, grads, of_embedded = self.differentiated(state, params, batch, key, seen)
            of_vectors, of_dense = pull(of_embedded)
            # Position weights are dense parameters that are used before the loss.
            grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
            return results, grads, of_vectors, batch

        source = next(iter(requested.vectors.values()))
        results, grads, of_vectors, batch = prevent_fusion(
            compute, source, requested, state.params, key, seen
        )
        metrics, model_state = results
        if "loss_weight" in metrics:
            raise ValueError(
                "`loss_fn` of a step with `embeddings` must return a loss, the mean over the "
                "examples of a device, got a pair (sum, weight), by which rows are not weighted."
            )
        devices = axis_size(embeddings.axis_name or ())
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, of_vectors)
        rows = embeddings.send_back(scaled, requested.requests)
        metrics = self._of_replica(metrics, weight)
        refused = embeddings.num_refused(requested.counts)
        data = LossData(batch, key, seen)
        return Gradients(grads, metrics, model_state, weight, data, rows, refused)


@dataclass(frozen=True, kw_only=True)
class UpdateWithTables(Update):
    """An update of a step with tables, which also starts the lookup of `inputs.upcoming`.

    Methods take `ahead`, which says how much of that lookup is done.
    """

    embeddings: Embeddings

    @classmethod
    def of(cls, update: Update, embeddings: Embeddings) -> Self:
        """Return an update of tables, too, from one of dense parameters."""

        def loss(params: PyTree, batch: WithVectors, **context: Any) -> Any:
            return update.batches.loss(params, batch.batch, embedded=batch.embedded, **context)

        of_batches: dict[str, Any] = {**vars(update.batches), "loss": loss}
        batches = TableBatches(**of_batches, embeddings=embeddings)
        return cls(**{**vars(update), "batches": batches}, embeddings=embeddings)

    # One update.

    extra_roles: ClassVar[str] = "device"

    @property
    def pending_roles(self) -> Roles:
        """The roles of the first result of `prepared`."""
        return Done._make(("stacked", self.embeddings.specs, self.embeddings.optimizer_specs))

    def prepared(
        self, state: TrainState, inputs: StepInputs, *, like: Any = None, ahead: Ahead
    ) -> tuple[Done, Metrics, Any]:
        """Make one update of dense parameters and tables; see `Update.prepared`.

        The third result is the request of the next batch, and the rows that have changed.
        """
        dense, counts = keyed(dense_state(state)), Metrics()
        if inputs.batch is None:
            seen = jax.eval_shape(self._requested, state, StepInputs(like)).batch
        else:
            inputs = self._requested(state, inputs)
            seen, counts = inputs.batch, inputs.batch.counts
        following, read = self._following(state, inputs.upcoming, ahead)
        gathered, metrics = self.batches.gathered(dense, inputs)
        reduced = self.reduced(dense, gathered, seen)
        pending, active = self._dense_update(dense, reduced, gathered)
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
        scales = scale_metrics(dense.opt_state, pending.optimizer_state)
        done = Done(pending, tables, tables_state)
        return done, joined(joined(metrics, counts), scales), (following, changed)

    def completed(
        self,
        mapped: Any,
        old: TrainState,
        new: TrainState,
        inputs: StepInputs,
        metrics: Metrics,
        extra: Any,
        count: jax.Array,
        phase: Phase | None,
        *,
        ahead: Ahead,
        like: Any = None,
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Return new state, metrics, and the request of the next batch, of which rows moved."""
        del old, like
        following, changed = extra
        if following is None or not ahead.patches:
            return new, metrics, following
        moves: Any = self.sync is not None and phase != ()
        if self.sync is not None and phase is None:
            moves = self.sync.due(count)

        def patch(tables: PyTree, following: Carry, changed: Any, moves: Any, weight: Any) -> Any:
            layout, where = self.embeddings.layout(), {"room": ahead.room, "everything": moves}
            vectors, resent = patched_rows(layout, tables, *following, changed, **where)
            counts = {
                f"{PREFIX}{name}/resent": sum_over(n, self.inner_axes) for name, n in resent.items()
            }
            return following._replace(vectors=vectors), unless_idle(counts, weight)

        roles = self.embeddings.specs, "device", "device", "shared", "stacked"
        given = new.params.tables, following, changed, moves, inputs.weight
        following, resent = mapped(patch, roles, ("device", "stacked"))(*given)
        return new, {**metrics, **resent}, following

    def opened(self, state: TrainState, inputs: StepInputs, *, num_batches: int) -> GradientWindow:
        """Return an empty window with room for the rows of so many batches."""
        inputs = self._requested(state, inputs)
        return super().opened(dense_state(state), inputs, num_batches=num_batches)

    def collected(
        self, state: TrainState, inputs: StepInputs, *, fits: bool, ahead: Ahead
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window. No row changes, so none is sent again for the next batch."""
        inputs = self._requested(state, inputs)
        following, _ = self._following(state, inputs.upcoming, ahead)
        window, metrics, _ = super().collected(dense_state(state), inputs, fits=fits)
        return window, joined(metrics, inputs.batch.counts), following

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass."""
        return super().evaluated(dense_state(state), self._requested(state, inputs))

    def asked(self, state: TrainState, inputs: StepInputs, *, ahead: Ahead) -> Carry | None:
        """Start the lookup of a batch without a step; of a carry, read its rows in this state."""
        return self._following(state, inputs.batch, ahead, inputs.carry)[0]

    # Rows.

    def _requested(self, state: TrainState, inputs: StepInputs) -> StepInputs:
        """Return the inputs with a `Requested` as the batch.

        Communication: that of `_following`, unless an earlier step has done it already, and one
          all-reduce of the counts inside a replica.
        """
        carry = inputs.carry
        if carry is None or carry.vectors is None:
            carry, _ = self._following(state, inputs.batch, Ahead(vectors=True), carry)
        assert carry is not None, "there is a batch"
        metrics = self.embeddings.metrics(carry.requests)
        counts = {name: sum_over(count, self.inner_axes) for name, count in metrics.items()}
        batch = Requested(inputs.batch, *carry, unless_idle(counts, inputs.weight))
        return inputs._replace(batch=batch)

    def _following(
        self, state: TrainState, batch: PyTree, ahead: Ahead, carry: Carry | None = None
    ) -> tuple[Carry | None, PyTree]:
        """Return the request of a batch, None without one, and the rows read for it.

        Of an earlier request `carry` only the rows are read again.

        Communication: that of `Embeddings.exchange_ids`; if rows are looked up, too, one all-to-all
          of them per table.
        """
        embeddings = self.embeddings
        if batch is None and carry is None:
            return None, ()
        if carry is None:
            carry = Carry(embeddings.exchange_ids(embeddings.bags_of(batch)), None)
        if not ahead.vectors:
            return carry, ()
        read = read_rows(state.params.tables, carry.requests.asked)
        return carry._replace(vectors=send_rows(embeddings.layout(), read)), read

    # What tables add to its parts.

    def means_inside(
        self, gathered: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> WithRows:
        """Return the gradients with those of rows, averaged over axes inside a replica."""
        dense = super().means_inside(gathered, axes, order)
        # Devices along other inner axes have other examples, but the same rows.
        others = tuple(n for n in self.inner_axes if n != self.embeddings.axis_name)
        over = () if self.embeddings.axis_name is None else (self.embeddings.axis_name,)
        return WithRows(dense, mean_rows(gathered.rows, others), self.inner_axes, over)

    def lacking(self, state: PyTree, inner_axes: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return the inner axes over which the step must average dense gradients."""
        lacking, axis = super().lacking(state, inner_axes), self.embeddings.axis_name
        if self.gradients is None or lacking or axis is None:
            return lacking
        # A transform may reduce over the replicas only, and leave the axis of the tables.
        return () if axis in spec_of(self.gradients).axes else (axis,)

    def _dense_update(
        self, state: TrainState, reduced: Reduced, gathered: Gradients
    ) -> tuple[Pending, jax.Array]:
        """Return the update of dense parameters, and whether rows are updated, () bool.

        An update whose batch has ids that are in no table changes nothing: its results are NaN.
        """
        grads, before, finite = reduced.grads, state.opt_state, None
        if parts_of(before, DynamicLossScaleState):
            finite = ~anywhere(~all_finite(grads.rows), self.inner_axes, None)
        pending = self.optimized(state, reduced._replace(grads=grads.dense), gathered, finite)
        refused = self._refused(state, gathered)
        skipped = was_skipped(before, pending.optimizer_state)
        skipped = refused if skipped is None else refused | skipped
        pending = pending._replace(
            updates=zero_if(refused, pending.updates),
            optimizer_state=as_before_if(refused, pending.optimizer_state, before),
            # Counters must count this update, since they decide when gradients are exchanged.
            gradients_state=statistics_before_if(
                refused, pending.gradients_state, state.exchange.gradients
            ),
            model_state=statistics_before_if(refused, pending.model_state, state.model_state),
        )
        return pending, ~skipped if pending.takes is None else pending.takes & ~skipped

    def _refused(self, state: TrainState, gathered: Gradients) -> jax.Array:
        """Return whether a batch of this update has wrong ids, () bool.

        If one replica refuses, the mean of gradients is useless on all.
        """
        assert gathered.refused is not None, "a `Requested` counts them"
        share = (gathered.refused > 0).astype(gathered.metrics["loss"].dtype)
        averaging = Averaging.of(self.gradients, state.exchange.gradients, self.axis_name)
        return averaging.mean(share, None) > 0

    def exchanged(
        self,
        state: TrainState,
        shared: PyTree,
        update: Done,
        count: jax.Array,
        phase: Phase | None,
        stacked: StackedReplicas,
    ) -> tuple[TrainState, PyTree]:
        """Return a replica's state, and the shared state, after the exchange of parameters.

        Tables take part as they are after their update.
        """
        pending, tables, tables_state = update
        state = state._replace(params=WithTables(state.params.dense, tables))
        updates = WithTables(pending.updates, jax.tree.map(lambda _: None, tables))
        pending = pending._replace(updates=updates)
        new, shared = super().exchanged(state, shared, pending, count, phase, stacked)
        return new._replace(opt_state=WithTables(new.opt_state, tables_state)), shared

    # The states of its parts, and their layout.

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Return the types of what the loss function receives; see `Parts.seen_by_loss`."""

        def look_up(params: WithTables, batch: PyTree) -> PyTree:
            bags = self.embeddings.bags_of(batch)
            return self.embeddings.reference(params.tables, bags, params.dense)

        return params.dense, WithVectors(share, jax.eval_shape(look_up, params, share))

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

    def first_optimizer_states(self, stacked: PyTree, mesh: AnyMesh) -> tuple[PyTree, PyTree]:
        """Return the first states of gradient transform and optimizers."""
        gradients, optimizer = super().first_optimizer_states(stacked.dense, mesh)
        where: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        tables = stacked_table_state(self.embeddings, stacked.tables, **where)
        return gradients, WithTables(optimizer, tables)

    def stacked(self, params: PyTree, seed: int, mesh: AnyMesh) -> WithTables:
        """Return dense parameters and tables of all replicas; tables that are not given are new."""
        dense, tables = params if isinstance(params, WithTables) else (params, None)
        where: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        dense = super().stacked(dense, seed, mesh)
        return WithTables(dense, stacked_tables(self.embeddings, tables, seed, **where))

    @property
    def maps_inner_axes(self) -> bool:
        """True: rows of tables are looked up for the examples of one device."""
        return True

    def layout(
        self, mesh: AnyMesh, axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> Layout:
        """Return the layout of states, in which tables have the specs with which they are made."""
        axis = self.embeddings.axis_name
        own = frozenset(() if axis is None else (axis,))
        layout = super().layout(mesh, axes - own, specs, params)
        if axis is None:
            return layout
        if specs is None:
            dense = P() if params is None else jax.tree.map(lambda _: P(), params.dense)
        else:
            dense = specs.dense
        return layout._replace(
            axes=layout.axes | own, specs=WithTables(dense, self.embeddings.specs)
        )

    def laid_out(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        new = super().laid_out(layout)
        return dataclasses.replace(new, param_specs=self.dense(layout.specs))


def dense_state(state: TrainState) -> TrainState:
    """Return the state with dense parameters and the state of their optimizer only."""
    optimizer = state.opt_state.dense if state.opt_state else state.opt_state
    return state._replace(params=state.params.dense, opt_state=optimizer)
