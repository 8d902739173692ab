"""One update as one replica sees it: loss, gradients, optimizer, exchange."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .._scopes import EVERY_PHASE, METRICS, MODEL_STATE
from .._typing import AxisName, Phase, PyTree
from ..mesh import axis_names, from_first, match_varying, vary_over, varying_axes
from ..reducer import mean_gradients
from ..tracing import FullLoss, ready_order
from ..transform import ParameterTransform, holds_state, increment, phase_scope, unless_idle
from ..tree import apply_exactly, leaf_names
from ._loss import value_and_gradients
from ._model_state import ModelStateMode, Statistics, agree_inside, mean_over, vary_statistics
from ._ours import optimizer_rate
from ._state import TrainState
from ._told import Loss, TracedUpdate, as_value, update_told

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
        identity = optax.identity()
        return optax.chain(self.gradients or identity, self.optimizer, self.sync or identity)

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
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = match_varying(from_first(before, self.axis_name), before)
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        axes = (*axis_names(self.axis_name), *inner_axes)
        seen = vary_statistics(before, axes)
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
            model_state = self._kept_if_idle(weight, model_state, before)
        gradients_state, optimizer_state, sync_state = state.opt_state
        extra: dict[str, Any] = {} if weight is None else {"weight": weight}
        order = self._ready_order(state, batch, key) if self.order == "ready" else None
        value, averaged = as_value(metrics["loss"]), frozenset[str]()
        if self.gradients is not None:
            known = extra if order is None else {**extra, "ready_order": order}
            operands = grads, gradients_state, state.params
            reduction = TracedUpdate(
                partial(self.gradients.update, **known), self.axis_name, *operands
            )
            grads, gradients_state = reduction(*operands)
            value, averaged = reduction.mean(value, weight, *operands), reduction.axes
        elif inner_axes:
            grads = mean_gradients(grads, inner_axes, order)
        # Equal gradients stay typed as varying over replicas, as optimizer state is: transforms
        # with conditionals (optax.apply_if_finite) need both alike.
        grads = vary_over(grads, axis_names(self.axis_name))
        with jax.named_scope("optimizer"):
            updates, optimizer_after = update_told(
                self.optimizer,
                grads,
                optimizer_state,
                state.params,
                loss=Loss(
                    value=vary_over(value, axis_names(self.axis_name)),
                    averaged=tuple(name for name in axes if name in {*averaged, *inner_axes}),
                    fn=self.loss,
                    accumulate=self.accumulate,
                    data=(batch, key, seen),
                ),
                axis_name=self.axis_name,
                weight=weight,
            )
        alone = not averaged and self._trains_alone(optimizer_state)
        if self.sync is not None and self.sync.wants_learning_rate:
            extra = {**extra, "learning_rate": optimizer_rate(optimizer_after)}
        if weight is not None and (self.sync is not None or alone):
            optimizer_after = self._kept_if_idle(weight, optimizer_after, optimizer_state)
        if alone:
            updates = unless_idle(updates, weight)
        _check_reduced(updates, inner_axes)
        statistics = Statistics(model_state, averaged=self.model_state == "sync_mean")
        if self.sync is None:
            with phase_scope(EVERY_PHASE):  # part of whichever exchange is due
                model_state = statistics.averaged_over(self.axis_name, weight)
        else:
            updates, means, sync_state = self.sync.exchange(
                updates, statistics.leaves, sync_state, state.params, phase=phase, **extra
            )
            model_state = statistics.replaced(means)
        new = TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(gradients_state, optimizer_after, sync_state),
            model_state=model_state,
            rng=rng,
        )
        return new, metrics

    def _ready_order(self, state: TrainState, batch: PyTree, key: jax.Array) -> tuple[int, ...]:
        """Found at trace time, from the types alone."""
        return ready_order(
            self.loss,
            jax.tree.map(_type_only, state.params),
            jax.tree.map(_type_only, batch),
            rng=key,
            model_state=jax.tree.map(_type_only, state.model_state),
        )

    def _trains_alone(self, optimizer_state: PyTree) -> bool:
        """Whether nothing brings replicas together, so that an idle one has nobody to follow."""
        return (
            self.sync is None
            and (self.gradients is None or self.apart)
            and not holds_state(optimizer_state, "gradients")
            and not holds_state(optimizer_state, "parameters")
        )

    def _kept_if_idle(self, weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
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
