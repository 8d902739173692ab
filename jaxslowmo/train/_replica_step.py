"""One update as one replica sees it: loss, gradients, optimizer, exchange."""

from dataclasses import dataclass

import jax
import optax

from .._typing import AxisName, Phase, PyTree
from ..algorithms import ParameterTransform, increment, run_if
from ..mesh import axis_names, from_first, match_varying, vary_over, varying_axes
from ..reducer import mean_gradients
from ..tracing import FullLoss
from ..tree import apply_exactly, leaf_names
from ._loss import value_and_gradients
from ._model_state import ModelStateMode, agree_inside, mean_over, vary_statistics
from ._state import TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; see `make_train_step`."""

    loss: FullLoss
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole as one optax transform."""
        identity = optax.identity()
        return optax.chain(self.gradients or identity, self.optimizer, self.sync or identity)

    def per_replica(
        self, state: TrainState, batch: PyTree, phase: Phase | None, inner_axes: tuple[str, ...]
    ) -> tuple[TrainState, Metrics]:
        """One update as one replica sees it, or one of its devices along `inner_axes`."""
        rng, key = jax.random.split(state.rng)
        for name in inner_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope("model_state/broadcast"):
                before = match_varying(from_first(before, self.axis_name), before)
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        axes = (*axis_names(self.axis_name), *inner_axes)
        metrics, model_state, grads = value_and_gradients(
            self.loss,
            vary_over(state.params, axes),
            batch,
            rng=key,
            model_state=vary_statistics(before, axes),
            accumulate=self.accumulate,
        )
        if inner_axes:
            metrics = mean_over(metrics, inner_axes)
            model_state = agree_inside(model_state, inner_axes)
        gradients_state, optimizer_state, sync_state = state.opt_state
        if self.gradients is not None:
            grads, gradients_state = self.gradients.update(grads, gradients_state, state.params)
        elif inner_axes:
            grads = mean_gradients(grads, inner_axes)
        # Equal gradients stay typed as varying over replicas, as optimizer state is: transforms
        # with conditionals (optax.apply_if_finite) need both alike.
        grads = vary_over(grads, axis_names(self.axis_name))
        updates, optimizer_state = self.optimizer.update(grads, optimizer_state, state.params)
        _check_reduced(updates, inner_axes)
        model_state = self._synchronised(model_state, sync_state, phase)
        if self.sync is not None:
            updates, sync_state = self.sync.update(updates, sync_state, state.params, phase=phase)
        new = TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=rng,
        )
        return new, metrics

    def _synchronised(self, model_state: PyTree, sync_state: PyTree, phase: Phase | None):
        """Model state averaged over replicas in updates that synchronise the parameters too."""
        if self.model_state != "sync_mean" or not jax.tree.leaves(model_state):
            return model_state
        if self.sync is None:
            due = True
        elif phase is None:
            due = self.sync.due(increment(sync_state.count))
        else:
            due = bool(phase)

        def average(tree: PyTree) -> PyTree:
            with jax.named_scope("phase:*"):  # part of whichever exchange is due
                return mean_over(tree, self.axis_name)

        return run_if(due, average, lambda tree: tree, model_state)


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
