"""The gradients of an update: of one batch in microbatches, or of several batches in a window.

Metrics, any tree of arrays, are averaged over devices and batches: half precision and booleans
become float32; integers stay integers where no mean is taken, and means of them are float32. Model
state has floating leaves, called statistics (such as BatchNorm's), and other leaves: counters and
PRNG keys. A replica of weight 0 is idle: its batch counts for nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.scopes import METRICS, MODEL_STATE
from ..._support.types import AxisName, PyTree
from ...embedding import Carry, WithVectors, added_rows, empty_rows, summed
from ...gradients.precision import DynamicLossScaleState, loss_scale_of, scaled_value_and_grad
from ...gradients.sparse import Rows
from ...mesh import from_first, is_shared, own_keys, place_key
from ...tracing import FullLoss, as_quotient, ready_order
from ...transform import ReplicaGroup, unless_idle
from ...tree import added, at_least_float32, by_dtype, cast, kept_if, parts_of, zeros_like
from .._train_state import TrainState

Metrics = dict[str, Any]
ModelStateMode = Literal["sync_mean", "broadcast", "local"]


class GradientWindow(NamedTuple):
    """The sums over the batches of one update so far; `step.collect` makes it and adds to it.

    "devices" counts positions along the replica axis and the axes inside a replica over which the
    batch is split; nothing is reduced between these before the update.

    Attributes:
      totals: weighted sums of gradients, leaves (devices, *s), in at least float32.
      metrics: weighted sums of metrics with "loss", leaves (replicas, ...), in at least float32.
      model_state: model state after the last batch, leaves (devices, ...).
      weight: (replicas,) float32, sum of the weights; None if batches have no weights.
      count: (replicas,) int32, batches so far; equal on all replicas.
      rows: dict by table of row numbers (devices, k) and weighted gradients (devices, k, *s) of the
        rows that a device holds. First come those in the room with which the window was opened, one
        batch of equal shapes after the other, then those of batches without room; {} without
        tables.
      refused: (replicas,) int32, ids so far that are in no table, or have no slot; if it is not 0
        the update will be skipped. None without tables.
      num_placed: (replicas,) int32, batches in the room; None without tables.
      loss_weight: (devices,) float32, sum of the weights of losses that are pairs `(sum, weight)`,
        by which gradients and losses are weighted; None for other losses.
    """

    totals: PyTree
    metrics: Metrics
    model_state: PyTree
    weight: jax.Array | None
    count: jax.Array
    rows: Rows
    refused: jax.Array | None = None
    num_placed: jax.Array | None = None
    loss_weight: jax.Array | None = None


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
    carry: Carry | None = None
    upcoming: PyTree = None


# Role of each field, as `map_replicas` takes it.
WINDOW_ROLES = GradientWindow._make(
    ("device", "stacked", "device", *("stacked",) * 2, "device", *("stacked",) * 2, "device")
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
    def share(self) -> jax.Array | None:
        """This device's weight, (), in means of gradients and losses; None if all are equal."""
        if self.loss_weight is None or self.weight is None:
            return self.weight if self.loss_weight is None else self.loss_weight
        return unless_idle(self.loss_weight, self.weight)


class WithResults(NamedTuple):
    """A batch, and the results of a loss function that is dispatched, for it.

    Attributes:
      batch: the batch itself.
      results: what the loss function takes in place of the batch, inside of a program; leaves have
        a leading dimension over the positions over which the batch is split.
    """

    batch: PyTree
    results: PyTree


@dataclass(frozen=True)
class BatchGradients:
    """The loss function, and how a step differentiates it, for one device.

    `state` is a device's part of the state, and `state.rng` the data of its replica's key for this
    update. An update of several batches sums their gradients in a window: `opened` makes it,
    `collected` adds a batch, and `gathered` ends it.

    Attributes:
      loss: the loss function.
      axis_name: the replica axis.
      accumulate: number of microbatches of one batch.
      model_state: how replicas exchange model state, as in `make_train_step`.
      unscales: whether the step divides gradients by the loss scale, before it reduces them. False
        leaves the division to the optimizer, as in a loop that calls the optimizer itself.
      inner_axes: axes inside a replica over which the batch is split; set by a state's layout.
    """

    loss: FullLoss
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode
    unscales: bool = True
    inner_axes: tuple[str, ...] = ()

    def gathered(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update, and the metrics of its last batch.

        They are those of the batch, of the window, or of the window with the batch added. The
        metrics of a window alone are means over its batches.

        Communication: over `inner_axes` that of `agree_inside`, and with a batch one all-reduce of
          its metrics; with `model_state="broadcast"` that of `from_first_replica`.
        """
        if inputs.window is None:
            before, seen = self._seen(state)
            data = LossData(inputs.batch, self._device_key(state), seen)
            gradients = self._agreed(self._of_batch(state, data, inputs.weight), before)
            return gradients, gradients.metrics
        window, metrics = inputs.window, None
        if inputs.batch is not None:
            window, metrics = self.collected(state, inputs)
        gradients = means_of(window)
        grads = jax.tree.map(lambda g, p: cast(g, p.dtype), gradients.grads, state.params)
        # The model state of a replica that was idle in all batches is that with which they began.
        gradients = self._agreed(gradients._replace(grads=grads), gradients.model_state)
        return gradients, gradients.metrics if metrics is None else metrics

    def opened(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int = 0
    ) -> GradientWindow:
        """Return an empty window for an update whose first batch this is.

        With tables the window has room for the rows of `num_batches` batches of the same shapes.

        Communication: with `model_state="broadcast"` that of `from_first_replica`.
        """
        _, seen = self._seen(state)
        data = LossData(inputs.batch, self._device_key(state), seen)
        # Only shapes and types are needed, so nothing is computed.
        like = jax.eval_shape(self._of_batch, state, data, inputs.weight)
        return empty_window(like._replace(model_state=seen, weight=inputs.weight), num_batches)

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
        data = LossData(inputs.batch, key, window.model_state)
        gradients = self._of_batch(state, data, inputs.weight)
        counted = _counted(gradients, window.model_state)
        # `added_to` multiplies metrics by the weight, so give it those before `_counted`, which
        # has added the weight itself as a metric.
        counted_in = counted._replace(metrics=gradients.metrics)
        return added_to(window, counted_in, self.inner_axes, fits=fits), counted.metrics

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a replica's batch, of which each device evaluates its part.

        Communication: over `inner_axes` one all-reduce of the metrics; with
          `model_state="broadcast"` also that of `from_first_replica`.
        """
        data = LossData(inputs.batch, self._device_key(state), self._seen(state)[1])
        loss, (metrics, _) = self.at(state.params, data)
        value, loss_weight = as_quotient(loss)
        metrics = self._of_replica(with_loss(metrics, value), loss_weight)
        return _with_weight(metrics, inputs.weight)

    def arguments(
        self, state: TrainState, inputs: StepInputs, *, collects: bool, parts: int
    ) -> tuple[jax.Array, PyTree]:
        """Return the keys and the model state that the loss function receives with a batch.

        A loss function that is dispatched runs outside of the step's programs.

        Args:
          state: the state of the replica.
          inputs: the batch, and the window of earlier batches of the same update, if any.
          collects: whether the batch is one of a window; without one in `inputs` it is the first.
          parts: number of parts into which the batch is cut; a key for each is returned.

        Communication: with `model_state="broadcast"` that of `from_first_replica`.
        """
        key, seen = self._device_key(state), self._seen(state)[1]
        if collects:
            window = inputs.window
            key = jax.random.fold_in(key, 0 if window is None else window.count)
            seen = seen if window is None else window.model_state
        if parts > 1:
            split_batch(inputs.batch, parts)  # for its error, if `parts` does not divide the batch
        return key[None] if parts == 1 else jax.random.split(key, parts), seen

    def at(self, params: PyTree, data: LossData) -> Any:
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
        if isinstance(batch, WithResults):
            raise ValueError(
                "`optimizer` asks for `value_fn`, the loss at other parameters, as line searches "
                'do, and the loss function, a pipeline with `executor`="host", is computed outside '
                "of the step's programs. Use an optimizer that needs `value` and `grad` alone, or "
                'none of them, or make the pipeline with `executor`="one_program".'
            )
        if self.accumulate == 1:
            return as_value(as_quotient(self.at(params, data)[0])[0])
        parts = split_batch(batch, self.accumulate)

        def one(state: PyTree, x: tuple[PyTree, jax.Array]) -> tuple[PyTree, Any]:
            loss, (_, state) = self.at(params, LossData(*x, state))
            value, weight = as_quotient(loss)
            return state, (as_value(value), weight)

        keys = jax.random.split(key, self.accumulate)
        _, (values, weights) = lax.scan(one, model_state, (parts, keys))
        return values.mean() if weights is None else (values * weights).sum() / weights.sum()

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...]:
        """Return the order in which the backward pass completes the gradients of the leaves.

        It is found at trace time, from shapes and dtypes alone.
        """
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
        return before, own_keys(before, self.inner_axes, inside=True)

    def _of_batch(self, state: TrainState, data: LossData, weight: Any) -> Gradients:
        """Return the gradients of a batch; `weight`, the replica's, is only passed on."""
        (metrics, model_state, share), grads, _ = self.differentiated(state, state.params, *data)
        metrics = self._of_replica(metrics, share)
        return Gradients(grads, metrics, model_state, weight, data, {}, loss_weight=share)

    def differentiated(
        self, state: TrainState, params: PyTree, batch: PyTree, key: jax.Array, model_state: PyTree
    ) -> tuple[Any, PyTree, PyTree]:
        """Return the results of `value_and_gradients`, with the loss scale of `state`."""
        scale = None
        if parts_of(state.opt_state, DynamicLossScaleState):
            scale = loss_scale_of(state.opt_state)
        return value_and_gradients(
            *(self.loss, params, batch, key, model_state, scale),
            accumulate=self.accumulate,
            divides=self.unscales,
        )

    def _agreed(self, gradients: Gradients, before: PyTree) -> Gradients:
        """Make model state equal on all devices of a replica; that of an idle one is `before`."""
        with jax.named_scope(f"{MODEL_STATE}/inner"):
            model_state = agree_inside(gradients.model_state, self.inner_axes)
        return _counted(gradients._replace(model_state=model_state), before)

    def _of_replica(self, metrics: Metrics, loss_weight: jax.Array | None) -> Metrics:
        """Return the means of a device's metrics over all devices of its replica.

        If losses have weights, that of the loss is weighted, and the sum of the weights is a
        metric, too.
        """
        if loss_weight is not None:
            whole = summed_over(loss_weight, self.inner_axes)
            if self.inner_axes:
                share = loss_weight / whole * lax.axis_size(self.inner_axes)
                metrics = {**metrics, "loss": as_value(metrics["loss"]) * share}
            metrics = {**metrics, "loss_weight": whole}
        if not self.inner_axes:
            return metrics
        with jax.named_scope(METRICS):
            leaves, treedef = jax.tree.flatten(averaged(metrics))
            means = mean_over([_as_floats(x) for x in leaves], self.inner_axes)
            return treedef.unflatten([x[0] if len(x) == 1 else lax.complex(*x) for x in means])


def value_and_gradients(
    loss: FullLoss,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array,
    model_state: PyTree,
    scale: jax.Array | None = None,
    *,
    accumulate: int,
    divides: bool = True,
) -> tuple[tuple[Metrics, PyTree, jax.Array | None], PyTree, PyTree]:
    """Return results and mean gradients over `accumulate` microbatches of a batch.

    The results are metrics, model state, and the weight of losses that are pairs `(sum, weight)`,
    by which losses and gradients of microbatches are weighted; None for others. Metrics include the
    loss. Gradients and the loss are summed in at least float32 and returned in their own dtypes;
    model state passes from microbatch to microbatch. With a `scale`, gradients are taken of the
    loss times `scale`, and divided by it again unless `divides` is False; the loss is then at least
    float32. The last result is the gradient of the vectors of a batch `WithVectors`, per example;
    None for other batches.

    Communication: none, whatever the number of microbatches.
    """

    def of(both: tuple[PyTree, PyTree], part: PyTree, key: jax.Array, state: PyTree):
        params, embedded = both
        if embedded is not None:
            part = part._replace(embedded=embedded)
        value, aux = loss(params, part, rng=key, model_state=state)
        value, weight = as_quotient(value)
        return value, (weight, aux)

    if scale is None:
        differentiate = jax.value_and_grad(of, has_aux=True)
    else:
        differentiate = scaled_value_and_grad(of, scale, divides=divides)

    def one(state: PyTree, part: PyTree, key: jax.Array):
        both = params, part.embedded if isinstance(part, WithVectors) else None
        (value, aux), (grads, embedded_grads) = differentiate(both, part, key, state)
        weight, (metrics, state) = aux
        return (with_loss(metrics, value), state, weight), grads, embedded_grads

    if accumulate == 1:
        return one(model_state, batch, rng)
    parts, keys = split_batch(batch, accumulate), jax.random.split(rng, accumulate)
    first = jax.tree.map(lambda x: x[0], parts)
    (metrics, _, weight), grads, _ = jax.eval_shape(one, model_state, first, keys[0])
    kinds = averaged(metrics), grads, weight
    totals = jax.tree.map(wide_zeros, kinds)

    def add(carry: tuple[PyTree, PyTree], x: tuple[PyTree, jax.Array]):
        totals, state = carry
        (metrics, state, weight), grads, embedded_grads = one(state, *x)
        if weight is not None:
            metrics = {**metrics, "loss": _weighted(metrics["loss"], weight)}
            grads = _weighted(grads, weight)
        terms = metrics, grads, weight
        totals = jax.tree.map(lambda t, x: t + x.astype(t.dtype), totals, terms)
        return (totals, state), embedded_grads

    (totals, model_state), embedded_grads = lax.scan(add, (totals, model_state), (parts, keys))
    metrics, grads, weight = totals
    if weight is not None:
        # The divisor of the loss and of gradients is the sum of weights, and not their number.
        share = by_dtype(accumulate / weight)
        metrics = {**metrics, "loss": metrics["loss"] * share(metrics["loss"].dtype)}
        grads = jax.tree.map(lambda g: g * share(g.dtype), grads)
    means = jax.tree.map(lambda t, s: (t / accumulate).astype(s.dtype), (metrics, grads), kinds[:2])
    metrics, grads = means

    def joined(g: jax.Array, embedded: jax.Array) -> jax.Array:
        # An example has a gradient in its own microbatch only. One that all share has one in each.
        g = g / accumulate
        return g.sum(0) if is_shared(embedded) else g.reshape(embedded.shape)

    if isinstance(batch, WithVectors):
        embedded_grads = jax.tree.map(joined, embedded_grads, batch.embedded)
    return (metrics, model_state, weight), grads, embedded_grads


def split_batch(batch: PyTree, parts: int) -> PyTree:
    """Split the batch into equal parts, stacked along a new leading axis.

    A leaf that all examples share, which has no dimension or one row where others have more, is the
    same in each part.
    """
    examples = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=1)

    def split(x: jax.Array) -> jax.Array:
        if is_shared(x) and (x.ndim == 0 or examples > 1):
            return lax.broadcast(x, (parts,))
        if x.shape[0] % parts:
            raise ValueError(
                f"`accumulate`={parts} must divide the batch on each device, got {x.shape[0]} "
                "examples."
            )
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(split, batch)


# Windows.


def empty_window(like: Gradients, num_batches: int) -> GradientWindow:
    """Return a window before its first batch, with room for the rows of so many.

    `like` are gradients of one batch, with the model state before it; only shapes and dtypes of the
    other fields are used.
    """
    count = jnp.zeros([], jnp.int32)
    return GradientWindow(
        jax.tree.map(wide_zeros, like.grads),
        jax.tree.map(wide_zeros, averaged(like.metrics)),
        like.model_state,
        None if like.weight is None else jnp.zeros_like(like.weight),
        count,
        empty_rows(like.rows, num_batches),
        jax.tree.map(zeros_like, like.refused),
        count if like.rows else None,
        jax.tree.map(zeros_like, like.loss_weight),
    )


def added_to(
    window: GradientWindow, gradients: Gradients, inner_axes: tuple[str, ...], *, fits: bool
) -> GradientWindow:
    """Return the window with one more batch; `fits` says whether there is room for its rows.

    Communication: for losses with weights 4 bytes over `inner_axes`; else none.
    """
    weight, place = gradients.weight, window.num_placed if fits else None
    share, metrics = gradients.share, _weighted(averaged(gradients.metrics), weight)
    if gradients.loss_weight is not None and share is not None:
        loss, whole = gradients.metrics["loss"], summed_over(share, inner_axes)
        metrics = {**metrics, "loss": _weighted(loss, whole), "loss_weight": whole}
    return GradientWindow(
        jax.tree.map(added, window.totals, _weighted(gradients.grads, share)),
        jax.tree.map(added, window.metrics, metrics),
        gradients.model_state,
        None if window.weight is None or weight is None else window.weight + weight,
        window.count + 1,
        added_rows(window.rows, gradients.rows, weight, place),
        jax.tree.map(jnp.add, window.refused, gradients.refused),
        window.num_placed if place is None else place + 1,
        None if gradients.loss_weight is None else jax.tree.map(jnp.add, window.loss_weight, share),
    )


def means_of(window: GradientWindow) -> Gradients:
    """Return the means of gradients and metrics over a window's batches, in at least float32.

    They are zeros on a replica that was idle.
    """

    def over(tree: PyTree, divisor: Any) -> PyTree:
        return jax.tree.map(lambda x: x / divisor(x.dtype), tree)

    divisor = by_dtype(window.count) if window.weight is None else _unless_zero(window.weight)
    metrics, of_grads = over(window.metrics, divisor), divisor
    if window.loss_weight is not None:
        loss, whole = window.metrics["loss"], window.metrics["loss_weight"]
        metrics = {**metrics, "loss": over(loss, _unless_zero(whole)), "loss_weight": whole}
        of_grads = _unless_zero(window.loss_weight)
    return Gradients(
        *(over(window.totals, of_grads), metrics, window.model_state, window.weight, None),
        *(summed(window.rows, divisor), window.refused, window.loss_weight),
    )


def _unless_zero(weight: jax.Array) -> Callable[[Any], jax.Array]:
    """Return the weight by dtype; instead of 0 infinity, which makes the sums of idle ones 0."""
    return by_dtype(jnp.where(weight > 0, weight, jnp.inf))


def summed_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over these axes; `x` without any."""
    return lax.psum(x, axes) if axes else x


def _weighted(tree: PyTree, weight: jax.Array | None) -> PyTree:
    """Return the tree in at least float32, times the weight; zeros for weight 0, even for NaN."""
    wide = jax.tree.map(lambda x: cast(x, at_least_float32(x.dtype)), tree)
    if weight is None:
        return wide
    counts, factor = weight > 0, by_dtype(weight)
    return jax.tree.map(lambda x: kept_if(counts, x * factor(x.dtype)), wide)


def wide_zeros(kind: Any) -> jax.Array:
    """Return zeros of a type, but in at least float32, to which values of the type are added."""
    return zeros_like(kind.update(dtype=at_least_float32(kind.dtype)))


# Metrics.


def as_value(loss: jax.Array) -> jax.Array:
    """Return a loss for the optimizer: in at least float32, since it is averaged and compared."""
    return loss.astype(at_least_float32(loss.dtype))


def with_loss(metrics: Mapping[str, Any], loss: jax.Array) -> Metrics:
    """Return a loss function's metrics with the loss.

    Raises:
      ValueError: a metric called "loss", "weight" or "loss_weight".
    """
    taken = "weight", "loss_weight"
    return joined(jax.tree.map(_as_metric, dict(metrics)), {"loss": loss}, taken)


def joined(metrics: Metrics, more: Mapping[str, Any], taken: tuple[str, ...] = ()) -> Metrics:
    """Return the metrics of a loss function with those of the step.

    Raises:
      ValueError: a metric of the loss function with a name that the step uses.
    """
    if wrong := [name for name in (*more, *taken) if name in metrics]:
        raise ValueError(
            f"`loss_fn` returns a metric called {wrong[0]!r}, and the step has one of this name: "
            "give it another."
        )
    return {**metrics, **more}


def averaged(metrics: PyTree) -> PyTree:
    """Return metrics, arrays or types, in dtypes that hold their means."""

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return x
        is_type = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.float32) if is_type else x.astype(jnp.float32)

    return jax.tree.map(one, metrics)


def _as_metric(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype == jnp.bool_ or _floating(x):
        return x.astype(at_least_float32(x.dtype))
    return x


def _as_floats(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return a float alone, and a complex number as its two parts."""
    return (x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,)


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


# Model state.


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
    """Return `new`, but with the statistics of `old` where `skipped`, () bool.

    The batch of a skipped update may have made a running average infinite. It would stay infinite,
    and averages over replicas would spread it to all. Counters and keys are always those of `new`.

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
    return with_statistics(tree, ReplicaGroup(axis_name).mean(leaves, weight))


def agree_inside(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """Return a model state that is equal on all devices of a replica.

    Statistics are averaged over the devices; other leaves are those of the first device.

    Communication: one all-reduce over `inner_axes` per floating dtype, and one per other leaf.
    """
    if not inner_axes:
        return tree
    first = partial(from_first, axis_name=inner_axes)
    return jax.tree.map(lambda x: x if _floating(x) else first(x), mean_over(tree, inner_axes))


def kept_if_idle(weight: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, or `old` on an idle replica, one of weight 0."""
    return jax.tree.map(lambda n, o: jnp.where(weight > 0, n, o), new, old)
