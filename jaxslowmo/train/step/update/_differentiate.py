"""From a replica's batches to the gradients of an update."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...._scopes import METRICS, MODEL_STATE
from ...._typing import AxisName, PyTree
from ....embedding import Lookup
from ....mesh import axis_names, match_varying, own_keys, vary_over
from ....precision import loss_scale_of
from ....sparse import Rows
from ....tracing import FullLoss, ready_order
from ....transform import unless_idle
from ....tree import cast
from ..._state import TrainState
from ._given import Given
from ._loss import value_and_gradients, with_loss
from ._model_state import (
    ModelStateMode,
    agree_inside,
    from_first_replica,
    mean_over,
    vary_statistics,
)
from ._window import Found, GradientWindow, Metrics, added_to, empty_window, means_of


class Data(NamedTuple):
    """What the loss function is given beside the parameters.

    Attributes:
      batch: of this device.
      key: its own.
      model_state: before the batch.
    """

    batch: PyTree
    key: jax.Array
    model_state: PyTree


class Gathered(NamedTuple):
    """What an update starts from, whether one batch gave it or a window.

    Attributes:
      grads: means over the examples of this device, in the dtypes of the parameters.
      loss: () likewise, of all examples of the replica.
      model_state: equal on all devices of the replica.
      weight: () this replica's share in averages over replicas; None where all are alike.
      rows: by table, mean gradients of the rows that this device holds, each row once.
      data: what the loss saw; None for a window, whose batches are gone.
      refused: () int32, ids of the replica because of which the update must not be made; None
        without tables.
    """

    grads: PyTree
    loss: jax.Array
    model_state: PyTree
    weight: jax.Array | None
    rows: Rows
    data: Data | None
    refused: jax.Array | None = None


@dataclass(frozen=True)
class Differentiation:
    """The loss function, and what of the step says how it is differentiated.

    In its methods `state.rng` is the replica's key for this update.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: microbatches of one batch.
      model_state: how it is kept together.
      lookup: what batches are looked up in; they come with what they asked for.
      inner_axes: inside a replica, over which the batch is split; known with the layout of a state.
      unscales: whether gradients are divided by a loss scale at once; False leaves that to an
        optimizer that is called as in a loop of one's own.
    """

    loss: FullLoss
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode
    lookup: Lookup
    inner_axes: tuple[str, ...] = ()
    unscales: bool = True

    def gathered(self, state: TrainState, given: Given) -> tuple[Gathered, Metrics]:
        """What an update starts from, with this batch in it, and the batch's own metrics."""
        if given.window is not None:
            window, metrics = self.collected(state, given)
            return self.closed(state, window)[0], metrics
        key = self._own_key(state)
        before, seen = self._seen(state)
        data = Data(given.batch, key, seen)
        found = self._differentiated(state, data)
        model_state = self._agreed(found.model_state)
        metrics, model_state = _counted(given.weight, found.metrics, model_state, before)
        loss, data = metrics["loss"], data._replace(batch=found.batch)
        grads, rows, refused = found.grads, found.rows, found.refused
        return Gathered(grads, loss, model_state, given.weight, rows, data, refused), metrics

    def opened(self, state: TrainState, given: Given, num_batches: int) -> GradientWindow:
        """An empty window, for so many batches of the shapes of this one.

        Communication: with `model_state="broadcast"` its bytes over the replicas; else none.
        """
        _, seen = self._seen(state)
        data = Data(given.batch, self._own_key(state), seen)
        # For shapes and types alone: nothing of it is computed.
        found = jax.eval_shape(self._differentiated, state, data)
        return empty_window(found, seen, given.weight, num_batches)

    def collected(
        self, state: TrainState, given: Given, *, fits: bool = False
    ) -> tuple[GradientWindow, Metrics]:
        """The window with this batch in it, and the batch's own metrics.

        `fits` says that there is room for its rows.

        Communication: over `inner_axes` one all-reduce of the metrics; none over replicas.
        """
        window, weight = given.window, given.weight
        assert window is not None, "`opened` makes the first"
        key = jax.random.fold_in(self._own_key(state), window.count)
        seen = window.model_state
        found = self._differentiated(state, Data(given.batch, key, seen))
        metrics, model_state = _counted(weight, found.metrics, found.model_state, seen)
        found = found._replace(model_state=model_state)
        return added_to(window, found, weight, fits=fits), metrics

    def closed(self, state: TrainState, window: GradientWindow) -> tuple[Gathered, Metrics]:
        """What an update wants of a window, and the means of its metrics."""
        grads, rows, metrics = means_of(window)
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), grads, state.params)
        weight, model_state = window.weight, self._agreed(window.model_state)
        metrics, model_state = _counted(weight, metrics, model_state, state.model_state)
        loss, refused = metrics["loss"], window.refused
        return Gathered(grads, loss, model_state, weight, rows, None, refused), metrics

    def evaluated(self, state: TrainState, given: Given) -> Metrics:
        """Metrics of one replica's batch, or of what one of its devices has of it.

        Communication: over `inner_axes` one all-reduce of the metrics; of the model state over the
          replicas where replica 0's is broadcast.
        """
        key = self._own_key(state)
        _, seen = self._seen(state)
        params, batch = vary_over(state.params, self._axes), given.batch
        batch = self.lookup.seen(batch, params)
        value, (metrics, _) = self.loss(params, batch, rng=key, model_state=seen)
        metrics = self._of_replica(with_loss(metrics, value))
        return _counted(given.weight, metrics, (), ())[0]

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """The order in which gradients become ready; found at trace time, from the types alone."""
        batch = jax.eval_shape(self.lookup.seen, batch, state.params)
        params, batch, key, model_state = jax.tree.map(
            _type_only, (state.params, batch, state.rng, state.model_state)
        )
        return ready_order(self.loss, params, batch, rng=key, model_state=model_state)

    @property
    def _axes(self) -> tuple[str, ...]:
        return (*axis_names(self.axis_name), *self.inner_axes)

    def _own_key(self, state: TrainState) -> jax.Array:
        """The replica's key as this device's own."""
        key = state.rng
        for name in self.inner_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key

    def _seen(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model state before the first batch of an update, and as this device sees it."""
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        return before, own_keys(vary_statistics(before, self._axes), self.inner_axes)

    def _differentiated(self, state: TrainState, data: Data) -> Found:
        """What a batch gives."""
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        params, scale = state.params, loss_scale_of(state.opt_state)
        params = vary_over(params, self._axes)
        scale = None if scale is None else vary_over(scale, self._axes)
        find = partial(
            value_and_gradients, self.loss, accumulate=self.accumulate, divides=self.unscales
        )
        batch, key, seen = data

        def compute(params: PyTree, batch: PyTree, key: Any, seen: PyTree, scale: Any) -> Any:
            *results, grads, own = find(params, batch, rng=key, model_state=seen, scale=scale)
            return results, grads, own

        refused = batch.refused
        (metrics, model_state), grads, rows, batch = self.lookup.differentiated(
            batch, params, compute, key, seen, scale
        )
        return Found(grads, self._of_replica(metrics), model_state, rows, batch, refused)

    def _agreed(self, model_state: PyTree) -> PyTree:
        with jax.named_scope(f"{MODEL_STATE}/inner"):
            return agree_inside(model_state, self.inner_axes)

    def _of_replica(self, metrics: Metrics) -> Metrics:
        """Means over the devices of a replica."""
        if not self.inner_axes:
            return metrics
        with jax.named_scope(METRICS):
            return mean_over(metrics, self.inner_axes)


def kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new`, or `old` on a replica of weight 0."""
    old = match_varying(old, new)
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)


def _counted(
    weight: jax.Array | None, metrics: Metrics, model_state: PyTree, before: PyTree
) -> tuple[Metrics, PyTree]:
    """Metrics and model state after a batch; on an idle replica zeros, and that before.

    Metrics hold the weight, too, so that what reads them can weigh them.
    """
    if weight is None:
        return metrics, model_state
    metrics = {**unless_idle(metrics, weight), "weight": weight}
    return metrics, kept_if_idle(weight, model_state, before)


def _type_only(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
