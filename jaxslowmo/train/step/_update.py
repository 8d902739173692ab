"""One update of one replica from top to bottom: gradients, their reduction, optimizer, exchange."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from ..._support.scopes import EVERY_PHASE
from ..._support.types import Phase, PyTree
from ...gradients.precision import (
    DynamicLossScaleState,
    as_before_if,
    scale_metrics,
    unless_overflow,
    was_skipped,
    zero_if,
)
from ...mesh import axis_names
from ...transform import (
    increment,
    layouts_known,
    phase_scope,
    spec_of,
    unless_idle,
)
from ...tree import apply_exactly, parts_of
from .._train_state import TrainState
from ._gradients import (
    Gradients,
    GradientWindow,
    Metrics,
    StepInputs,
    as_value,
    joined,
    kept_if_idle,
    mean_over,
    statistics,
    statistics_before_if,
    with_statistics,
)
from ._optimized import Averaging, Weights, accepted_arguments, optimizer_rate, run_optimizer
from ._parts import Parts


class Reduced(NamedTuple):
    """Averaged gradients, and values that were averaged in the same way."""

    grads: PyTree
    state: PyTree  # state of the gradient transform
    loss: jax.Array | None  # None if an unknown transform averaged the gradients
    over: set[str]  # replica axes over which some update averages
    weights: Weights  # this replica's in what follows
    share: jax.Array | None  # and in means of gradients and losses


class Pending(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None  # this replica's weight in its batch
    weights: Weights  # and in what follows
    follows: jax.Array | None  # `Weights.follows`: a comparison of these, made where they are
    takes: jax.Array | None  # () bool, whether this replica changes its own state; None: it does
    rate: jax.Array | None  # learning rate that the optimizer used, if `sync` needs it


@dataclass(frozen=True)
class Update(Parts):
    """One update by the parts of a step, traced for one replica or one of its inner devices."""

    def updated(
        self, state: TrainState, inputs: StepInputs, *, phase: Phase | None = None, like: Any = None
    ) -> tuple[TrainState, Metrics, None]:
        """Run one update: with a batch, with a window of gradients, or with both.

        A replica of weight 0 keeps its model state, and its metrics are zeros; if replicas train
        independently, it keeps its optimizer state, too. With a window the weight is that of the
        whole window; the metrics are those of the batch.

        `phase` is what to exchange; with None the counter in the state decides. `like`, for a
        window alone, is the types of one device's part of a batch. The third result is what is
        carried to the next step: nothing.
        """
        now, then = keyed(state)
        gradients, metrics = self.batches.gathered(now, inputs)
        reduced = self.reduced(now, gradients, inputs.batch if like is None else like)
        pending = self.optimized(now, reduced, gradients)
        new = self.exchanged(then, pending, phase)
        return new, joined(metrics, scale_metrics(state.opt_state, new.opt_state)), None

    def reduced(self, state: TrainState, gathered: Gradients, like: PyTree) -> Reduced:
        """Average gradients and the loss; `like` is this device's part of a batch, or its types."""
        before, specs, lacking = (
            state.opt_state[0],
            self.param_specs,
            self.lacking(state.opt_state[0]),
        )
        loss: jax.Array | None = as_value(gathered.metrics["loss"])
        order, (weight, share) = self.order(state, like), self.shares(gathered, lacking)
        grads, after = self.means_inside(gathered, lacking, order), before
        averaging = Averaging.of(self.gradients, before, self.axis_name)
        if self.gradients is not None:
            given = {"weight": weight, "ready_order": order, "param_specs": specs}
            arguments = accepted_arguments(spec_of(self.gradients), before, **given)
            update: Any = partial(self.gradients.update, **arguments)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update = unless_overflow(update, {*averaging.over, *self.inner_axes}, weight)
            grads, after = update(grads, before, state.params)
        loss = None if averaging.hides else averaging.mean(loss, share)
        weights = Weights(gathered.weight, gathered.weight).after(averaging)
        if gathered.loss_weight is None:
            share = weights.update
        elif averaging.reductions:
            share = Weights(share, share).after(averaging).update
        return Reduced(grads, after, loss, averaging.over, weights, share)

    def optimized(
        self,
        state: TrainState,
        reduced: Reduced,
        gathered: Gradients,
        finite: jax.Array | None = None,
    ) -> Pending:
        """Run the optimizer. An update that a loss scale skips keeps the model's statistics.

        `finite` says whether what the optimizer is not given, rows of tables, is finite.
        """
        before, weight, value = state.opt_state[1], reduced.share, reduced.loss
        averaging = Averaging.of(self.optimizer, before, self.axis_name)
        averaged = averaging.over | reduced.over
        if averaging.hides and not averaged.isdisjoint(axis_names(self.axis_name)):
            value = None
        with jax.named_scope("optimizer"):
            updates, after = run_optimizer(
                self.optimizer,
                reduced.grads,
                before,
                state.params,
                value=None if value is None else averaging.mean(value, weight),
                averaged=self.over(averaged),
                loss_at=self.batches.loss_at,
                data=gathered.data,
                weight=weight,
                finite=finite,
                param_specs=self.param_specs,
            )
        wants_rate = self.sync is not None and self.sync.algorithm.needs_rate
        rate = optimizer_rate(after) if wants_rate else None
        weights = reduced.weights.after(averaging)
        # Where nothing makes replicas agree, an idle one cannot follow others.
        alone = self.never_meets(reduced.over, before)
        own_weight = weights.update if alone or self.sync is not None else None
        if own_weight is not None:
            after = kept_if_idle(own_weight, after, before)
        if alone:
            updates = unless_idle(updates, own_weight)
        model_state, skipped = gathered.model_state, was_skipped(before, after)
        if skipped is not None:
            model_state = statistics_before_if(skipped, model_state, state.model_state)
        return Pending(
            updates=updates,
            gradients_state=reduced.state,
            optimizer_state=after,
            model_state=model_state,
            weight=gathered.weight,
            weights=weights,
            follows=weights.follows,
            takes=None if own_weight is None else own_weight > 0,
            rate=rate,
        )

    def exchanged(self, state: TrainState, update: Pending, phase: Phase | None) -> TrainState:
        """Return the state after the exchange of parameters; `state` has the next update's key."""
        averages = self.batches.model_state == "sync_mean"
        model_state, optimizer_state = update.model_state, update.optimizer_state
        params, updates, sync_state = state.params, update.updates, state.opt_state[-1]
        if self.sync is None:
            with phase_scope(EVERY_PHASE):
                if averages:
                    model_state = mean_over(model_state, self.axis_name, update.weight)
        else:
            extra = {"weight": update.weights.exchange, "learning_rate": update.rate}
            if update.follows is not None:
                # An exchange leaves out the update of a replica without weight, so it comes before.
                params = as_before_if(~update.follows, apply_exactly(params, updates), params)
                updates = zero_if(update.follows, updates)
            with layouts_known():
                updates, means, sync_state, optimizer_state = self.sync.exchange(
                    updates,
                    statistics(model_state) if averages else [],
                    sync_state,
                    params,
                    moments=optimizer_state,
                    init=self.optimizer.init,
                    part=self.dense,
                    phase=phase,
                    **{name: x for name, x in extra.items() if x is not None},
                )
            if averages:
                model_state = with_statistics(model_state, means)
        return TrainState(
            step=increment(state.step),
            params=apply_exactly(params, updates),
            opt_state=(update.gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=state.rng,
        )

    # The other programs of a step.

    def opened(self, state: TrainState, inputs: StepInputs, *, num_batches: int) -> GradientWindow:
        """Return an empty window for the next update; see `BatchGradients.opened`."""
        return self.batches.opened(keyed(state)[0], inputs, num_batches=num_batches)

    def collected(
        self, state: TrainState, inputs: StepInputs, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, None]:
        """Add a batch to a window; see `BatchGradients.collected`. Nothing is carried on."""
        return *self.batches.collected(keyed(state)[0], inputs, fits=fits), None

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass; see `BatchGradients.evaluated`."""
        return self.batches.evaluated(keyed(state)[0], inputs)

    def arguments(
        self, state: TrainState, inputs: StepInputs, *, collects: bool, parts: int
    ) -> tuple[PyTree, PyTree, jax.Array, PyTree]:
        """Return what a loss function that is dispatched receives; see `BatchGradients.arguments`.

        That is parameters and batch, keys, and model state. The first two are None if they need no
        cast: the caller uses its own arrays, so the program need not copy them.
        """
        keys, seen = self.batches.arguments(keyed(state)[0], inputs, collects=collects, parts=parts)
        if self.policy is None:
            return None, None, keys, seen
        return self.policy.cast(state.params), self.policy.cast(inputs.batch), keys, seen


def keyed(state: TrainState) -> tuple[TrainState, TrainState]:
    """Return `state` with the key of its update, and with the key for the state after it."""
    rng, key = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng)))
    return state._replace(rng=key), state._replace(rng=rng)
