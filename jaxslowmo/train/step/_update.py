"""One update of one replica from top to bottom: gradients, their reduction, optimizer, exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import AbstractMesh

from ..._support.scopes import EVERY_PHASE
from ..._support.types import Phase, PyTree
from ...gradients.precision import (
    DynamicLossScaleState,
    did_skip,
    guard_overflow,
    revert_if,
    scale_metrics,
    zero_if,
)
from ...mesh import AnyMesh, Roles, axis_names
from ...transform import (
    ExchangeState,
    ReplicaGroup,
    StackedReplicas,
    increment,
    phase_scope,
    spec_of,
    unless_idle,
    unreplicate_number,
    vmap_replicas,
)
from ...tree import apply_exactly, parts_of
from .._train_state import StepExchange, TrainState
from ._gradients import (
    Gradients,
    GradientWindow,
    Metrics,
    StepInputs,
    as_value,
    merge_metrics,
    old_if_idle,
    restore_statistics_if,
    statistics,
    with_statistics,
)
from ._optimized import Averaging, Weights, accepted_arguments, optimizer_rate, run_optimizer
from ._parts import Parts


class ReducedGradients(NamedTuple):
    """Averaged gradients, and values that were averaged in the same way."""

    grads: PyTree
    state: PyTree  # state of the gradient transform
    loss: jax.Array | None  # None if an unknown transform averaged the gradients
    axes: set[str]  # replica axes over which some update averages
    weights: Weights  # this replica's in what follows
    loss_weight: jax.Array | None  # and in means of gradients and losses


class PendingUpdate(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None  # this replica's weight in its batch
    weights: Weights  # and in what follows
    is_follower: jax.Array | None  # `Weights.is_follower`, computed on the same devices
    is_active: jax.Array | None  # () bool, whether this replica changes its state; None: yes
    rate: jax.Array | None  # learning rate that the optimizer used, if `sync` needs it
    step: jax.Array  # number of this update


@dataclass(frozen=True)
class Update(Parts):
    """One update by the parts of a step, traced for one replica or one of its inner devices."""

    def update_replicas(
        self,
        map_fn: Callable[..., Callable[..., Any]],
        mesh: AnyMesh | AbstractMesh,
        state: TrainState,
        inputs: StepInputs,
        roles: StepInputs,
        *,
        phase: Phase | None = None,
        **static: Any,
    ) -> tuple[TrainState, Metrics, Any]:
        """Run one update of all replicas; see `prepare_update`, `exchange_params`.

        Args:
          map_fn: `map_fn(fn, in_roles, out_roles)` maps a function of one replica over them.
          mesh: the mesh of the step.
          state: the state.
          inputs: the inputs.
          roles: their roles.
          phase: what to exchange; with None the counter in the state decides.
          **static: further arguments of `prepare_update`.

        Returns:
          The new state, metrics, and what is carried to the next step.
        """
        shared = state.exchange.shared

        def prepare(state: TrainState, *inputs: Any) -> Any:
            return self.prepare_update(state, StepInputs(*inputs), **static)

        def gather(state: TrainState, *inputs: Any) -> Any:
            gradients, metrics = self.compute_gradients(with_update_key(state), StepInputs(*inputs))
            return gradients._replace(data=None), metrics  # the batches stay where they are

        def prepare_with(state: TrainState, gathered: Any, *inputs: Any) -> Any:
            return self.prepare_update(state, StepInputs(*inputs), gathered=gathered, **static)

        local = state._replace(exchange=state.exchange._replace(shared=()))
        # What an algorithm keeps has its own layout, of which mapped programs would know nothing.
        seen = without_exchange(state)
        own = self.state_roles(seen)
        out = self.pending_roles, "stacked", self.extra_roles
        where: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        # One number for all replicas, by which conditionals decide.
        count = unreplicate_number(increment(state.step), **where)
        if self.map_with == "vmap":  # the loss alone needs it
            gradients = map_fn(gather, (own, *roles), "stacked", "vmap")(seen, *inputs)
            given = (own, "stacked", *roles)
            pending, metrics, extra = map_fn(prepare_with, given, out)(seen, gradients, *inputs)
        else:
            pending, metrics, extra = map_fn(prepare, (own, *roles), out)(seen, *inputs)

        def exchange(replicas: StackedReplicas, own: Any, shared: PyTree) -> Any:
            state, pending = own
            return self.exchange_params(state, shared, pending, count, phase, replicas)

        new, shared = vmap_replicas(exchange, (local, pending), shared, **where)
        new = new._replace(exchange=new.exchange._replace(shared=shared))
        return self.finish_update(
            map_fn, local, new, inputs, metrics, extra, count, phase, **static
        )

    extra_roles: ClassVar[str] = "stacked"  # of what `prepare_update` leaves to `finish_update`

    @property
    def pending_roles(self) -> Roles:
        """The roles of the first result of `prepare_update`."""
        return "stacked"

    def compute_gradients(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update; see `BatchGradients.compute_gradients`."""
        return self.batches.compute_gradients(state, inputs)

    def prepare_update(
        self, state: TrainState, inputs: StepInputs, *, like: Any = None, gathered: Any = None
    ) -> tuple[PendingUpdate, Metrics, Any]:
        """Make one update of a replica up to the exchange of parameters.

        With a batch, with a window of gradients, or with both. A replica of weight 0 keeps its
        model state, and its metrics are zeros; if replicas train independently, it keeps its
        optimizer state, too. With a window the weight is that of the whole window; the metrics are
        those of the batch.

        `like`, for a window alone, is the types of one device's part of a batch; `gathered` is what
        `compute_gradients` has returned, if it ran before. The third result is what
        `finish_update` needs: nothing.
        """
        keyed = with_update_key(state)
        gradients, metrics = gathered or self.compute_gradients(keyed, inputs)
        reduced = self.reduce_gradients(keyed, gradients, inputs.batch if like is None else like)
        pending = self.compute_update(keyed, reduced, gradients)
        return (
            pending,
            merge_metrics(metrics, scale_metrics(state.opt_state, pending.optimizer_state)),
            (),
        )

    def finish_update(
        self,
        map_fn: Any,
        old: TrainState,
        new: TrainState,
        inputs: StepInputs,
        metrics: Metrics,
        extra: Any,
        count: jax.Array,
        phase: Phase | None,
        **static: Any,
    ) -> tuple[TrainState, Metrics, Any]:
        """Return new state, metrics, and what is carried to the next step: nothing."""
        del map_fn, old, inputs, extra, count, phase, static
        return new, metrics, None

    def reduce_gradients(
        self, state: TrainState, gathered: Gradients, like: PyTree
    ) -> ReducedGradients:
        """Average gradients and the loss; `like` is this device's part of a batch, or its types."""
        before, specs, axes = (
            state.exchange.gradients,
            self.param_specs,
            self.unreduced_axes(state.exchange.gradients),
        )
        loss: jax.Array | None = as_value(gathered.metrics["loss"])
        order, (weight, loss_weight) = (
            self.ready_order_fn(state, like),
            self.gradient_weights(gathered, axes),
        )
        grads, after = self.average_inner_axes(gathered, axes, order), before
        averaging = Averaging.from_transform(self.gradients, before, self.axis_name)
        if self.gradients is not None:
            given = {"weight": weight, "ready_order": order, "param_specs": specs}
            arguments = accepted_arguments(spec_of(self.gradients), before, **given)
            update: Any = partial(self.gradients.update, **arguments)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update = guard_overflow(update, {*averaging.axes, *self.inner_axes}, weight)
            grads, after = update(grads, before, state.params)
        loss = None if averaging.has_unknown else averaging.mean(loss, loss_weight)
        weights = Weights(gathered.weight, gathered.weight).after_averaging(averaging)
        if gathered.loss_weight is None:
            loss_weight = weights.update
        elif averaging.reductions:
            loss_weight = Weights(loss_weight, loss_weight).after_averaging(averaging).update
        return ReducedGradients(grads, after, loss, averaging.axes, weights, loss_weight)

    def compute_update(
        self,
        state: TrainState,
        reduced: ReducedGradients,
        gathered: Gradients,
        finite: jax.Array | None = None,
    ) -> PendingUpdate:
        """Run the optimizer. An update that a loss scale skips keeps the model's statistics.

        `finite` says whether what the optimizer is not given, rows of tables, is finite.
        """
        before, weight, value = state.opt_state, reduced.loss_weight, reduced.loss
        averaging = Averaging.from_transform(self.optimizer, before, self.axis_name)
        averaged = averaging.axes | reduced.axes
        if averaging.has_unknown and not averaged.isdisjoint(axis_names(self.axis_name)):
            value = None
        with jax.named_scope("optimizer"):
            updates, after = run_optimizer(
                self.optimizer,
                reduced.grads,
                before,
                state.params,
                value=None if value is None else averaging.mean(value, weight),
                averaged=self.reduction_axes(averaged),
                loss_at=self.batches.loss_at,
                data=gathered.data,
                weight=weight,
                finite=finite,
                param_specs=self.param_specs,
            )
        wants_rate = self.sync is not None and self.sync.algorithm.needs_rate
        rate = optimizer_rate(after) if wants_rate else None
        weights = reduced.weights.after_averaging(averaging)
        # Where nothing makes replicas agree, an idle one cannot follow others.
        alone = self.never_syncs(reduced.axes, before)
        own_weight = weights.update if alone or self.sync is not None else None
        if own_weight is not None:
            after = old_if_idle(own_weight, after, before)
        if alone:
            updates = unless_idle(updates, own_weight)
        model_state, skipped = gathered.model_state, did_skip(before, after)
        if skipped is not None:
            model_state = restore_statistics_if(skipped, model_state, state.model_state)
        return PendingUpdate(
            updates=updates,
            gradients_state=reduced.state,
            optimizer_state=after,
            model_state=model_state,
            weight=gathered.weight,
            weights=weights,
            is_follower=weights.is_follower,
            is_active=None if own_weight is None else own_weight > 0,
            rate=rate,
            step=increment(state.step),
        )

    def exchange_params(
        self,
        state: TrainState,
        shared: PyTree,
        update: PendingUpdate,
        count: jax.Array,
        phase: Phase | None,
        stacked: StackedReplicas,
    ) -> tuple[TrainState, PyTree]:
        """Return a replica's state, and the shared state, after the exchange of parameters."""
        averages = self.batches.model_state == "sync_mean"
        model_state, optimizer_state = update.model_state, update.optimizer_state
        params, updates, local = state.params, update.updates, state.exchange.local
        if self.sync is None:
            params = apply_exactly(params, updates)
            with phase_scope(EVERY_PHASE):
                if averages:
                    means = ReplicaGroup(self.axis_name, stacked=stacked).mean(
                        statistics(model_state), update.weight
                    )
                    model_state = with_statistics(model_state, means)
        else:
            extra = {"weight": update.weights.exchange, "learning_rate": update.rate}
            if update.is_follower is not None:
                # An exchange leaves out the update of a replica without weight, so it comes before.
                params = revert_if(~update.is_follower, apply_exactly(params, updates), params)
                updates = zero_if(update.is_follower, updates)
            params, means, after, optimizer_state = self.sync.exchange(
                updates,
                statistics(model_state) if averages else [],
                ExchangeState(count - 1, local, shared),
                params,
                sets_params=True,
                moments=optimizer_state,
                init=self.optimizer.init,
                part=self.dense,
                phase=phase,
                stacked=stacked,
                **{name: x for name, x in extra.items() if x is not None},
            )
            local, shared = after.local, after.shared
            if averages:
                model_state = with_statistics(model_state, means)
        new = TrainState(
            step=update.step,
            params=params,
            opt_state=optimizer_state,
            model_state=model_state,
            rng=state.rng,
            exchange=StepExchange(local, (), update.gradients_state),
        )
        return new, shared

    # The other programs of a step.

    def open_window(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int
    ) -> GradientWindow:
        """Return an empty window for the next update; see `BatchGradients.open_window`."""
        return self.batches.open_window(with_update_key(state), inputs, num_batches=num_batches)

    def collect(
        self, state: TrainState, inputs: StepInputs, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, None]:
        """Add a batch to a window; see `BatchGradients.collect`. Nothing is carried on."""
        return *self.batches.collect(with_update_key(state), inputs, fits=fits), None

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass; see `BatchGradients.evaluate`."""
        return self.batches.evaluate(with_update_key(state), inputs)

    def arguments(self, state: TrainState, inputs: StepInputs, **static: Any) -> Any:
        """Return what a loss function that is dispatched receives; see `DispatchedGradients`."""
        batches: Any = self.batches
        return batches.arguments(with_update_key(state), inputs, **static)


def without_exchange(state: TrainState) -> TrainState:
    """Return `state` without what the exchange of parameters keeps, which it alone reads."""
    return state._replace(exchange=state.exchange._replace(local=(), shared=()))


def with_update_key(state: TrainState) -> TrainState:
    """Return `state` with the key of its next update, which only a loss that draws computes."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    return state._replace(rng=jax.random.key_data(key))
