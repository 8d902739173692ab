"""From a replica's batches to the gradients of an update."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...._scopes import METRICS, MODEL_STATE
from ...._typing import AxisName, PyTree
from ....embedding import Embeddings
from ....mesh import axis_names, match_varying, own_keys, vary_over
from ....precision import loss_scale_of
from ....tracing import FullLoss, ready_order
from ....transform import unless_idle
from ....tree import cast
from ..._state import TrainState
from ._looked_up import differentiated, pooled
from ._loss import value_and_gradients, with_loss
from ._model_state import (
    ModelStateMode,
    agree_inside,
    from_first_replica,
    mean_over,
    vary_statistics,
)
from ._rows import Rows
from ._window import Gathered, GradientWindow, Metrics, added_to, empty_window, means_of

# A batch as the loss function sees it, its key, and the model state before it.
Data = tuple[PyTree, jax.Array, PyTree]


@dataclass(frozen=True)
class Differentiation:
    """The loss function, and what of the step says how it is differentiated.

    In its methods `key` is the replica's for this update, and `inner_axes` are the axes inside a
    replica over which the batch is split.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: microbatches of one batch.
      model_state: how it is kept together.
      tables: those that batches are looked up in; then a batch is `Requested`, and the loss
        function sees it `WithVectors`.
    """

    loss: FullLoss
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode
    tables: Embeddings | None = None

    def one_batch(
        self,
        state: TrainState,
        batch: PyTree,
        key: jax.Array,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[Gathered, Metrics, Data]:
        """All that an update without a window wants: gradients, metrics, and what the loss saw."""
        key = _own_key(key, inner_axes)
        before, seen = self._seen(state.model_state, inner_axes)
        metrics, model_state, grads, rows, batch = self._differentiated(
            state.params, batch, key, seen, loss_scale_of(state.opt_state), inner_axes
        )
        model_state = _agreed(model_state, inner_axes)
        if weight is not None:
            metrics = _counted(metrics, weight)
            model_state = kept_if_idle(weight, model_state, before)
        gathered = Gathered(grads, metrics["loss"], model_state, weight, rows)
        return gathered, metrics, (batch, key, seen)

    def opened(
        self,
        state: TrainState,
        batch: PyTree,
        key: jax.Array,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> GradientWindow:
        """An empty window, for batches of the shapes of this one.

        Communication: with `model_state="broadcast"` its bytes over the replicas; else none.
        """
        _, seen = self._seen(state.model_state, inner_axes)

        # For shapes and types alone: nothing of it is computed.
        metrics, _, grads, rows, _ = jax.eval_shape(
            partial(self._differentiated, inner_axes=inner_axes),
            state.params,
            batch,
            _own_key(key, inner_axes),
            seen,
            loss_scale_of(state.opt_state),
        )
        return empty_window(grads, metrics, seen, weight, rows)

    def collected(
        self,
        state: TrainState,
        batch: PyTree,
        key: jax.Array,
        weight: jax.Array | None,
        window: GradientWindow,
        inner_axes: tuple[str, ...],
    ) -> tuple[GradientWindow, Metrics]:
        """The window with this batch in it, and the batch's own metrics.

        Communication: over `inner_axes` one all-reduce of the metrics; none over replicas.
        """
        key = jax.random.fold_in(_own_key(key, inner_axes), window.count)
        seen = window.model_state
        metrics, model_state, grads, rows, _ = self._differentiated(
            state.params, batch, key, seen, loss_scale_of(state.opt_state), inner_axes
        )
        own = metrics
        if weight is not None:
            own = _counted(metrics, weight)
            model_state = kept_if_idle(weight, model_state, seen)
        return added_to(window, grads, metrics, model_state, weight, rows), own

    def closed(
        self, state: TrainState, window: GradientWindow, inner_axes: tuple[str, ...]
    ) -> tuple[Gathered, Metrics]:
        """What an update wants of a window, and the means of its metrics."""
        grads, rows, metrics = means_of(window)
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), grads, state.params)
        model_state = _agreed(window.model_state, inner_axes)
        if window.weight is not None:
            metrics = _counted(metrics, window.weight)
            model_state = kept_if_idle(window.weight, model_state, state.model_state)
        return Gathered(grads, metrics["loss"], model_state, window.weight, rows), metrics

    def evaluated(
        self,
        state: TrainState,
        batch: PyTree,
        key: jax.Array,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> Metrics:
        """Metrics of one replica's batch, or of what one of its devices has of it.

        Communication: over `inner_axes` one all-reduce of the metrics; of the model state over the
          replicas where replica 0's is broadcast.
        """
        key = _own_key(key, inner_axes)
        _, seen = self._seen(state.model_state, inner_axes)
        axes = (*axis_names(self.axis_name), *inner_axes)
        params = vary_over(state.params, axes)
        if self.tables is not None:
            batch, _ = pooled(self.tables, batch, params)
        value, (metrics, _) = self.loss(params, batch, rng=key, model_state=seen)
        metrics = _of_replica(with_loss(metrics, value), inner_axes)
        return metrics if weight is None else _counted(metrics, weight)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """The order in which gradients become ready; found at trace time, from the types alone."""
        if self.tables is not None:
            tables = self.tables
            batch = jax.eval_shape(lambda b, p: pooled(tables, b, p)[0], batch, state.params)
        params, batch, key, model_state = jax.tree.map(
            _type_only, (state.params, batch, state.rng, state.model_state)
        )
        return ready_order(self.loss, params, batch, rng=key, model_state=model_state)

    def _seen(self, model_state: PyTree, inner_axes: tuple[str, ...]) -> tuple[PyTree, PyTree]:
        """The model state before the first batch of an update, and as this device sees it."""
        before = model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        axes = (*axis_names(self.axis_name), *inner_axes)
        return before, own_keys(vary_statistics(before, axes), inner_axes)

    def _differentiated(
        self,
        params: PyTree,
        batch: PyTree,
        key: jax.Array,
        seen: PyTree,
        scale: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[Metrics, PyTree, PyTree, Rows, PyTree]:
        """What a batch gives.

        Metrics of the replica; this device's model state after the batch, its gradients and those
        of the rows that it holds; and the batch as the loss function saw it.
        """
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        axes = (*axis_names(self.axis_name), *inner_axes)
        params = vary_over(params, axes)
        scale = None if scale is None else vary_over(scale, axes)
        find = partial(value_and_gradients, self.loss, accumulate=self.accumulate)
        if self.tables is None:
            metrics, model_state, grads, _ = find(
                params, batch, rng=key, model_state=seen, scale=scale
            )
            return _of_replica(metrics, inner_axes), model_state, grads, {}, batch

        def compute(params: PyTree, batch: PyTree, key: Any, seen: PyTree, scale: Any) -> Any:
            *results, grads, own = find(params, batch, rng=key, model_state=seen, scale=scale)
            return results, grads, own

        (metrics, model_state), grads, rows, batch = differentiated(
            self.tables, batch, params, compute, key, seen, scale
        )
        return _of_replica(metrics, inner_axes), model_state, grads, rows, batch


def kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new`, or `old` on a replica of weight 0."""
    old = match_varying(old, new)
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)


def _own_key(key: jax.Array, inner_axes: tuple[str, ...]) -> jax.Array:
    """The replica's key as this device's own."""
    for name in inner_axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(name))
    return key


def _agreed(model_state: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    with jax.named_scope(f"{MODEL_STATE}/inner"):
        return agree_inside(model_state, inner_axes)


def _of_replica(metrics: Metrics, inner_axes: tuple[str, ...]) -> Metrics:
    """Means over the devices of a replica."""
    if not inner_axes:
        return metrics
    with jax.named_scope(METRICS):
        return mean_over(metrics, inner_axes)


def _counted(metrics: Metrics, weight: jax.Array) -> Metrics:
    """Zeros on an idle replica, and the weight, so that what reads metrics can weigh them."""
    return {**unless_idle(metrics, weight), "weight": weight}


def _type_only(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
