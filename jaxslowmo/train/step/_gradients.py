"""The gradients of an update: of one batch in microbatches, or of several batches in a window.

Metrics, any tree of arrays, are averaged over devices and batches: half precision and booleans
become float32; integers stay integers where no mean is taken, and means of them are float32. Model
state has floating leaves, called statistics (such as BatchNorm's), and other leaves: counters and
PRNG keys. A replica of weight 0 is idle: its batch counts for nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.scopes import METRICS, MODEL_STATE
from ..._support.types import AxisName, PyTree
from ...embedding import BatchWithVectors, PrefetchedRows, accumulate_rows, empty_rows, row_means
from ...gradients.precision import loss_scale_of, scaled_value_and_grad
from ...gradients.sparse import Rows
from ...mesh import broadcast_from_first, is_shared_leaf, per_replica_keys, position_key
from ...tracing import FullLoss, as_quotient, ready_order
from ...transform import ReplicaGroup, unless_idle
from ...tree import WeightedSum, add, at_least_float32, cast, zeros_like
from .._train_state import TrainState

Metrics = dict[str, Any]
_WEIGHTS = "weight", "loss_weight"  # metrics by which others are weighted
ModelStateMode = Literal["sync_mean", "broadcast", "local"]


class GradientWindow(NamedTuple):
    """The sums over the batches of one update so far; `step.collect` makes it and adds to it.

    "devices" counts positions along the replica axis and the axes inside a replica over which the
    batch is split; nothing is reduced between these before the update.

    Attributes:
      grads: the gradients; leaves (devices, *s), weight (devices,). The weight of a batch is that
        of the replica (1 without weights), or of the device's losses if these are pairs.
      metrics: the metrics as `weighted_metrics` gives them, with a leading dimension (replicas,).
      model_state: model state after the last batch, leaves (devices, ...).
      count: (replicas,) int32, batches so far; equal on all replicas.
      rows: dict by table of row numbers (devices, k) and weighted gradients (devices, k, *s) of the
        rows that a device holds. First come those for which the window was opened, one batch of
        equal shapes after the other, then those with which it grew; {} without tables.
      refused: (replicas,) int32, ids so far that are in no table, or have no slot; if it is not 0
        the update will be skipped. None without tables.
      num_placed: (replicas,) int32, batches with which it did not grow; None without tables.
    """

    grads: WeightedSum
    metrics: Metrics
    model_state: PyTree
    count: jax.Array
    rows: Rows
    refused: jax.Array | None = None
    num_placed: jax.Array | None = None

    @property
    def weight(self) -> jax.Array | None:
        """Sum of the replica's weights, (replicas,) float32; None if batches have no weights."""
        return self.metrics.get("weight")


class StepInputs(NamedTuple):
    """The inputs of a program besides the state; inside it, the part of a replica or device.

    Attributes:
      batch: the batch; None for an update of a window alone.
      weight: () the replica's weight in averages; None if all are equal.
      window: the gradients of earlier batches of the same update; None without a window.
      carry: the lookup that an earlier step has started for the batch; None if there is none.
      upcoming: the next batch; None if nothing is looked up for it.
    """

    batch: PyTree = None
    weight: jax.Array | None = None
    window: GradientWindow | None = None
    carry: PrefetchedRows | None = None
    upcoming: PyTree = None


# Role of each field, as `map_replicas` takes it.
WINDOW_ROLES = GradientWindow._make(
    ("device", "stacked", "device", "stacked", "device", "stacked", "stacked")
)
INPUT_ROLES: Any = StepInputs._make(("batch", "stacked", WINDOW_ROLES, "device", "batch"))


class LossData(NamedTuple):
    """The arguments of the loss function besides the parameters.

    Attributes:
      batch: this device's part of the batch.
      key: PRNG key of this device.
      model_state: model state before the batch.
    """

    batch: PyTree
    key: jax.Array
    model_state: PyTree


class Gradients(NamedTuple):
    """The gradients of one batch or of a window, with which an update starts.

    Attributes:
      grads: mean gradients over the examples of this device.
      metrics: the replica's metrics, means over all of its examples, with "loss".
      model_state: model state of this device after the batch.
      weight: () this replica's weight in averages over replicas; None if all are equal.
      data: the arguments of the loss; None for a window, whose batches are gone.
      rows: dict by table of mean gradients of the rows that this device holds; {} without tables.
      refused: () int32, number of the replica's ids that forbid the update; None without tables.
      loss_weight: () float32, weight of this device's loss where losses are pairs `(sum, weight)`;
        None for other losses, which count equally.
    """

    grads: PyTree
    metrics: Metrics
    model_state: PyTree
    weight: jax.Array | None
    data: LossData | None
    rows: Rows
    refused: jax.Array | None = None
    loss_weight: jax.Array | None = None

    @property
    def device_weight(self) -> jax.Array | None:
        """This device's weight, (), in means of gradients and losses; None if all are equal."""
        if self.loss_weight is None or self.weight is None:
            return self.weight if self.loss_weight is None else self.loss_weight
        return unless_idle(self.loss_weight, self.weight)


@dataclass(frozen=True)
class BatchGradients:
    """The loss function, and how a step differentiates it, for one device.

    `state` is a device's part of the state, and `state.rng` the data of its replica's key for this
    update. An update of several batches sums their gradients in a window: `open_window` makes it,
    `collect` adds a batch, and `compute_gradients` ends it.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: number of microbatches of one batch.
      model_state_mode: how replicas exchange model state; `model_state` of `make_train_step`.
      unscales: whether the step divides gradients by the loss scale, before it reduces them. False
        leaves the division to the optimizer, as in a loop that calls the optimizer itself.
      inner_axes: axes inside a replica over which the batch is split; set by a state's layout.
      num_devices: the number of devices on which the examples that a loss sees lie.
    """

    loss: FullLoss
    axis_name: AxisName
    accumulate: int
    model_state_mode: ModelStateMode
    unscales: bool = True
    inner_axes: tuple[str, ...] = ()
    num_devices: int = 1

    def compute_gradients(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update, and the metrics of its last batch.

        They are those of the batch, of the window, or of the window with the batch added. The
        metrics of a window alone are means over its batches.

        Communication: over `inner_axes` that of `sync_inner_axes`, and with a batch one all-reduce
          of its metrics; with `model_state="broadcast"` that of `from_first_replica`.
        """
        if inputs.window is None:
            before, loss_model_state = self.model_states(state)
            data = LossData(inputs.batch, self.device_key(state), loss_model_state)
            gradients = self._sync_model_state(
                self._batch_gradients(state, data, inputs.weight), before
            )
            return gradients, gradients.metrics
        window, metrics = inputs.window, None
        if inputs.batch is not None:
            window, metrics = self.collect(state, inputs)
        # They are zeros on a replica that was idle in all batches.
        means, grads_weight = mean_metrics(window.metrics), window.grads.weight
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), window.grads.mean, state.params)
        gradients = Gradients(
            *(grads, means, window.model_state, window.weight, None),
            *(row_means(window.rows, grads_weight), window.refused),
            grads_weight if "loss_weight" in means else None,
        )
        # The model state of such a replica is that with which they began.
        gradients = self._sync_model_state(gradients, window.model_state)
        return gradients, means if metrics is None else metrics

    def open_window(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int = 0
    ) -> GradientWindow:
        """Return an empty window for an update whose first batch this is.

        With tables the window can hold the rows of `num_batches` batches of the same shapes.

        Communication: with `model_state="broadcast"` that of `from_first_replica`.
        """
        _, loss_model_state = self.model_states(state)
        data = LossData(inputs.batch, self.device_key(state), loss_model_state)
        # Only shapes and types are needed, so nothing is computed.
        like = jax.eval_shape(self._batch_gradients, state, data, inputs.weight)
        weight = like.weight if like.loss_weight is None else like.loss_weight
        count = jnp.zeros([], jnp.int32)
        return GradientWindow(
            *_zero_sums(like.grads, like.metrics, weight),
            *(loss_model_state, count, empty_rows(like.rows, num_batches)),
            refused=jax.tree.map(zeros_like, like.refused),
            num_placed=count if like.rows else None,
        )

    def collect(
        self, state: TrainState, inputs: StepInputs, *, fits_window: bool = False
    ) -> tuple[GradientWindow, Metrics]:
        """Return the window with this batch added, and the batch's metrics.

        `fits_window` says whether the batch's rows of tables have a place in the window; if not, it
        grows.

        Communication: over `inner_axes` that of the metrics of a batch; none over replicas.
        """
        window = inputs.window
        assert window is not None, "`open_window` makes the window of a first batch"
        key = jax.random.fold_in(self.device_key(state), window.count)
        data = LossData(inputs.batch, key, window.model_state)
        gradients = self._batch_gradients(state, data, inputs.weight)
        weight, place = gradients.weight, window.num_placed if fits_window else None
        terms = _terms(gradients.grads, gradients.metrics, gradients.device_weight)
        grads, metrics = jax.tree.map(add, (window.grads, window.metrics), terms)
        window = GradientWindow(
            *(grads, metrics, old_if_idle(weight, gradients.model_state, window.model_state)),
            window.count + 1,
            accumulate_rows(window.rows, gradients.rows, weight, place),
            jax.tree.map(jnp.add, window.refused, gradients.refused),
            window.num_placed if place is None else place + 1,
        )
        return window, gradients.metrics

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch, of which each device evaluates its part.

        Communication: over `inner_axes` one all-reduce of the metrics; with
          `model_state="broadcast"` also that of `from_first_replica`.
        """
        data = LossData(inputs.batch, self.device_key(state), self.model_states(state)[1])
        loss, (metrics, _) = self.evaluate_loss(state.params, data)
        return self._replica_metrics(with_loss(metrics, *as_quotient(loss)), inputs.weight)

    def evaluate_loss(self, params: PyTree, data: LossData) -> Any:
        """Return `(loss, (metrics, model state))` of a batch at these parameters."""
        batch, key, model_state = data
        return self.loss(params, batch, rng=key, model_state=model_state)

    def loss_at(self, params: PyTree, weight: Any = None, *, data: LossData) -> jax.Array:
        """Return this replica's loss of the same examples at other parameters.

        `weight` is unused: line searches pass on all their extra arguments.

        Communication: none.
        """
        del weight
        batch, key, model_state = data
        if self.accumulate == 1:
            return as_value(as_quotient(self.evaluate_loss(params, data)[0])[0])
        microbatches = split_batch(batch, self.accumulate, self.num_devices)

        def one(state: PyTree, x: tuple[PyTree, jax.Array]) -> tuple[PyTree, WeightedSum]:
            loss, (_, state) = self.evaluate_loss(params, LossData(*x, state))
            return state, WeightedSum.from_value(*as_quotient(loss))

        keys = jax.random.split(key, self.accumulate)
        _, terms = lax.scan(one, model_state, (microbatches, keys))
        return jax.tree.map(lambda x: x.sum(0), terms).mean

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which the backward pass completes the gradients of the leaves.

        It is found at trace time, from shapes and dtypes alone.
        """
        params, batch, key, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            (state.params, batch, jax.eval_shape(self.device_key, state), state.model_state),
        )
        return ready_order(self.loss, params, batch, rng=key, model_state=model_state)

    def device_key(self, state: TrainState) -> jax.Array:
        """Return this device's PRNG key, made from that of the replica."""
        return position_key(jax.random.wrap_key_data(state.rng), self.inner_axes)

    def model_states(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return the model state before an update, and that which the loss function sees.

        They differ in the PRNG keys: the loss function gets a different key on each inner device.
        """
        before = state.model_state
        if self.model_state_mode == "broadcast":
            with jax.named_scope(f"{MODEL_STATE}/broadcast"):
                before = from_first_replica(before, self.axis_name)
        return before, per_replica_keys(before, self.inner_axes, inside=True)

    def _batch_gradients(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        """Return the gradients of a batch; `weight` is the replica's."""
        (metrics, model_state), grads, _ = self.differentiate(state, state.params, *data)
        loss_weight = metrics.get("loss_weight")
        metrics = self._replica_metrics(metrics, weight)
        return Gradients(grads, metrics, model_state, weight, data, {}, loss_weight=loss_weight)

    def differentiate(
        self, state: TrainState, params: PyTree, batch: PyTree, key: jax.Array, model_state: PyTree
    ) -> tuple[Any, PyTree, PyTree]:
        """Return results and mean gradients over the microbatches of a batch.

        The results are metrics, as `with_loss` returns them, and model state, which passes from
        microbatch to microbatch. Gradients and the loss are summed in at least float32 and returned
        in their own dtypes; losses that are pairs `(sum, weight)`, and their gradients, are
        weighted. With a loss scale in `state` gradients are those of the loss times the scale,
        divided by it again if the step `unscales`; the loss is then at least float32. The last
        result is the gradient of the vectors of a batch `BatchWithVectors`, per example; None for
        other batches.

        Communication: none, whatever the number of microbatches.
        """

        def differentiable_loss(
            both: tuple[PyTree, PyTree], microbatch: PyTree, key: jax.Array, state: PyTree
        ):
            params, embedded = both
            if embedded is not None:
                microbatch = microbatch._replace(embedded=embedded)
            value, aux = self.loss(params, microbatch, rng=key, model_state=state)
            value, weight = as_quotient(value)
            return value, (weight, aux)

        grad_fn = jax.value_and_grad(differentiable_loss, has_aux=True)
        if (scale := loss_scale_of(state.opt_state)) is not None:
            grad_fn = scaled_value_and_grad(differentiable_loss, scale, divides=self.unscales)

        def one(state: PyTree, microbatch: PyTree, key: jax.Array):
            both = params, microbatch.embedded if isinstance(microbatch, BatchWithVectors) else None
            (value, aux), (grads, embedded_grads) = grad_fn(both, microbatch, key, state)
            weight, (metrics, state) = aux
            return (with_loss(metrics, value, weight), state), grads, embedded_grads

        if self.accumulate == 1:
            return one(model_state, batch, key)
        microbatches = split_batch(batch, self.accumulate, self.num_devices)
        keys = jax.random.split(key, self.accumulate)
        first = jax.tree.map(lambda x: x[0], microbatches)
        (like, _), *_ = jax.eval_shape(one, model_state, first, keys[0])

        def add_microbatch(carry: tuple[PyTree, PyTree], x: tuple[PyTree, jax.Array]):
            sums, state = carry
            (metrics, state), grads, embedded_grads = one(state, *x)
            terms = _terms(grads, metrics, metrics.get("loss_weight"))
            return (jax.tree.map(add, sums, terms), state), embedded_grads

        zeros = _zero_sums(params, like, like.get("loss_weight"))
        (sums, model_state), embedded_grads = lax.scan(
            add_microbatch, (zeros, model_state), (microbatches, keys)
        )
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), sums[0].mean, params)
        metrics = mean_metrics(sums[1])
        metrics = {**metrics, "loss": cast(metrics["loss"], like["loss"].dtype)}

        def per_example(g: jax.Array, embedded: jax.Array) -> jax.Array:
            # An example has a gradient in its own microbatch only; one that all share, in each.
            g = g / self.accumulate
            return g.sum(0) if is_shared_leaf(embedded) else g.reshape(embedded.shape)

        if isinstance(batch, BatchWithVectors):
            embedded_grads = jax.tree.map(per_example, embedded_grads, batch.embedded)
        return (metrics, model_state), grads, embedded_grads

    def _sync_model_state(self, gradients: Gradients, before: PyTree) -> Gradients:
        """Make model state equal on all devices of a replica; that of an idle one is `before`."""
        with jax.named_scope(f"{MODEL_STATE}/inner"):
            model_state = sync_inner_axes(gradients.model_state, self.inner_axes)
        model_state = old_if_idle(gradients.weight, model_state, before)
        return gradients._replace(model_state=model_state)

    def _replica_metrics(self, metrics: Metrics, weight: jax.Array | None) -> Metrics:
        """Return the means of a device's metrics over its replica, whose weight is a metric, too.

        They are zeros on an idle replica. "loss_weight" is the sum over the devices.

        Communication: over `inner_axes` one all-reduce per dtype of metrics.
        """
        if axes := self.inner_axes:
            is_pair = "loss_weight" in metrics
            if is_pair:
                terms = WeightedSum.from_value(metrics["loss"], metrics["loss_weight"])
                metrics = {**metrics, "loss": terms.sum}
            with jax.named_scope(METRICS):
                leaves, treedef = jax.tree.flatten(metrics)
                means = mean_over([_as_floats(x) for x in leaves], axes)
                numbers = [x[0] if len(x) == 1 else lax.complex(*x) for x in means]
                metrics = treedef.unflatten(numbers)
            if is_pair:
                loss = WeightedSum(metrics["loss"], metrics["loss_weight"])
                whole = loss.weight * lax.axis_size(axes)
                metrics = {**metrics, "loss": loss.mean, "loss_weight": whole}
        return metrics if weight is None else {**unless_idle(metrics, weight), "weight": weight}


def split_batch(batch: PyTree, num_microbatches: int, num_devices: int = 1) -> PyTree:
    """Split the batch into equal microbatches, stacked along a new leading axis.

    If it lies on several devices, each microbatch has as many examples of each, so nothing is
    moved. A leaf that all examples share, which has no dimension or one row where others have more,
    is the same in each microbatch.
    """
    examples = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=1)

    def split(x: jax.Array) -> jax.Array:
        if is_shared_leaf(x) and (x.ndim == 0 or examples > 1):
            return lax.broadcast(x, (num_microbatches,))
        size, rest = divmod(x.shape[0], num_microbatches * num_devices)
        if rest:
            raise ValueError(
                f"`accumulate`={num_microbatches} must divide the batch on each device, got "
                f"{x.shape[0] // num_devices} examples."
            )
        x = x.reshape(num_devices, num_microbatches, size, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(num_microbatches, num_devices * size, *x.shape[3:])

    return jax.tree.map(split, batch)


# Sums over microbatches, and over the batches of a window.


def _terms(
    grads: PyTree, metrics: Metrics, weight: jax.Array | None
) -> tuple[WeightedSum, Metrics]:
    """Return what a batch, or a microbatch, adds to sums; `weight` is that of its gradients."""
    return WeightedSum.from_value(grads, weight), weighted_metrics(metrics)


def _zero_sums(*like: PyTree) -> tuple[WeightedSum, Metrics]:
    """Return zeros to which `_terms` are added, from types of its arguments."""
    return jax.tree.map(zeros_like, jax.eval_shape(_terms, *like))


# Metrics.


def as_value(loss: jax.Array) -> jax.Array:
    """Return a loss for the optimizer: in at least float32, since it is averaged and compared."""
    return loss.astype(at_least_float32(loss.dtype))


def with_loss(
    metrics: Mapping[str, Any], loss: jax.Array, weight: jax.Array | None = None
) -> Metrics:
    """Return a loss function's metrics with the loss, and its weight if losses are pairs.

    Raises:
      ValueError: a metric called "loss", "weight" or "loss_weight".
    """
    more = {"loss": loss} if weight is None else {"loss": loss, "loss_weight": weight}
    return merge_metrics(jax.tree.map(_as_metric, dict(metrics)), more, _WEIGHTS)


def merge_metrics(
    metrics: Metrics, more: Mapping[str, Any], taken: tuple[str, ...] = ()
) -> Metrics:
    """Return the metrics of a loss function with those of the step.

    Raises:
      ValueError: a metric of the loss function with a name that the step uses.
    """
    if wrong := [name for name in (*more, *taken) if name in metrics]:
        raise ValueError(f"`loss_fn` must not call a metric {wrong[0]!r}, as the step does.")
    return {**metrics, **more}


def metric_weight(name: str, metrics: Mapping[str, Any]) -> Any:
    """Return the weight of a metric in means over batches or replicas; None if all are equal.

    It is "loss_weight" for the loss of pairs `(sum, weight)`, and else "weight". These two have
    none: they are sums.
    """
    if name in _WEIGHTS:
        return None
    weight = metrics.get("weight")
    return metrics.get("loss_weight", weight) if name == "loss" else weight


def weighted_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """Return what the metrics of a batch add to sums over batches."""
    return {
        name: x if name in _WEIGHTS else WeightedSum.from_value(x, metric_weight(name, metrics))
        for name, x in metrics.items()
    }


def mean_metrics(sums: Metrics) -> Metrics:
    """Return the means of sums of `weighted_metrics`, and the sums of the weights."""
    return {name: x.mean if isinstance(x, WeightedSum) else x for name, x in sums.items()}


def _as_metric(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype == jnp.bool_ or _is_floating(x):
        return x.astype(at_least_float32(x.dtype))
    return x


def _as_floats(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return a metric as floats, to take a mean of: a complex number as its two parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.real, x.imag
    return (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x,)


# Model state.


def _is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def from_first_replica(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return replica 0's values on all replicas, but each replica's own PRNG keys.

    With equal keys all replicas would draw the same random numbers.

    Communication: one all-reduce over `axis_name` of each leaf that is no key.
    """

    def first(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else broadcast_from_first(x, axis_name)

    return jax.tree.map(first, tree)


def restore_statistics_if(skipped: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, but with the statistics of `old` where `skipped`, () bool.

    The batch of a skipped update may have made a running average infinite. It would stay infinite,
    and averages over replicas would spread it to all. Counters and keys are always those of `new`.

    Communication: none.
    """

    def one(n: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.where(skipped, o, n) if _is_floating(n) else n

    return jax.tree.map(one, new, old)


def statistics(model_state: PyTree) -> list[jax.Array]:
    """Return the floating leaves of model state, which are averaged with the parameters."""
    return [x for x in jax.tree.leaves(model_state) if _is_floating(x)]


def with_statistics(model_state: PyTree, leaves: Iterable[jax.Array]) -> PyTree:
    """Return the model state with `leaves` as its `statistics`, in the order of that list."""
    new = iter(leaves)
    return jax.tree.map(lambda x: next(new) if _is_floating(x) else x, model_state)


def mean_over(tree: PyTree, axis_name: AxisName, weight: jax.Array | None = None) -> PyTree:
    """Return the floating leaves as their means over `axis_name`, and other leaves as they are.

    Communication: one all-reduce over `axis_name` per floating dtype, and with a weight one of 8
      bytes before these; none for a tree without floating leaves.
    """
    leaves = statistics(tree)
    if not leaves:
        return tree
    return with_statistics(tree, ReplicaGroup(axis_name).mean(leaves, weight))


def sync_inner_axes(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """Return a model state that is equal on all devices of a replica.

    Statistics are averaged over the devices; other leaves are those of the first device.

    Communication: one all-reduce over `inner_axes` per floating dtype, and one per other leaf.
    """
    if not inner_axes:
        return tree
    first = partial(broadcast_from_first, axis_name=inner_axes)
    return jax.tree.map(lambda x: x if _is_floating(x) else first(x), mean_over(tree, inner_axes))


def old_if_idle(weight: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, or `old` on an idle replica, one of weight 0."""
    if weight is None:
        return new
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)
