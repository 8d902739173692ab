"""Differentiation of a replica's batches: the gradients of an update and the new model state."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...._support.scopes import METRICS, MODEL_STATE
from ...._support.types import AxisName, PyTree
from ....gradients.precision import DynamicLossScaleState, loss_scale_of
from ....mesh import axis_names, from_first, match_varying, own_keys, vary_over
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
    Metrics,
    StepInputs,
    WithResults,
    added_to,
    as_value,
    empty_window,
    means_of,
    split_batch,
    value_and_gradients,
    with_loss,
)

ModelStateMode = Literal["sync_mean", "broadcast", "local"]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def vary_statistics(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark floating leaves as varying over `axes`; counters and keys stay equal there."""
    return jax.tree.map(lambda x: vary_over(x, axes) if _floating(x) else x, tree)


def from_first_replica(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return replica 0's values, except PRNG keys: with equal keys all would draw the same.

    Communication: one all-reduce of each other leaf over `axis_name`.
    """

    def first(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else match_varying(from_first(x, axis_name), x)

    return jax.tree.map(first, tree)


def statistics_before_if(skipped: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, but with the floating leaves of `old` if an update was skipped, () bool.

    A running average that became infinite would stay so, and reach all replicas. Counters and keys
    are those of `new`.

    Communication: none.
    """

    def one(n: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.where(skipped, match_varying(o, n), n) if _floating(n) else n

    return jax.tree.map(one, new, old)


def statistics(model_state: PyTree) -> list[jax.Array]:
    """Return the leaves of model state that are averaged with the parameters: the floating ones."""
    return [x for x in jax.tree.leaves(model_state) if _floating(x)]


def with_statistics(model_state: PyTree, leaves: Iterable[jax.Array]) -> PyTree:
    """Return the model state with other values for its `statistics`, in flattening order."""
    new = iter(leaves)
    return jax.tree.map(lambda x: next(new) if _floating(x) else x, model_state)


def mean_over(tree: PyTree, axis_name: AxisName, weight: jax.Array | None = None) -> PyTree:
    """Return the floating leaves as their means over `axis_name`, and other leaves as they are.

    Communication: one all-reduce over `axis_name` per floating dtype, and with a weight, before,
      one of 8 bytes; none for a tree without such leaves.
    """
    leaves = statistics(tree)
    if not leaves:
        return tree
    return with_statistics(tree, replica_mean(leaves, Exchange(axis_name), weight))


def agree_inside(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """Return one model state for all devices of a replica.

    Floating leaves are averaged; other leaves are the first device's.

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

    In its methods `state.rng` is the replica's key for this update.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: number of microbatches of one batch.
      model_state: how replicas exchange model state, as in `make_train_step`.
      lookup: the lookup of rows; batches come with their requests.
      inner_axes: axes inside a replica over which the batch is split; set by a state's layout.
      unscales: whether gradients are divided by a loss scale at once; False leaves that to an
        optimizer that is called as in a user's loop.
      dispatched: the loss function, if it is computed outside of programs; None otherwise.
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
          inputs: the batch, and the window that it goes into.
          collects: whether it goes into a window, which begins here if `inputs` has none.
          parts: number of parts into which the batch is cut.

        Returns:
          Parameters and batch, each None if it is unchanged; a key for each part; and model state.

        Communication: with `model_state="broadcast"` its bytes over the replicas; else none.
        """
        assert self.dispatched is not None, "others are called in programs"
        key, seen = self._device_key(state), self._seen(state)[1]
        if collects:
            count = 0 if inputs.window is None else inputs.window.count
            key = jax.random.fold_in(key, count)
            seen = seen if inputs.window is None else inputs.window.model_state
        keys = key[None] if parts == 1 else jax.random.split(key, parts)
        if parts > 1:
            split_batch(inputs.batch, parts)  # raises where they do not divide it
        params, batch, _, seen = self.dispatched.arguments(
            state.params, inputs.batch, rng=key, model_state=seen
        )
        # Without a cast the caller has both already, and nothing need be copied.
        is_cast = self.dispatched.is_cast
        return (params if is_cast else None), (batch if is_cast else None), keys, seen

    def gathered(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update that includes this batch, and the batch's metrics."""
        if inputs.window is not None:
            window, metrics = self.collected(state, inputs)
            return self.closed(state, window), metrics
        key = self._device_key(state)
        before, seen = self._seen(state)
        gradients = self._differentiated(state, LossData(inputs.batch, key, seen), inputs.weight)
        gradients = self._agreed(gradients, before)
        return gradients, gradients.metrics

    def opened(self, state: TrainState, inputs: StepInputs, num_batches: int) -> GradientWindow:
        """Return an empty window with room for `num_batches` batches of the shapes of this one.

        Communication: with `model_state="broadcast"` its bytes over the replicas; else none.
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

        `fits` says whether there is room for its rows.

        Communication: over `inner_axes` one all-reduce of the metrics; none over replicas.
        """
        window = inputs.window
        assert window is not None, "`opened` makes the first"
        key = jax.random.fold_in(self._device_key(state), window.count)
        seen = window.model_state
        gradients = self._differentiated(state, LossData(inputs.batch, key, seen), inputs.weight)
        counted = _counted(gradients, seen)
        # `added_to` weights the metrics, so it takes those without the weight in them.
        window = added_to(window, counted._replace(metrics=gradients.metrics), fits=fits)
        return window, counted.metrics

    def closed(self, state: TrainState, window: GradientWindow) -> Gradients:
        """Return the mean gradients of a window, in the parameters' dtypes, for an update."""
        gradients = means_of(window)
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), gradients.grads, state.params)
        return self._agreed(gradients._replace(grads=grads), state.model_state)

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch, from a device's part of it.

        Communication: over `inner_axes` one all-reduce of the metrics; of the model state over the
          replicas where replica 0's is broadcast.
        """
        key = self._device_key(state)
        _, seen = self._seen(state)
        params, batch = vary_over(state.params, self._axes), inputs.batch
        batch = self.lookup.seen(batch, params)
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
        """Return the order in which gradients become ready, at trace time, from types alone."""
        batch = jax.eval_shape(self.lookup.seen, batch, state.params)
        params, batch, key, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            (state.params, batch, state.rng, state.model_state),
        )
        return ready_order(self.loss, params, batch, rng=key, model_state=model_state)

    @property
    def _axes(self) -> tuple[str, ...]:
        return (*axis_names(self.axis_name), *self.inner_axes)

    def _device_key(self, state: TrainState) -> jax.Array:
        """Return this device's key, made from the replica's."""
        key = state.rng
        for name in self.inner_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key

    def _seen(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return the model state before an update, and the same with this device's PRNG keys."""
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        return before, own_keys(vary_statistics(before, self._axes), self.inner_axes)

    def _differentiated(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        """Return the gradients of a batch, for a replica of this weight."""
        # shard_map sums gradients of parameters that are equal over an axis. If parameters vary,
        # gradients stay local, and the gradient transform reduces them in buckets.
        params, scale = vary_over(state.params, self._axes), None
        if parts_of(state.opt_state, DynamicLossScaleState):
            scale = vary_over(loss_scale_of(state.opt_state), self._axes)
        compute = partial(
            value_and_gradients, self.loss, accumulate=self.accumulate, divides=self.unscales
        )
        requested, key, seen = data
        (metrics, model_state), grads, rows, batch = self.lookup.differentiated(
            requested, params, compute, key, seen, scale
        )
        metrics, data = self._of_replica(metrics), LossData(batch, key, seen)
        return Gradients(grads, metrics, model_state, rows, requested.refused, weight, data)

    def _agreed(self, gradients: Gradients, before: PyTree) -> Gradients:
        """Make model state equal on all devices of the replica; if idle, it stays `before`."""
        with jax.named_scope(f"{MODEL_STATE}/inner"):
            model_state = agree_inside(gradients.model_state, self.inner_axes)
        return _counted(gradients._replace(model_state=model_state), before)

    def _of_replica(self, metrics: Metrics) -> Metrics:
        """Return the means of the metrics over the devices of a replica."""
        if not self.inner_axes:
            return metrics
        with jax.named_scope(METRICS):
            return mean_over(metrics, self.inner_axes)


def kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, or `old` on a replica of weight 0."""
    old = match_varying(old, new)
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)


def _counted(gradients: Gradients, before: PyTree) -> Gradients:
    """Return the gradients with metrics of 0 and the model state `before` on an idle replica."""
    if gradients.weight is None:
        return gradients
    model_state = kept_if_idle(gradients.weight, gradients.model_state, before)
    return gradients._replace(
        metrics=_with_weight(gradients.metrics, gradients.weight), model_state=model_state
    )


def _with_weight(metrics: Metrics, weight: jax.Array | None) -> Metrics:
    """Add the weight to the metrics, so that readers can weight them; zeros for weight 0."""
    return metrics if weight is None else {**unless_idle(metrics, weight), "weight": weight}
