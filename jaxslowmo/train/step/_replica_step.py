"""One update as one replica sees it: loss, gradients, optimizer, exchange."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..._scopes import EVERY_PHASE, METRICS, MODEL_STATE
from ..._typing import AxisName, Phase, PyTree
from ...mesh import axis_names, match_varying, own_keys, vary_over, varying_axes
from ...reducer import mean_gradients
from ...tracing import FullLoss, ready_order
from ...transform import (
    ParameterTransform,
    following,
    holds_state,
    increment,
    layouts_known,
    moved_copies,
    no_exchange,
    phase_scope,
    unless_idle,
)
from ...tree import apply_exactly, leaf_names
from .._state import TrainState
from ._loss import value_and_gradients
from ._model_state import (
    ModelStateMode,
    Statistics,
    agree_inside,
    from_first_replica,
    mean_over,
    vary_statistics,
)
from ._told import Loss, TracedUpdate, as_value, update_told
from ._transforms import optimizer_rate

Metrics = dict[str, jax.Array]
GradientOrder = Literal["reverse", "ready"]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; see `make_train_step`."""

    loss: FullLoss
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    apart: bool  # replicas were said to train apart
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode
    order: GradientOrder

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole as one optax transform."""
        first = self.gradients or optax.identity(), self.optimizer
        if self.sync is None:
            return optax.chain(*first, no_exchange())
        return following(first, _of_known_layout(self.sync))

    def per_replica(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics]:
        """One update as one replica sees it, or one of its devices along `inner_axes`.

        A replica of weight 0 keeps its model state, its metrics are zeros, and where replicas train
        apart its optimizer state stays too.
        """
        rng, key = jax.random.split(state.rng)
        for name in inner_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        gradients_state, optimizer_state, sync_state = state.opt_state
        seen, metrics, model_state, grads = self._differentiated(
            state, batch, key, weight, inner_axes
        )
        order = self._ready_order(state, batch, key) if self.order == "ready" else None
        grads, gradients_state, value, averaged = self._reduced(
            grads, gradients_state, state.params, metrics["loss"], weight, order, inner_axes
        )
        loss = Loss(value, averaged, self.loss, self.accumulate, (batch, key, seen))
        updates, optimizer_state, rate = self._optimized(
            grads, optimizer_state, state.params, loss, weight, averaged
        )
        _check_reduced(updates, inner_axes)
        own_updates = updates
        updates, model_state, sync_state = self._exchanged(
            updates, model_state, sync_state, state.params, weight, phase, rate
        )
        if self.sync is not None and phase != ():
            # What the exchange has moved, optimizers that remember parameters must not take back.
            own_updates = unless_idle(own_updates, weight)
            optimizer_state = moved_copies(optimizer_state, state.params, own_updates, updates)
        new = TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=rng,
        )
        return new, metrics

    def _differentiated(
        self,
        state: TrainState,
        batch: PyTree,
        key: jax.Array,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[PyTree, Metrics, PyTree, PyTree]:
        """The model state that the loss saw, its metrics, the model state after, gradients."""
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        axes = (*axis_names(self.axis_name), *inner_axes)
        seen = own_keys(vary_statistics(before, axes), inner_axes)
        metrics, model_state, grads = value_and_gradients(
            self.loss,
            vary_over(state.params, axes),
            batch,
            rng=key,
            model_state=seen,
            accumulate=self.accumulate,
        )
        if inner_axes:
            with jax.named_scope(METRICS):
                metrics = mean_over(metrics, inner_axes)
            with jax.named_scope(f"{MODEL_STATE}/inner"):
                model_state = agree_inside(model_state, inner_axes)
        if weight is not None:
            # Counted here, so that what reads the metrics can weigh them.
            metrics = {**unless_idle(metrics, weight), "weight": weight}
            model_state = _kept_if_idle(weight, model_state, before)
        return seen, metrics, model_state, grads

    def _reduced(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        loss: jax.Array,
        weight: jax.Array | None,
        order: tuple[int, ...] | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[PyTree, PyTree, jax.Array, tuple[str, ...]]:
        """Reduced gradients, the transform's state, the loss likewise, and over which axes."""
        value, averaged = as_value(loss), frozenset[str]()
        if self.gradients is not None:
            known: dict[str, Any] = {} if weight is None else {"weight": weight}
            if order is not None:
                known["ready_order"] = order
            operands = grads, state, params
            reduction = TracedUpdate(
                partial(self.gradients.update, **known), self.axis_name, *operands
            )
            grads, state = reduction(*operands)
            value, averaged = reduction.mean(value, weight, *operands), reduction.axes
        elif inner_axes:
            grads = mean_gradients(grads, inner_axes, order)
        # Equal gradients stay typed as varying over replicas, as optimizer state is: transforms
        # with conditionals (optax.apply_if_finite) need both alike.
        names = axis_names(self.axis_name)
        over = tuple(n for n in (*names, *inner_axes) if n in {*averaged, *inner_axes})
        return vary_over(grads, names), state, vary_over(value, names), over

    def _optimized(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        loss: Loss,
        weight: jax.Array | None,
        averaged: tuple[str, ...],
    ) -> tuple[PyTree, PyTree, jax.Array | None]:
        """Updates, the optimizer's state, and the rate that it used where `sync` wants it."""
        with jax.named_scope("optimizer"):
            updates, after = update_told(
                self.optimizer,
                grads,
                state,
                params,
                loss=loss,
                axis_name=self.axis_name,
                weight=weight,
            )
        wants_rate = self.sync is not None and self.sync.wants_learning_rate
        rate = optimizer_rate(after) if wants_rate else None
        # Whether nothing brings replicas together, so that an idle one has nobody to follow.
        alone = (
            self.sync is None
            and not set(averaged) & set(axis_names(self.axis_name))
            and (self.gradients is None or self.apart)
            and not holds_state(state, "gradients")
            and not holds_state(state, "parameters")
        )
        if weight is not None and (self.sync is not None or alone):
            after = _kept_if_idle(weight, after, state)
        return unless_idle(updates, weight) if alone else updates, after, rate

    def _exchanged(
        self,
        updates: PyTree,
        model_state: PyTree,
        state: PyTree,
        params: PyTree,
        weight: jax.Array | None,
        phase: Phase | None,
        rate: jax.Array | None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Updates and model state after the exchange of parameters, and its state."""
        statistics = Statistics(model_state, averaged=self.model_state == "sync_mean")
        if self.sync is None:
            with phase_scope(EVERY_PHASE):
                return updates, statistics.averaged_over(self.axis_name, weight), state
        known = {"weight": weight, "learning_rate": rate}
        with layouts_known():
            updates, means, state = self.sync.exchange(
                updates,
                statistics.leaves,
                state,
                params,
                phase=phase,
                **{name: x for name, x in known.items() if x is not None},
            )
        return updates, statistics.replaced(means), state

    def _ready_order(self, state: TrainState, batch: PyTree, key: jax.Array) -> tuple[int, ...]:
        """Found at trace time, from the types alone."""
        return ready_order(
            self.loss,
            jax.tree.map(_type_only, state.params),
            jax.tree.map(_type_only, batch),
            rng=key,
            model_state=jax.tree.map(_type_only, state.model_state),
        )


def _of_known_layout(sync: ParameterTransform) -> ParameterTransform:
    """`sync` for a step, which gives it the specs of the parameters once there are some."""

    def init(params: PyTree) -> PyTree:
        with layouts_known():
            return sync.init(params)

    return sync._replace(init=init, state=sync.state)


def _kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    old = match_varying(old, new)
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)


def _type_only(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _check_reduced(updates: PyTree, inner_axes: tuple[str, ...]) -> None:
    wrong = [
        name
        for name, u in zip(leaf_names(updates), jax.tree.leaves(updates), strict=True)
        if varying_axes(u) & set(inner_axes)
    ]
    if wrong:
        raise ValueError(
            f"`gradients` must average over the inner axes {inner_axes} of the mesh, between whose "
            f"devices the batch is split; updates still differ there: {', '.join(wrong)}. Leave "
            f"`gradients` out, or pass js.all_reduce_gradients({inner_axes!r})."
        )
