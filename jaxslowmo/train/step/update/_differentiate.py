"""Differentiation of a replica's batches: the gradients of an update and the new model state.

Model state has floating leaves, called statistics (such as BatchNorm's), and other leaves: counters
and PRNG keys. A replica of weight 0 is idle: its batch counts for nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ...._support.scopes import METRICS, MODEL_STATE
from ...._support.types import AxisName, PyTree
from ....gradients.precision import DynamicLossScaleState, loss_scale_of
from ....mesh import device_keys, from_first, place_key
from ....tracing import FullLoss, ready_order
from ....transform import Exchange, replica_mean, unless_idle
from ....tree import cast, parts_of
from ..._train_state import TrainState
from ._batch_gradients import (
    AnyLookup,
    Dispatched,
    Gradients,
    GradientWindow,
    LossData,
    StepInputs,
    WithResults,
    added_to,
    as_value,
    empty_window,
    means_of,
    split_batch,
    value_and_gradients,
)
from ._metrics import Metrics, averaged, with_loss

ModelStateMode = Literal["sync_mean", "broadcast", "local"]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def from_first_replica(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return replica 0's values on all replicas, but each replica's own PRNG keys.

    With equal keys all replicas would draw the same random numbers.

    Communication: one all-reduce over `axis_name` of each leaf that is no key.
    """

    def first(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else from_first(x, axis_name)

    return jax.tree.map(first, tree)


def statistics_before_if(skipped: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, but with the statistics of `old` where `skipped`.

    The batch of a skipped update may have made a running average infinite. It would stay infinite,
    and averages over replicas would spread it to all. Counters and keys are always those of `new`.

    Args:
      skipped: () bool, whether the update was skipped.
      new: a tree after the update.
      old: the same tree before it.

    Communication: none.
    """

    def one(n: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.where(skipped, o, n) if _floating(n) else n

    return jax.tree.map(one, new, old)


def statistics(model_state: PyTree) -> list[jax.Array]:
    """Return the floating leaves of model state, which are averaged with the parameters."""
    return [x for x in jax.tree.leaves(model_state) if _floating(x)]


def with_statistics(model_state: PyTree, leaves: Iterable[jax.Array]) -> PyTree:
    """Return the model state with `leaves` as its `statistics`, in the order of that list."""
    new = iter(leaves)
    return jax.tree.map(lambda x: next(new) if _floating(x) else x, model_state)


def mean_over(tree: PyTree, axis_name: AxisName, weight: jax.Array | None = None) -> PyTree:
    """Return the floating leaves as their means over `axis_name`, and other leaves as they are.

    Communication: one all-reduce over `axis_name` per floating dtype, and with a weight one of 8
      bytes before these; none for a tree without floating leaves.
    """
    leaves = statistics(tree)
    if not leaves:
        return tree
    return with_statistics(tree, replica_mean(leaves, Exchange(axis_name), weight))


def agree_inside(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """Return a model state that is equal on all devices of a replica.

    Statistics are averaged over the devices; other leaves are those of the first device.

    Communication: one all-reduce over `inner_axes` per floating dtype, and one per other leaf.
    """
    if not inner_axes:
        return tree
    return jax.tree.map(
        lambda x: x if _floating(x) else from_first(x, inner_axes), mean_over(tree, inner_axes)
    )


@dataclass(frozen=True)
class Differentiation:
    """The loss function, and the options of the step that say how it is differentiated.

    Methods are traced for one device: `state` is its part of the state, and `state.rng` the data of
    its replica's key for this update. An update of several batches collects their gradients in a
    window: `opened` makes it, `collected` adds a batch, and `closed` or `gathered` ends it.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: number of microbatches of one batch.
      model_state: how replicas exchange model state, as in `make_train_step`.
      lookup: the lookup of rows in embedding tables; the batch of `StepInputs` comes as the
        `Requested` that it has made, which holds the batch and the rows that it needs.
      inner_axes: axes inside a replica over which the batch is split; set by a state's layout.
      unscales: whether the step divides gradients by the loss scale, before it reduces them. False
        leaves the division to the optimizer, as in a loop that calls the optimizer itself.
      dispatched: the loss function, if the host runs it by programs of its own, outside of the
        step's; None otherwise.
    """

    loss: FullLoss
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode
    lookup: AnyLookup
    inner_axes: tuple[str, ...] = ()
    unscales: bool = True
    dispatched: Dispatched | None = None

    def arguments(
        self, state: TrainState, inputs: StepInputs, *, collects: bool, parts: int
    ) -> tuple[PyTree, PyTree, jax.Array, PyTree]:
        """Return the arguments of a dispatched loss function for a batch.

        Args:
          state: the state of the replica.
          inputs: the batch, and the window of earlier batches of the same update, if any.
          collects: whether the batch is one of a window; without one in `inputs` it is the first.
          parts: number of parts into which the batch is cut.

        Returns:
          Parameters and batch, cast for the loss function, or None for both if it takes them
          uncast; a key for each part; and model state.

        Communication: with `model_state="broadcast"` the bytes of the model state over the
          replicas; else none.
        """
        assert self.dispatched is not None, "programs call all other loss functions"
        key, seen = self._device_key(state), self._seen(state)[1]
        if collects:
            count = 0 if inputs.window is None else inputs.window.count
            key = jax.random.fold_in(key, count)
            seen = seen if inputs.window is None else inputs.window.model_state
        keys = key[None] if parts == 1 else jax.random.split(key, parts)
        if parts > 1:
            split_batch(inputs.batch, parts)  # for its error, if `parts` does not divide the batch
        params, batch, _, seen = self.dispatched.arguments(
            state.params, inputs.batch, rng=key, model_state=seen
        )
        # Without a cast the caller uses its own arrays, so the program need not copy them.
        is_cast = self.dispatched.is_cast
        return (params if is_cast else None), (batch if is_cast else None), keys, seen

    def gathered(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update whose last batch is this one, and its metrics."""
        if inputs.window is not None:
            window, metrics = self.collected(state, inputs)
            return self.closed(state, window), metrics
        key = self._device_key(state)
        before, seen = self._seen(state)
        gradients = self._differentiated(state, LossData(inputs.batch, key, seen), inputs.weight)
        gradients = self._agreed(gradients, before)
        return gradients, gradients.metrics

    def opened(self, state: TrainState, inputs: StepInputs, num_batches: int) -> GradientWindow:
        """Return an empty window for an update whose first batch this is.

        With tables the window has room for the rows of `num_batches` batches of the same shapes.

        Communication: with `model_state="broadcast"` the bytes of the model state over the
          replicas; else none.
        """
        _, seen = self._seen(state)
        data = LossData(inputs.batch, self._device_key(state), seen)
        # Only shapes and types are needed, so nothing is computed.
        gradients = jax.eval_shape(self._differentiated, state, data, inputs.weight)
        return empty_window(gradients._replace(model_state=seen, weight=inputs.weight), num_batches)

    def collected(
        self, state: TrainState, inputs: StepInputs, *, fits: bool = False
    ) -> tuple[GradientWindow, Metrics]:
        """Return the window with this batch added, and the batch's metrics.

        `fits` says whether the window has room for the batch's rows of tables; if not, it grows.

        Communication: over `inner_axes` one all-reduce of the metrics; none over replicas.
        """
        window = inputs.window
        assert window is not None, "`opened` makes the window of a first batch"
        key = jax.random.fold_in(self._device_key(state), window.count)
        seen = window.model_state
        gradients = self._differentiated(state, LossData(inputs.batch, key, seen), inputs.weight)
        counted = _counted(gradients, seen)
        # `added_to` multiplies metrics by the weight, so give it those before `_counted`, which
        # has added the weight itself as a metric.
        window = added_to(window, counted._replace(metrics=gradients.metrics), fits=fits)
        return window, counted.metrics

    def closed(self, state: TrainState, window: GradientWindow) -> Gradients:
        """Return the mean gradients of a window, in the parameters' dtypes, for an update.

        Communication: over `inner_axes` that of `agree_inside`; none over replicas.
        """
        gradients = means_of(window)
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), gradients.grads, state.params)
        # The model state of a replica that was idle in all batches is that with which they began.
        return self._agreed(gradients._replace(grads=grads), gradients.model_state)

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch, of which each device evaluates its part.

        Communication: over `inner_axes` one all-reduce of the metrics; with
          `model_state="broadcast"` also that of `from_first_replica`.
        """
        key = self._device_key(state)
        _, seen = self._seen(state)
        params = state.params
        batch = self.lookup.seen(inputs.batch, params)
        value, (metrics, _) = self.loss(params, batch, rng=key, model_state=seen)
        return _with_weight(self._of_replica(with_loss(metrics, value)), inputs.weight)

    def loss_at(self, params: PyTree, weight: Any = None, *, data: LossData) -> jax.Array:
        """Return this replica's loss of the same examples at other parameters.

        `weight` is unused: line searches pass on all their extra arguments.

        Communication: none.
        """
        del weight
        batch, key, model_state = data
        if isinstance(batch, WithResults):
            raise ValueError(
                "`optimizer` asks for `value_fn`, the loss at other parameters, as line searches "
                'do, and the loss function, a pipeline with `executor`="host", is computed outside '
                "of the step's programs. Use an optimizer that needs `value` and `grad` alone, or "
                'none of them, or make the pipeline with `executor`="one_program".'
            )
        if self.accumulate == 1:
            return as_value(self.loss(params, batch, rng=key, model_state=model_state)[0])
        parts = split_batch(batch, self.accumulate)

        def one(state: PyTree, x: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            part, part_key = x
            value, (_, state) = self.loss(params, part, rng=part_key, model_state=state)
            return state, as_value(value)

        keys = jax.random.split(key, self.accumulate)
        return jax.lax.scan(one, model_state, (parts, keys))[1].mean()

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which the backward pass completes the gradients of the leaves.

        It is found at trace time, from shapes and dtypes alone.
        """
        batch = jax.eval_shape(self.lookup.seen, batch, state.params)
        params, batch, key, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            (state.params, batch, jax.eval_shape(self._device_key, state), state.model_state),
        )
        return ready_order(self.loss, params, batch, rng=key, model_state=model_state)

    def _device_key(self, state: TrainState) -> jax.Array:
        """Return this device's PRNG key, made from that of the replica."""
        return place_key(jax.random.wrap_key_data(state.rng), self.inner_axes)

    def _seen(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return the model state before an update, and that which the loss function sees.

        They differ in the PRNG keys: the loss function gets a different key on each inner device.
        """
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        return before, device_keys(before, self.inner_axes)

    def _differentiated(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        """Return the gradients of a batch; `weight`, the replica's, is only passed on."""
        scale = None
        if parts_of(state.opt_state, DynamicLossScaleState):
            scale = loss_scale_of(state.opt_state)
        compute = partial(
            value_and_gradients, self.loss, accumulate=self.accumulate, divides=self.unscales
        )
        requested, key, seen = data
        (metrics, model_state), grads, rows, batch = self.lookup.differentiated(
            requested, state.params, compute, key, seen, scale
        )
        metrics, data = self._of_replica(metrics), LossData(batch, key, seen)
        return Gradients(grads, metrics, model_state, rows, requested.refused, weight, data)

    def _agreed(self, gradients: Gradients, before: PyTree) -> Gradients:
        """Make model state equal on all devices of a replica; that of an idle one is `before`."""
        with jax.named_scope(f"{MODEL_STATE}/inner"):
            model_state = agree_inside(gradients.model_state, self.inner_axes)
        return _counted(gradients._replace(model_state=model_state), before)

    def _of_replica(self, metrics: Metrics) -> Metrics:
        """Return the means of a device's metrics over all devices of its replica."""
        if not self.inner_axes:
            return metrics
        with jax.named_scope(METRICS):
            leaves, treedef = jax.tree.flatten(averaged(metrics))
            means = mean_over([_as_floats(x) for x in leaves], self.inner_axes)
            return treedef.unflatten([x[0] if len(x) == 1 else lax.complex(*x) for x in means])


def _as_floats(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return a float alone, and a complex number as its two parts."""
    return (x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,)


def kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, or `old` on an idle replica, one of weight 0."""
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)


def _counted(gradients: Gradients, before: PyTree) -> Gradients:
    """Return the gradients with the weight as a metric, if replicas have weights.

    On an idle replica all metrics are then 0, and the model state is `before`.
    """
    if gradients.weight is None:
        return gradients
    model_state = kept_if_idle(gradients.weight, gradients.model_state, before)
    return gradients._replace(
        metrics=_with_weight(gradients.metrics, gradients.weight), model_state=model_state
    )


def _with_weight(metrics: Metrics, weight: jax.Array | None) -> Metrics:
    """Return metrics with "weight", for weighted means over replicas; zeros on an idle replica."""
    return metrics if weight is None else {**unless_idle(metrics, weight), "weight": weight}
