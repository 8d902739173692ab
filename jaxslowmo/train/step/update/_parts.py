"""One update as one replica sees it: loss, gradients, optimizer, exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import optax

from ...._support.scopes import EVERY_PHASE
from ...._support.types import AxisName, Phase, PyTree
from ....embedding import rows_are_finite
from ....gradients.clipping import clip_state, scaled
from ....gradients.precision import (
    DynamicLossScaleState,
    Policy,
    as_before_if,
    unless_overflow,
    was_skipped,
    zero_if,
)
from ....gradients.reducer import mean_gradients
from ....gradients.sparse import Rows, WithRows, mean_rows
from ....mesh import axis_names, laid_out, vary_over
from ....transform import (
    GradientTransform,
    ParameterTransform,
    Validation,
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
    Made,
    averaging_of,
    check_reduced,
    heard_by,
    mean_where_due,
    optimizer_rate,
    update_told,
    validated,
)

GradientOrder = Literal["reverse", "ready"]
Validate = Literal["before", "after"]


class Reduced(NamedTuple):
    """Gradients that were averaged, and what was averaged with them."""

    grads: PyTree
    rows: Rows
    state: PyTree  # of the gradient transform
    loss: jax.Array | None  # None where nobody knows how gradients were averaged
    over: tuple[str, ...]  # axes, in some update
    refused: jax.Array | None  # () bool, whether the update must not be made; None: it must


class Moved(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    rows: Rows  # gradients of rows, as the tables are to be moved by
    active: jax.Array | None  # () bool, whether they are; None: always
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None
    rate: jax.Array | None  # that the optimizer used, where `sync` wants it


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; see `make_train_step`.

    One update: the batch is differentiated, alone or into a window of several; the gradients are
    reduced, the optimizer makes updates of them, and parameters are exchanged.
    """

    differentiation: Differentiation
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    apart: bool  # replicas were said to train apart
    axis_name: AxisName
    order: GradientOrder
    lookup: AnyLookup
    param_specs: PyTree | None = None  # of what the optimizer knows; known with a state's layout
    validate: Validate = "before"
    raw_keys: bool = False  # whether untyped keys in new model state become typed ones
    policy: Policy | None = None  # that the loss function computes by
    before_run: Callable[[], None] | None = None  # raises where programs are out of date
    params_form: Callable[[PyTree], PyTree] | None = None  # the parameters as the loss takes them
    model_state_form: Callable[[PyTree], PyTree] | None = None  # and the model state

    def first_two(self) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
        """Gradient transform and optimizer."""
        return of_known_layout(self.gradients or optax.identity()), of_known_layout(self.optimizer)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes inside a replica over which the batch is split."""
        return self.differentiation.inner_axes

    def moved(self, state: TrainState, gathered: Gradients, like: PyTree) -> Moved:
        """What an update comes to before parameters are exchanged; that part of `state` is used.

        `like` is a batch of this device, or types of one.
        """
        weight = gathered.weight
        is_ready_order = self.order == "ready"
        order = self.differentiation.ready_order(state, like) if is_ready_order else None
        reduced = self._reduced(state, gathered, order)
        alone = self._alone(state, reduced)
        updates, optimizer_state, rate = self._optimized(state, reduced, gathered, alone)
        check_reduced(updates, self.inner_axes)
        # A replica that follows the others leaves what it stores to what they exchange.
        active = weight > 0 if weight is not None and (self.sync is not None or alone) else None
        skipped = None
        if parts_of(optimizer_state, DynamicLossScaleState):
            skipped = was_skipped(state.opt_state[1], optimizer_state)
        gradients_state, model_state, rows = reduced.state, gathered.model_state, reduced.rows
        if self.validate == "after" and rows and (clip := clip_state(gradients_state)) is not None:
            rows = scaled(rows, clip.clip_factor)
        if reduced.refused is not None:
            # Ids of the batch are in no table, so nothing that was made of it is a number.
            updates = zero_if(reduced.refused, updates)
            optimizer_state = as_before_if(reduced.refused, optimizer_state, state.opt_state[1])
            # Counters go on, since they say when gradients are exchanged.
            gradients_state = statistics_before_if(
                reduced.refused, gradients_state, state.opt_state[0]
            )
            skipped = reduced.refused if skipped is None else skipped | reduced.refused
        if skipped is not None:
            # What was skipped stored parameters and model state skip, too.
            active = ~skipped if active is None else active & ~skipped
            model_state = statistics_before_if(skipped, model_state, state.model_state)
        return Moved(
            updates, rows, active, gradients_state, optimizer_state, model_state, weight, rate
        )

    def exchanged(self, state: TrainState, moved: Moved, phase: Phase | None) -> TrainState:
        """The state after the exchange of parameters; `state` has the key of the next update."""
        averaged, dense = self.differentiation.model_state == "sync_mean", self.lookup.dense
        model_state = moved.model_state
        updates, optimizer_state = moved.updates, moved.optimizer_state
        sync_state = state.opt_state[-1]
        if self.sync is None:
            with phase_scope(EVERY_PHASE):
                if averaged:
                    model_state = mean_over(model_state, self.axis_name, moved.weight)
        else:
            known = {"weight": moved.weight, "learning_rate": moved.rate}
            with layouts_known():
                updates, means, sync_state = self.sync.exchange(
                    moved.updates,
                    statistics(model_state) if averaged else [],
                    sync_state,
                    state.params,
                    phase=phase,
                    **{name: x for name, x in known.items() if x is not None},
                )
            if averaged:
                model_state = with_statistics(model_state, means)
        if self.sync is not None and phase != ():
            # What the exchange has moved, optimizers that remember parameters must not take back.
            own_updates = unless_idle(dense(moved.updates), moved.weight)
            optimizer_state = moved_copies(
                optimizer_state, dense(state.params), own_updates, dense(updates)
            )
        return TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(moved.gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=state.rng,
        )

    def _reduced(
        self, state: TrainState, gathered: Gradients, order: tuple[int, ...] | None
    ) -> Reduced:
        """Gradients, those of rows and the loss, averaged alike; `order` is that of the buckets."""
        grads, weight, after = gathered.grads, gathered.weight, state.opt_state[0]
        inner_axes, specs, names = self.inner_axes, self.param_specs, axis_names(self.axis_name)
        loss = gathered.metrics["loss"]
        value: jax.Array | None = as_value(loss)
        averaged = set[str]()
        refused = None if gathered.refused is None else gathered.refused > 0
        if specs is not None:
            grads = laid_out(grads, specs)
        if lacking := self._lacking(after):
            grads = mean_gradients(grads, lacking, order, specs)
        rows, nested = gathered.rows, self.lookup.nested
        if rows:  # devices along other inner axes have other examples and the same rows
            rows = mean_rows(rows, tuple(n for n in inner_axes if n != nested))
        if self.gradients is not None:
            known = heard_by(
                spec_of(self.gradients),
                after,
                weight=weight,
                ready_order=order,
                param_specs=specs,
                validation=Validation() if self.validate == "after" else None,
            )
            reductions, averaged, hides = averaging_of(self.gradients, after, self.axis_name)
            value = None if hides else value
            update: Any = partial(self.gradients.update, **known)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update = unless_overflow(update, {*averaged, *inner_axes}, weight)
            both = WithRows(grads, rows, inner_axes) if rows else grads
            both, after = update(both, after, state.params)
            grads, rows = (both.dense, both.rows) if rows else (both, rows)
            if value is not None:
                value = mean_where_due(value, weight, reductions, self.axis_name)
            if refused is not None:  # by one replica, the mean is of no use to any
                told = refused.astype(loss.dtype)
                refused = mean_where_due(told, None, reductions, self.axis_name) > 0
        # Equal gradients stay typed as varying over replicas, as optimizer state is: transforms
        # with conditionals (optax.apply_if_finite) need both alike.
        over = tuple(n for n in (*names, *inner_axes) if n in {*averaged, *inner_axes})
        grads, rows, value, refused = vary_over((grads, rows, value, refused), names)
        return Reduced(grads, rows, after, value, over, refused)

    def _lacking(self, state: PyTree) -> tuple[str, ...]:
        """Inner axes over which `gradients`, of this state, leaves it to the step to average."""
        if self.gradients is None:
            return self.inner_axes
        spec = spec_of(self.gradients)
        is_known = isinstance(self.gradients, GradientTransform)
        if is_known and not spec.axes and not holds_state(spec.unknown(state), "gradients"):
            return self.inner_axes
        axis = self.lookup.axis
        # It may know the replicas alone.
        return () if axis is None or axis in spec.axes else (axis,)

    def _optimized(
        self, state: TrainState, reduced: Reduced, gathered: Gradients, alone: bool
    ) -> Made:
        """What the optimizer makes of the gradients; validated when it is there, if that is so.

        `alone`: nothing brings replicas together.
        """
        before, weight, finite = state.opt_state[1], gathered.weight, None
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

        def run(grads: PyTree, validation: Validation | None) -> Made:
            with jax.named_scope("optimizer"):
                updates, after = update_told(
                    self.optimizer,
                    grads,
                    before,
                    state.params,
                    value=value,
                    averaged=over,
                    loss_at=self.differentiation.loss_at,
                    data=gathered.data,
                    weight=weight,
                    finite=finite,
                    param_specs=self.param_specs,
                    validation=validation,
                )
            wants_rate = self.sync is not None and self.sync.wants_learning_rate
            rate = optimizer_rate(after) if wants_rate else None
            if weight is not None and (self.sync is not None or alone):
                after = kept_if_idle(weight, after, before)
            return Made(unless_idle(updates, weight) if alone else updates, after, rate)

        if self.validate == "before":
            return run(reduced.grads, None)
        return validated(run, reduced.grads, reduced.state, before)

    def _alone(self, state: TrainState, reduced: Reduced) -> bool:
        """Whether nothing brings replicas together, so that an idle one has nobody to follow."""
        before = state.opt_state[1]
        return (
            self.sync is None
            and not set(reduced.over) & set(axis_names(self.axis_name))
            and (self.gradients is None or self.apart)
            and not holds_state(before, "gradients")
            and not holds_state(before, "parameters")
        )


def of_known_layout(transform: Any) -> Any:
    """A transform for a step, which tells it the specs of the parameters once there are some."""

    def init(params: PyTree) -> PyTree:
        with layouts_known():
            return transform.init(params)

    if isinstance(transform, ParameterTransform):
        return transform._replace(init=init, state=transform.state)
    return transform._replace(init=init)
