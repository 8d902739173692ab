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
import optax
from jax.sharding import PartitionSpec as P

from ..._support.types import Phase, PyTree
from ...embedding import Ahead, Carry, Lookup, WithTables
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
from ...mesh import AnyMesh
from ...transform import StackedReplicas, note_followed, spec_of, unless_idle
from ...tree import all_finite, parts_of
from .._train_state import TrainState
from ._gradients import (
    INPUT_ROLES,
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

# Inputs stacked over the replicas are, inside of one replica, the same on all devices.
INNER_ROLES: Any = jax.tree.map(lambda r: "shared" if r == "stacked" else r, INPUT_ROLES)
WINDOW_ROLES: Any = INNER_ROLES.window


class Local(NamedTuple):
    """A device's part of the state.

    Attributes:
      dense: state with the dense parameters and the state of their optimizer only.
      stored: its part of the tables.
      stored_state: its part of the state of their optimizer; None in an evaluation.
    """

    dense: TrainState
    stored: PyTree
    stored_state: PyTree


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


@dataclass(frozen=True, kw_only=True)
class TableBatches(BatchGradients):
    """The loss function of batches that come as `Requested`, with the rows that they need."""

    lookup: Lookup

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch; see `BatchGradients.evaluated`."""
        seen = self.lookup.seen(inputs.batch, state.params)
        metrics = super().evaluated(state, inputs._replace(batch=seen))
        return joined(metrics, inputs.batch.counts)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which gradients of dense leaves are ready."""
        return super().ready_order(state, jax.eval_shape(self.lookup.seen, batch, state.params))

    def _of_batch(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        requested, key, seen = data
        (metrics, model_state), grads, rows, batch = self.lookup.differentiated(
            requested, state.params, partial(self.differentiated, state), key, seen
        )
        if "loss_weight" in metrics:
            raise ValueError(
                "`loss_fn` of a step with `embeddings` must return a loss, the mean over the "
                "examples of a device, got a pair (sum, weight), by which rows are not weighted."
            )
        data = LossData(batch, key, seen)
        metrics = self._of_replica(metrics, weight)
        refused = self.lookup.embeddings.num_refused(requested.counts)
        return Gradients(grads, metrics, model_state, weight, data, rows, refused)


@dataclass(frozen=True, kw_only=True)
class UpdateWithTables(Update):
    """An update of a step with tables, which also starts the lookup of `inputs.upcoming`.

    Methods take `ahead`, which says how much of that lookup is done.
    """

    lookup: Lookup

    @classmethod
    def of(cls, update: Update, lookup: Lookup) -> Self:
        """Return an update of tables, too, from one of dense parameters."""
        of_batches: dict[str, Any] = vars(update.batches) | {
            "loss": lookup.of_loss(update.batches.loss)
        }
        batches = TableBatches(**of_batches, lookup=lookup)
        of_update: dict[str, Any] = vars(update) | {"batches": batches}
        return cls(**of_update, lookup=lookup)

    # One update.

    extra_roles: ClassVar[str] = "device"

    def prepared(
        self, state: TrainState, inputs: StepInputs, *, like: Any = None, ahead: Ahead
    ) -> tuple[Done, Metrics, Any]:
        """Make one update of dense parameters and tables; see `Update.prepared`.

        The third result is the request of the next batch, and the rows that have changed.
        """
        now = keyed(state)

        def inside(local: Local, inputs: StepInputs) -> tuple[Done, Any, Metrics, Carry | None]:
            counts: Metrics = {}
            if inputs.batch is None:
                seen = jax.eval_shape(self._requested, local, StepInputs(like)).batch
            else:
                inputs = self._requested(local, inputs)
                seen, counts = inputs.batch, inputs.batch.counts
            following, read = self.lookup.following(local.stored, inputs.upcoming, ahead)
            gathered, metrics = self.batches.gathered(local.dense, inputs)
            reduced = self.reduced(local.dense, gathered, seen)
            done, changed = self._applied(local, reduced, gathered, read)
            return done, changed, joined(metrics, counts), following

        tables = self.lookup.embeddings.specs, self.lookup.embeddings.optimizer_specs
        out = Done._make(("shared", *tables)), "device", "shared", "device"
        done, changed, metrics, following = self._on_devices(inside, now, inputs, out)
        after = done.pending.optimizer_state
        metrics = joined(metrics, scale_metrics(self.dense(state.opt_state), after))
        return done, metrics, (following, changed)

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
        if following is None:
            return new, metrics, None
        moves = self._moves_tables(count, phase)

        def patch(tables: PyTree, following: Any, changed: Any, moves: Any, weight: Any) -> Any:
            following, resent = self.lookup.patched(
                tables, following, changed, moves, ahead, self.inner_axes
            )
            return following, unless_idle(resent, weight)

        roles = "stacked", "device", "device", "shared", "stacked"
        given = new.params.tables, following, changed, moves, inputs.weight
        following, resent = mapped(patch, roles, ("device", "stacked"))(*given)
        return new, {**metrics, **resent}, following

    def opened(self, state: TrainState, inputs: StepInputs, *, num_batches: int) -> GradientWindow:
        """Return an empty window with room for the rows of so many batches."""

        def inside(local: Local, inputs: StepInputs) -> GradientWindow:
            inputs = self._requested(local, inputs)
            return self.batches.opened(local.dense, inputs, num_batches=num_batches)

        return self._on_devices(inside, keyed(state), inputs, WINDOW_ROLES)

    def collected(
        self, state: TrainState, inputs: StepInputs, *, fits: bool, ahead: Ahead
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window. No row changes, so none is sent again for the next batch."""

        def inside(
            local: Local, inputs: StepInputs
        ) -> tuple[GradientWindow, Metrics, Carry | None]:
            inputs = self._requested(local, inputs)
            following, _ = self.lookup.following(local.stored, inputs.upcoming, ahead)
            window, metrics = self.batches.collected(local.dense, inputs, fits=fits)
            return window, joined(metrics, inputs.batch.counts), following

        out = WINDOW_ROLES, "shared", "device"
        return self._on_devices(inside, keyed(state), inputs, out)

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass."""

        def inside(local: Local, inputs: StepInputs) -> Metrics:
            return self.batches.evaluated(local.dense, self._requested(local, inputs))

        return self._on_devices(inside, keyed(state), inputs, "shared")

    def asked(self, state: TrainState, inputs: StepInputs, *, ahead: Ahead) -> Carry | None:
        """Start the lookup of a batch without a step; of a carry, read its rows in this state."""

        def inside(local: Local, inputs: StepInputs) -> Carry | None:
            following = self.lookup.following
            return following(local.stored, inputs.batch, ahead, inputs.carry)[0]

        return self._on_devices(inside, state, inputs, "device")

    # What tables add to its parts.

    def means_inside(
        self, gathered: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> WithRows:
        """Return the gradients with those of rows, averaged over axes inside a replica."""
        dense = super().means_inside(gathered, axes, order)
        # Devices along other inner axes have other examples, but the same rows.
        others = tuple(n for n in self.inner_axes if n != self.lookup.axis)
        over = () if self.lookup.axis is None else (self.lookup.axis,)
        return WithRows(dense, mean_rows(gathered.rows, others), self.inner_axes, over)

    def lacking(self, state: PyTree, inner_axes: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return the inner axes over which the step must average dense gradients."""
        lacking, axis = super().lacking(state, inner_axes), self.lookup.axis
        if self.gradients is None or lacking or axis is None:
            return lacking
        # A transform may reduce over the replicas only, and leave the axis of the tables.
        return () if axis in spec_of(self.gradients).axes else (axis,)

    def _requested(self, local: Local, inputs: StepInputs) -> StepInputs:
        """Return the inputs with a `Requested` as the batch."""
        requested = self.lookup.requested(
            local.stored, inputs.batch, inputs.carry, inputs.weight, self.inner_axes
        )
        return inputs._replace(batch=requested)

    def _applied(
        self, local: Local, reduced: Reduced, gathered: Gradients, read: PyTree
    ) -> tuple[Done, PyTree]:
        """Run both optimizers; return their results, and the rows that have changed.

        An update whose batch has ids that are in no table changes nothing: its results are NaN.
        """
        state, grads = local.dense, reduced.grads
        before = state.opt_state
        finite = None
        if parts_of(before, DynamicLossScaleState):
            finite = ~anywhere(~all_finite(grads.rows), self.inner_axes, None)
        reduced = reduced._replace(grads=grads.dense)
        pending = self.optimized(state, reduced, gathered, finite)
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
        active = ~skipped if pending.takes is None else pending.takes & ~skipped
        stored, stored_state, changed = self.lookup.applied(
            local.stored, local.stored_state, grads.rows, active, read
        )
        return Done(pending, stored, stored_state), changed

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

    def _moves_tables(self, count: jax.Array, phase: Phase | None) -> bool | jax.Array:
        """Return whether the exchange of this update changes all tables; an array if traced."""
        if self.sync is None or phase is not None:
            return self.sync is not None and phase != ()
        return self.sync.due(count)

    # The states of its parts, and their layout.

    def dense(self, tree: PyTree) -> PyTree:
        """Return the part of a tree for the dense parameters; other values are returned as is."""
        return tree.dense if isinstance(tree, WithTables) else tree

    def check_optimizer(self, state: PyTree, unknown: list[PyTree]) -> None:
        """Raise `ValueError` for an optimizer that does what rows of tables would need, too."""
        check_optimizer_with_tables(state, unknown)

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """Return the transforms as one, which makes states alone."""
        lookup, embeddings = self.lookup, self.lookup.embeddings
        optimizers = super().chain()

        def both(dense: PyTree, tables: PyTree) -> tuple[PyTree, PyTree]:
            states = optimizers.init(dense)
            note_followed(states)
            return states, embeddings.init_optimizer(tables)

        def init(params: Any) -> Any:
            # Gradient transforms may average over the axis of the tables, so it must be bound.
            (gradients_state, optimizer_state), tables_state = lookup.on_devices(
                both,
                *(params.dense, params.tables),
                roles=("shared", embeddings.specs),
                out=("shared", embeddings.optimizer_specs),
            )
            both_states = WithTables(optimizer_state, tables_state)
            return gradients_state, both_states

        def update(*_: Any, **__: Any) -> Any:
            raise ValueError(
                "The chain of a step with `embeddings` makes states alone: gradients of rows are "
                "no tree like the parameters. Call the step."
            )

        return optax.GradientTransformationExtraArgs(init, update)

    def stacked(self, params: PyTree, seed: int, mesh: AnyMesh) -> WithTables:
        """Return dense parameters and tables of all replicas; tables that are not given are new."""
        return self.lookup.stacked(params, seed, mesh=mesh, axis_name=self.axis_name)

    @property
    def maps_inner_axes(self) -> bool:
        """True: rows of tables are looked up for the examples of one device."""
        return True

    def layout(
        self, mesh: AnyMesh, axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> Layout:
        """Return the layout of states, in which tables have the specs with which they are made."""
        axis = self.lookup.axis
        if axis is None:
            return super().layout(mesh, axes, specs, params)
        if specs is None:
            dense = P() if params is None else jax.tree.map(lambda _: P(), params.dense)
        else:
            dense = specs.dense
        specs = WithTables(dense, self.lookup.embeddings.specs)
        layout = super().layout(mesh, axes | {axis}, specs, params)
        # It comes last: a batch is split over the other inner axes first.
        inner_axes, data_axes = (*layout.inner_axes, axis), (*layout.data_axes, axis)
        return layout._replace(inner_axes=inner_axes, data_axes=data_axes)

    def laid_out(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        new = super().laid_out(layout)
        return dataclasses.replace(new, param_specs=self.dense(layout.specs))

    def roles(self, roles: Any) -> Any:
        """Return the roles for `map_replicas`, which leaves the axis of tables to a nested map."""
        if self.lookup.axis is None:
            return roles
        return jax.tree.map(lambda role: "batch" if role == "device" else role, roles)

    def _on_devices(
        self,
        fn: Callable[[Local, StepInputs], Any],
        state: TrainState,
        inputs: StepInputs,
        out: Any,
    ) -> Any:
        """Run `fn` on each device's own part of the state and the inputs."""
        dense, tables_state = state._replace(params=state.params.dense), None
        if state.opt_state:  # an evaluation has none
            both = state.opt_state
            dense, tables_state = dense._replace(opt_state=both.dense), both.tables

        def inside(*parts: Any) -> Any:
            return fn(Local(*parts[:3]), StepInputs(*parts[3:]))

        local = Local(dense, state.params.tables, tables_state)
        roles = (
            "shared",
            self.lookup.embeddings.specs,
            self.lookup.embeddings.optimizer_specs,
            *INNER_ROLES,
        )
        return self.lookup.on_devices(inside, *local, *inputs, roles=roles, out=out)
