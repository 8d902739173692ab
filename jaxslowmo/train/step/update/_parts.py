"""The parts of a step, and one replica's update by them: gradients, optimizer, exchange."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import optax

from ...._support.scopes import EVERY_PHASE
from ...._support.types import AxisName, CompilerOptions, Phase, PyTree
from ....embedding import rows_are_finite
from ....gradients.precision import (
    DynamicLossScaleState,
    Policy,
    as_before_if,
    unless_overflow,
    was_skipped,
    zero_if,
)
from ....gradients.reducer import ReadyOrder, mean_gradients
from ....gradients.sparse import Rows, WithRows, mean_rows
from ....mesh import axis_names, laid_out
from ....transform import (
    GradientTransform,
    LossProgram,
    ParameterTransform,
    holds_state,
    increment,
    layouts_known,
    moved_copies,
    phase_scope,
    spec_of,
    unless_idle,
)
from ....tree import apply_exactly, parts_of
from ..._train_state import TrainState
from ._batch_gradients import AnyLookup, Gradients, as_value
from ._differentiate import (
    Differentiation,
    kept_if_idle,
    mean_over,
    statistics,
    statistics_before_if,
    with_statistics,
)
from ._optimized import (
    OptimizerResult,
    Weights,
    accepted_arguments,
    averaging_of,
    mean_where_due,
    optimizer_rate,
    run_optimizer,
)


class Reduced(NamedTuple):
    """Averaged gradients, and values that were averaged in the same way."""

    grads: PyTree
    rows: Rows
    state: PyTree  # state of the gradient transform
    loss: jax.Array | None  # None if an unknown transform averaged the gradients
    over: tuple[str, ...]  # axes over which some update averages
    weights: Weights  # this replica's in what follows
    refused: jax.Array | None  # () bool, whether the update is forbidden; None without tables


class UpdateBeforeExchange(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    rows: Rows  # gradients of rows, for the update of the tables
    active: jax.Array | None  # () bool, whether tables are updated; None: always
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None  # this replica's weight in its batch
    weights: Weights  # and in what follows
    follows: jax.Array | None  # `Weights.follows`, which compares arrays that tables' map replaces
    rate: jax.Array | None  # learning rate that the optimizer used, if `sync` needs it


@dataclass(frozen=True)
class StepParts:
    """The parts of a step; see `make_train_step`.

    In one update the batch is differentiated, alone or into a window of several; gradients are
    reduced, the optimizer turns them into updates, and parameters are exchanged.
    """

    differentiation: Differentiation
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    independent: bool  # `sync` is "none": replicas may train independently
    axis_name: AxisName
    lookup: AnyLookup
    program: LossProgram
    param_specs: PyTree | None = None  # specs of the dense parameters; set by a state's layout
    policy: Policy | None = None  # dtypes in which the loss function computes
    compiler_options: CompilerOptions = ()  # of every program of the step

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes inside a replica over which the batch is split."""
        return self.differentiation.inner_axes

    def update_before_exchange(
        self, state: TrainState, gathered: Gradients, like: PyTree
    ) -> UpdateBeforeExchange:
        """Return the update before parameters are exchanged; the state of `sync` is not used.

        `like` is this device's part of a batch, or its types.
        """
        reduced = self._reduced(state, gathered, self._order(state, like))
        independent = self._is_independent(state, reduced)
        result, weights = self._optimized(state, reduced, gathered, independent)
        updates, optimizer_state, rate = result
        # An idle replica does not update its tables: if there is an exchange, it brings them.
        active = weights.takes if self.sync is not None or independent else None
        skipped = None
        if parts_of(optimizer_state, DynamicLossScaleState):
            skipped = was_skipped(state.opt_state[1], optimizer_state)
        gradients_state, model_state, rows = reduced.state, gathered.model_state, reduced.rows
        if reduced.refused is not None:
            # Ids of the batch are in no table, so results of the batch are NaN.
            updates = zero_if(reduced.refused, updates)
            optimizer_state = as_before_if(reduced.refused, optimizer_state, state.opt_state[1])
            # Counters must count this update, since they decide when gradients are exchanged.
            gradients_state = statistics_before_if(
                reduced.refused, gradients_state, state.opt_state[0]
            )
            skipped = reduced.refused if skipped is None else skipped | reduced.refused
        if skipped is not None:
            # A skipped update must not change tables and model state, either.
            active = ~skipped if active is None else active & ~skipped
            model_state = statistics_before_if(skipped, model_state, state.model_state)
        return UpdateBeforeExchange(
            updates,
            rows,
            active,
            gradients_state,
            optimizer_state,
            model_state,
            gathered.weight,
            weights,
            weights.follows,
            rate,
        )

    def exchanged(
        self, state: TrainState, update: UpdateBeforeExchange, phase: Phase | None
    ) -> TrainState:
        """Return the state after the exchange of parameters; `state` has the next update's key."""
        averaged, dense = self.differentiation.model_state == "sync_mean", self.lookup.dense
        model_state = update.model_state
        params, updates, optimizer_state = state.params, update.updates, update.optimizer_state
        sync_state = state.opt_state[-1]
        if self.sync is None:
            with phase_scope(EVERY_PHASE):
                if averaged:
                    model_state = mean_over(model_state, self.axis_name, update.weight)
        else:
            extra = {"weight": update.weights.exchange, "learning_rate": update.rate}
            if update.follows is not None:
                # An exchange leaves out the update of a replica without weight, so it comes before.
                params = as_before_if(~update.follows, apply_exactly(params, updates), params)
                updates = zero_if(update.follows, updates)
            own_updates = unless_idle(dense(updates), update.weights.exchange)
            with layouts_known():
                updates, means, sync_state = self.sync.exchange(
                    updates,
                    statistics(model_state) if averaged else [],
                    sync_state,
                    params,
                    phase=phase,
                    **{name: x for name, x in extra.items() if x is not None},
                )
            if averaged:
                model_state = with_statistics(model_state, means)
            if phase != ():
                # Copies of parameters in the optimizer must change too: it would undo the exchange.
                optimizer_state = moved_copies(
                    optimizer_state, dense(params), own_updates, dense(updates)
                )
        return TrainState(
            step=increment(state.step),
            params=apply_exactly(params, updates),
            opt_state=(update.gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=state.rng,
        )

    def _order(self, state: TrainState, like: PyTree) -> ReadyOrder | None:
        """Return a function for the order in which gradients are ready, for a batch like `like`.

        It is called only where the order matters, since it traces the loss once more. None is the
        order of leaves: a pipeline finishes all gradients with the last microbatch.
        """
        find = cache(partial(self.differentiation.ready_order, state, like))
        return find if self.program.param_types is None else None

    def _reduced(self, state: TrainState, gathered: Gradients, order: ReadyOrder | None) -> Reduced:
        """Average gradients, those of rows and the loss; `order` is the order of the buckets."""
        grads, weight, after = gathered.grads, gathered.weight, state.opt_state[0]
        weights = Weights(weight, weight)
        inner_axes, specs, names = self.inner_axes, self.param_specs, axis_names(self.axis_name)
        loss = gathered.metrics["loss"]
        value: jax.Array | None = as_value(loss)
        averaged = set[str]()
        refused = None if gathered.refused is None else gathered.refused > 0
        if specs is not None:
            grads = laid_out(grads, specs)
        if lacking := self.lacking(after, inner_axes):
            grads = mean_gradients(grads, lacking, order, specs)
        rows, nested = gathered.rows, self.lookup.nested
        if rows:  # devices along other inner axes have other examples, but the same rows
            rows = mean_rows(rows, tuple(n for n in inner_axes if n != nested))
        if self.gradients is not None:
            arguments = accepted_arguments(
                spec_of(self.gradients),
                after,
                weight=weight,
                ready_order=order,
                param_specs=specs,
            )
            reductions, averaged, hides = averaging_of(self.gradients, after, self.axis_name)
            value = None if hides else value
            update: Any = partial(self.gradients.update, **arguments)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update = unless_overflow(update, {*averaged, *inner_axes}, weight)
            axis = self.lookup.axis
            tables = () if axis is None else (axis,)
            both = WithRows(grads, rows, inner_axes, tables) if rows else grads
            both, after = update(both, after, state.params)
            grads, rows = (both.dense, both.rows) if rows else (both, rows)
            if value is not None:
                value = mean_where_due(value, weight, reductions, self.axis_name)
            weights = weights.after(reductions, self.axis_name)
            if refused is not None:  # if one replica refuses, the mean is useless on all
                share = refused.astype(loss.dtype)
                refused = mean_where_due(share, None, reductions, self.axis_name) > 0
        over = tuple(n for n in (*names, *inner_axes) if n in {*averaged, *inner_axes})
        return Reduced(grads, rows, after, value, over, weights, refused)

    def lacking(self, state: PyTree, inner_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the inner axes over which the step must average, since `gradients` does not.

        `state` is that of `gradients`, and `inner_axes` are those between which the batch is split.
        """
        if self.gradients is None:
            return inner_axes
        spec = spec_of(self.gradients)
        is_known = isinstance(self.gradients, GradientTransform)
        if is_known and not spec.axes and not holds_state(spec.unknown(state), "gradients"):
            return inner_axes
        axis = self.lookup.axis
        # A transform may reduce over the replicas only, and leave the axis of the tables.
        return () if axis is None or axis in spec.axes else (axis,)

    def _optimized(
        self, state: TrainState, reduced: Reduced, gathered: Gradients, independent: bool
    ) -> tuple[OptimizerResult, Weights]:
        """Run the optimizer on the gradients.

        `independent` says that nothing makes replicas agree. The second result holds this replica's
        weights after it.
        """
        before, weight, finite = state.opt_state[1], reduced.weights.update, None
        if reduced.rows and parts_of(before, DynamicLossScaleState):
            finite = rows_are_finite(reduced.rows, self.inner_axes)
        names, value = axis_names(self.axis_name), reduced.loss
        reductions, averaged, hides = averaging_of(self.optimizer, before, self.axis_name)
        averaged |= {*reduced.over}
        if hides and not averaged.isdisjoint(names):
            value = None
        if value is not None:
            value = mean_where_due(value, weight, reductions, self.axis_name)
        over = tuple(n for n in (*names, *self.inner_axes) if n in averaged)
        weights = reduced.weights.after(reductions, self.axis_name)
        then = weights.update
        with jax.named_scope("optimizer"):
            updates, after = run_optimizer(
                self.optimizer,
                reduced.grads,
                before,
                state.params,
                value=value,
                averaged=over,
                loss_at=self.differentiation.loss_at,
                data=gathered.data,
                weight=weight,
                finite=finite,
                param_specs=self.param_specs,
            )
        needs_rate = self.sync is not None and self.sync.wants_learning_rate
        rate = optimizer_rate(after) if needs_rate else None
        if then is not None and (self.sync is not None or independent):
            after = kept_if_idle(then, after, before)
        updates = unless_idle(updates, then) if independent else updates
        return OptimizerResult(updates, after, rate), weights

    def _is_independent(self, state: TrainState, reduced: Reduced) -> bool:
        """Return whether nothing makes replicas agree, so that an idle one cannot follow others."""
        before = state.opt_state[1]
        return (
            self.sync is None
            and not set(reduced.over) & set(axis_names(self.axis_name))
            and (self.gradients is None or self.independent)
            and not holds_state(before, "gradients")
            and not holds_state(before, "parameters")
        )
