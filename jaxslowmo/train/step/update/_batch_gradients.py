"""Gradients of a loss, averaged over microbatches and over the batches of one update."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._support.types import PyTree
from ....embedding import (
    Carry,
    Lookup,
    Requested,
    Requests,
    WithVectors,
    added_rows,
    empty_rows,
    summed,
)
from ....gradients.precision import scaled_value_and_grad
from ....gradients.sparse import Rows
from ....mesh import is_shared, replicate
from ....tracing import FullLoss
from ....tree import added, at_least_float32, by_dtype, cast, kept_if, zeros_like
from ._metrics import Metrics, averaged, with_loss


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
    """

    totals: PyTree
    metrics: Metrics
    model_state: PyTree
    weight: jax.Array | None
    count: jax.Array
    rows: Rows
    refused: jax.Array | None = None
    num_placed: jax.Array | None = None


# Role of each field, as `map_replicas` takes it.
ROLES = GradientWindow._make(
    ("device", "stacked", "device", "stacked", "stacked", "device", "stacked", "stacked")
)


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
INPUT_ROLES: Any = StepInputs._make(("batch", "stacked", ROLES, "device", "batch"))


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
      rows: dict by table of mean gradients of the rows that this device holds; {} without tables.
      refused: () int32, number of the replica's ids that forbid the update; None without tables.
      weight: () this replica's weight in averages over replicas; None if all are equal.
      data: the arguments of the loss; None for a window, whose batches are gone.
    """

    grads: PyTree
    metrics: Metrics
    model_state: PyTree
    rows: Rows
    refused: jax.Array | None
    weight: jax.Array | None
    data: LossData | None


def empty_window(gradients: Gradients, num_batches: int) -> GradientWindow:
    """Return a window before its first batch.

    Args:
      gradients: gradients of one batch, with the model state before it. Only shapes and dtypes of
        the other fields are used.
      num_batches: number of batches for whose rows there is room; more make the window larger.
    """
    count = jnp.zeros([], jnp.int32)
    return GradientWindow(
        jax.tree.map(wide_zeros, gradients.grads),
        jax.tree.map(wide_zeros, averaged(gradients.metrics)),
        gradients.model_state,
        None if gradients.weight is None else jnp.zeros_like(gradients.weight),
        count,
        empty_rows(gradients.rows, num_batches),
        jax.tree.map(zeros_like, gradients.refused),
        count if gradients.rows else None,
    )


def added_to(window: GradientWindow, gradients: Gradients, *, fits: bool) -> GradientWindow:
    """Return the window with one more batch; `fits` says whether there is room for its rows."""
    weight, place = gradients.weight, window.num_placed if fits else None
    return GradientWindow(
        jax.tree.map(added, window.totals, _weighted(gradients.grads, weight)),
        jax.tree.map(added, window.metrics, _weighted(averaged(gradients.metrics), weight)),
        gradients.model_state,
        None if window.weight is None or weight is None else window.weight + weight,
        window.count + 1,
        added_rows(window.rows, gradients.rows, weight, place),
        jax.tree.map(jnp.add, window.refused, gradients.refused),
        window.num_placed if place is None else place + 1,
    )


def means_of(window: GradientWindow) -> Gradients:
    """Return the means of gradients and metrics over a window's batches, in at least float32.

    They are zeros on a replica that was idle.
    """
    if window.weight is None:
        divisor = by_dtype(window.count)
    else:
        # Division by infinity gives zeros on idle replicas, without a `where` for every leaf.
        divisor = by_dtype(jnp.where(window.weight > 0, window.weight, jnp.inf))
    sums = window.totals, window.metrics
    totals, metrics = jax.tree.map(lambda x: x / divisor(x.dtype), sums)
    rows, model_state = summed(window.rows, divisor), window.model_state
    return Gradients(totals, metrics, model_state, rows, window.refused, window.weight, None)


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


def as_value(loss: jax.Array) -> jax.Array:
    """Return a loss for the optimizer: in at least float32, since it is averaged and compared."""
    return loss.astype(at_least_float32(loss.dtype))


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
) -> tuple[tuple[dict[str, jax.Array], PyTree], PyTree, PyTree]:
    """Return metrics, model state and mean gradients over `accumulate` microbatches of a batch.

    Metrics include the loss. Gradients and the loss are summed in at least float32 and returned in
    their own dtypes; model state passes from microbatch to microbatch. With a `scale`, gradients
    are taken of the loss times `scale`, and divided by it again unless `divides` is False; the loss
    is then at least float32. The last result is the gradient of the vectors of a batch
    `WithVectors`, per example; None for other batches.

    Communication: none, whatever the number of microbatches.
    """

    def of(both: tuple[PyTree, PyTree], part: PyTree, key: jax.Array, state: PyTree):
        params, embedded = both
        if embedded is not None:
            part = part._replace(embedded=embedded)
        return loss(params, part, rng=key, model_state=state)

    if scale is None:
        differentiate = jax.value_and_grad(of, has_aux=True)
    else:
        differentiate = scaled_value_and_grad(of, scale, divides=divides)

    def one(state: PyTree, part: PyTree, key: jax.Array):
        both = params, part.embedded if isinstance(part, WithVectors) else None
        (value, (metrics, state)), (grads, embedded_grads) = differentiate(both, part, key, state)
        return (with_loss(metrics, value), state), grads, embedded_grads

    if accumulate == 1:
        return one(model_state, batch, rng)
    parts, keys = split_batch(batch, accumulate), jax.random.split(rng, accumulate)
    first = jax.tree.map(lambda x: x[0], parts)
    (metrics, _), grads, _ = jax.eval_shape(one, model_state, first, keys[0])
    kinds = averaged(metrics), grads
    totals = jax.tree.map(wide_zeros, kinds)

    def add(carry: tuple[PyTree, PyTree], x: tuple[PyTree, jax.Array]):
        totals, state = carry
        (metrics, state), grads, embedded_grads = one(state, *x)
        totals = jax.tree.map(lambda t, x: t + x.astype(t.dtype), totals, (metrics, grads))
        return (totals, state), embedded_grads

    (totals, model_state), embedded_grads = lax.scan(add, (totals, model_state), (parts, keys))
    metrics, grads = jax.tree.map(lambda t, s: (t / accumulate).astype(s.dtype), totals, kinds)

    def joined(g: jax.Array, embedded: jax.Array) -> jax.Array:
        # An example has a gradient in its own microbatch only. One that all share has one in each.
        g = g / accumulate
        return g.sum(0) if is_shared(embedded) else g.reshape(embedded.shape)

    if isinstance(batch, WithVectors):
        embedded_grads = jax.tree.map(joined, embedded_grads, batch.embedded)
    return (metrics, model_state), grads, embedded_grads


class NoTables:
    """The lookup of a step without embedding tables: all of its parameters are dense.

    Attributes and methods are those of `Lookup`, except those that a step calls only with tables.
    """

    embeddings: None = None
    axis: None = None
    nested: None = None
    specs: None = None
    optimizer_specs: None = None

    def dense(self, tree: PyTree) -> PyTree:
        """Return all parameters."""
        return tree

    def stored(self, tree: PyTree) -> None:
        """Return None: no parameters are stored."""
        del tree

    def joined(self, dense: PyTree, stored: PyTree) -> PyTree:
        """Return the dense parameters."""
        del stored
        return dense

    def stacked(self, params: PyTree, seed: int, **placement: Any) -> PyTree:
        """Return the parameters of all replicas, equal on them."""
        del seed
        return replicate(params, **placement)

    def requested(self, stored: PyTree, batch: PyTree, *_: Any) -> Requested:
        """Return the batch with empty requests."""
        del stored
        return Requested(batch, Requests._make({} for _ in Requests._fields), {}, {}, None)

    def seen(self, requested: Requested, params: PyTree) -> PyTree:
        """Return the batch for the loss function."""
        del params
        return requested.batch

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Return the types of the parameters and the batch for the loss function."""
        return params, share

    def differentiated(
        self, requested: Requested, params: PyTree, compute: Callable[..., Any], *operands: PyTree
    ) -> tuple[Any, PyTree, Rows, PyTree]:
        """Return results and gradients, no gradients of rows, and the batch."""
        results, grads, _ = compute(params, requested.batch, *operands)
        return results, grads, {}, requested.batch

    def following(self, *_: Any) -> tuple[None, tuple[()]]:
        """Return None and (): nothing is requested or read for the next batch."""
        return None, ()


AnyLookup = Lookup | NoTables


class WithResults(NamedTuple):
    """A batch, and the results of a dispatched loss function for it.

    Attributes:
      batch: the batch itself.
      results: argument of the loss function in place of the batch, inside of a program; leaves
        have a leading dimension over the positions over which the batch is split.
    """

    batch: PyTree
    results: PyTree


@dataclass(frozen=True)
class Dispatched:
    """A loss function with a method `dispatch`, such as a pipeline dispatched by the host.

    Attributes:
      loss_fn: the loss function.
      completed: function that wraps a loss function as the step needs it, such as in a policy.
      parts: number of parts into which `accumulate` cuts a batch; `dispatch` averages over them.
      is_cast: whether parameters and batches are cast for the loss function.
    """

    loss_fn: Any
    completed: Callable[[Callable[..., Any]], FullLoss]
    parts: int
    is_cast: bool

    def loss(
        self, params: PyTree, batch: WithResults, *, rng: Any, model_state: PyTree
    ) -> tuple[Any, Any]:
        """Return loss, metrics and model state of a batch, from its computed results."""

        def of_results(params: PyTree, _: PyTree, **keywords: Any) -> Any:
            return self.loss_fn(params, batch.results, **keywords)

        full = self.completed(self._with_signature(of_results))
        return full(params, batch.batch, rng=rng, model_state=model_state)

    def arguments(self, params: PyTree, batch: PyTree, *, rng: Any, model_state: PyTree) -> Any:
        """Return the parameters, batch, key and model state that the loss function receives."""
        seen: list[Any] = []

        def recorded(
            params: PyTree, batch: PyTree, *, rng: Any = None, model_state: PyTree = None
        ) -> Any:
            seen.append((params, batch, rng, model_state))
            return jnp.zeros(()), ({}, model_state)

        full = self.completed(self._with_signature(recorded))
        full(params, batch, rng=rng, model_state=model_state)
        return seen[0]

    def _with_signature(self, fn: Any) -> Any:
        fn.__signature__ = inspect.signature(self.loss_fn)
        return fn
