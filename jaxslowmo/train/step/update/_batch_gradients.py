"""What a loss is given and gives: gradients over microbatches, and over batches of one update."""

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
from ....mesh import match_varying, replicate
from ....tracing import FullLoss
from ....tree import added, at_least_float32, by_dtype, cast, kept_if, zeros_like

Metrics = dict[str, jax.Array]


class GradientWindow(NamedTuple):
    """What the batches of one update have given so far; `step.collect` makes it and adds to it.

    Devices are counted over the replica axis and the axes inside a replica over which the batch is
    split: between these nothing is reduced before the update.

    Attributes:
      totals: leaves (devices, *s), in at least float32: weighted sums of gradients.
      metrics: leaves (replicas, ...), in at least float32: weighted sums, "loss" among them.
      model_state: leaves (devices, ...), as the last batch left it.
      weight: (replicas,) float32, sum of the weights; None where batches have none.
      count: (replicas,) int32, batches so far; equal on all replicas.
      rows: by table, (devices, k) and (devices, k, *s): weighted gradients of the rows that a
        device holds: first the room that the window was opened with, in which batches of one shape
        stand one after the other, then those of batches for which there was none; {} without
        tables.
      refused: (replicas,) int32: ids so far that are in no table, or have no slot; where it is not
        0 the update will be skipped. None without tables.
      num_placed: (replicas,) int32: batches in the room; None without tables.
    """

    totals: PyTree
    metrics: Metrics
    model_state: PyTree
    weight: jax.Array | None
    count: jax.Array
    rows: Rows
    refused: jax.Array | None = None
    num_placed: jax.Array | None = None


# How each part relates to the replicas, as `map_replicas` wants to know.
ROLES = GradientWindow._make(
    ("device", "stacked", "device", "stacked", "stacked", "device", "stacked", "stacked")
)


class Given(NamedTuple):
    """What a program is given beside the state; in it the replica's, or a device's part of it.

    Attributes:
      batch: None for an update of a window alone.
      weight: () the replica's share in averages; None where all are alike.
      window: the batches of the same update so far; None where there are none.
      carry: what was asked for the batch beside an earlier one; None for nothing.
      upcoming: the batch that comes next; None where nothing is to be done for it.
    """

    batch: PyTree = None
    weight: jax.Array | None = None
    window: GradientWindow | None = None
    carry: Carry | None = None
    upcoming: PyTree = None


# How each part relates to the replicas, as `map_replicas` wants to know.
GIVEN_ROLES: Any = Given._make(("batch", "stacked", ROLES, "device", "batch"))


class LossData(NamedTuple):
    """What the loss function is given beside the parameters.

    Attributes:
      batch: of this device.
      key: its own.
      model_state: before the batch.
    """

    batch: PyTree
    key: jax.Array
    model_state: PyTree


class Gradients(NamedTuple):
    """What one batch gives, or a window of several; an update starts from it.

    Attributes:
      grads: means over the examples of this device.
      metrics: of the replica, means over all of its examples, "loss" among them.
      model_state: of this device, after the batch.
      rows: by table, mean gradients of the rows that it holds; {} without tables.
      refused: () int32, ids of the replica because of which the update must not be made; None
        without tables.
      weight: () this replica's share in averages over replicas; None where all are alike.
      data: what the loss saw; None for a window, whose batches are gone.
    """

    grads: PyTree
    metrics: Metrics
    model_state: PyTree
    rows: Rows
    refused: jax.Array | None
    weight: jax.Array | None
    data: LossData | None


def empty_window(found: Gradients, num_batches: int) -> GradientWindow:
    """A window before its first batch.

    Args:
      found: of one batch, with the model state before it; of the rest shapes, dtypes and varying
        axes are all that is looked at.
      num_batches: for the rows of so many batches there is room; others make the window larger.
    """
    count = jnp.zeros([], jnp.int32)
    return GradientWindow(
        jax.tree.map(wide_zeros, found.grads),
        jax.tree.map(wide_zeros, found.metrics),
        found.model_state,
        None if found.weight is None else jnp.zeros_like(found.weight),
        count,
        empty_rows(found.rows, num_batches),
        jax.tree.map(lambda x: match_varying(zeros_like(x), x), found.refused),
        count if found.rows else None,
    )


def added_to(window: GradientWindow, found: Gradients, *, fits: bool) -> GradientWindow:
    """The window with one batch more, of whose rows is known whether they fit into its room."""
    weight, place = found.weight, window.num_placed if fits else None
    return GradientWindow(
        jax.tree.map(added, window.totals, _weighted(found.grads, weight)),
        jax.tree.map(added, window.metrics, _weighted(found.metrics, weight)),
        found.model_state,
        None if window.weight is None or weight is None else window.weight + weight,
        window.count + 1,
        added_rows(window.rows, found.rows, weight, place),
        jax.tree.map(jnp.add, window.refused, found.refused),
        window.num_placed if place is None else place + 1,
    )


def means_of(window: GradientWindow) -> Gradients:
    """What the batches of a window give: means of gradients and metrics, in at least float32.

    They are zeros on a replica that was idle.
    """
    if window.weight is None:
        divisor = by_dtype(window.count)
    else:
        # Over infinity everything is zero, without a choice for every leaf.
        divisor = by_dtype(jnp.where(window.weight > 0, window.weight, jnp.inf))
    sums = window.totals, window.metrics
    totals, metrics = jax.tree.map(lambda x: x / divisor(x.dtype), sums)
    rows, model_state = summed(window.rows, divisor), window.model_state
    return Gradients(totals, metrics, model_state, rows, window.refused, window.weight, None)


def _weighted(tree: PyTree, weight: jax.Array | None) -> PyTree:
    """In at least float32, times the weight; zeros for weight 0, whatever stands there."""
    wide = jax.tree.map(lambda x: cast(x, at_least_float32(x.dtype)), tree)
    if weight is None:
        return wide
    counts, factor = weight > 0, by_dtype(weight)
    return jax.tree.map(lambda x: kept_if(counts, x * factor(x.dtype)), wide)


def wide_zeros(kind: Any) -> jax.Array:
    """Zeros to add values of a type to: at least float32, varying and laid out as it is."""
    wide = kind.update(dtype=at_least_float32(kind.dtype))
    return match_varying(zeros_like(wide), kind)


def split_batch(batch: PyTree, parts: int) -> PyTree:
    """The batch in equal parts, stacked along a new leading axis."""

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(
                f"`accumulate`={parts} must divide the batch on each device, got {x.shape[0]} "
                "examples."
            )
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(split, batch)


def with_loss(metrics: dict[str, jax.Array], value: jax.Array) -> dict[str, jax.Array]:
    """What a loss function says of a batch, in float32, and the loss in its own dtype."""
    return {**{name: jnp.asarray(m, jnp.float32) for name, m in metrics.items()}, "loss": value}


def as_value(loss: jax.Array) -> jax.Array:
    """A loss as an optimizer is told it: at least float32, since it is averaged and compared."""
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
    """Metrics (loss included) and model state, and mean gradients over `accumulate` microbatches.

    Gradients and the loss are summed in at least float32 and returned in their own dtypes; model
    state is threaded through in order. With a `scale` it is that many times the loss of which
    gradients are taken, and unless `divides` is False they are divided by it again; the loss is
    then at least float32. Last comes the gradient of what was looked up for a batch `WithVectors`,
    example by example; None for other batches.

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
        (value, (metrics, state)), (grads, own) = differentiate(both, part, key, state)
        return (with_loss(metrics, value), state), grads, own

    if accumulate == 1:
        return one(model_state, batch, rng)
    parts, keys = split_batch(batch, accumulate), jax.random.split(rng, accumulate)
    first = jax.tree.map(lambda x: x[0], parts)
    (metrics, state), grads, _ = jax.eval_shape(one, model_state, first, keys[0])
    kinds = metrics, grads
    totals = jax.tree.map(wide_zeros, kinds)
    carried = match_varying(model_state, state)

    def add(carry: tuple[PyTree, PyTree], x: tuple[PyTree, jax.Array]):
        totals, state = carry
        (metrics, state), grads, own = one(state, *x)
        state = match_varying(state, carried)
        totals = jax.tree.map(lambda t, x: t + x.astype(t.dtype), totals, (metrics, grads))
        return (totals, state), own

    (totals, model_state), own = lax.scan(add, (totals, carried), (parts, keys))
    metrics, grads = jax.tree.map(lambda t, s: (t / accumulate).astype(s.dtype), totals, kinds)
    # Of an example only its own microbatch tells.
    own = jax.tree.map(lambda g: (g / accumulate).reshape(-1, *g.shape[2:]), own)
    return (metrics, model_state), grads, own


class NoTables:
    """The lookup of a step without embedding tables: all of its parameters are dense.

    Attributes and methods mean what they do in `Lookup`; those that a step calls only where there
    are tables are left out.
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
        """Return that nothing is stored."""
        del tree

    def joined(self, dense: PyTree, stored: PyTree) -> PyTree:
        """Return the dense parameters."""
        del stored
        return dense

    def stacked(self, params: PyTree, seed: int, **lies: Any) -> PyTree:
        """Return the parameters of all replicas, equal on them."""
        del seed
        return replicate(params, **lies)

    def requested(self, stored: PyTree, batch: PyTree, *_: Any) -> Requested:
        """Return a batch that asks for nothing."""
        del stored
        return Requested(batch, Requests._make({} for _ in Requests._fields), {}, {}, None)

    def seen(self, requested: Requested, params: PyTree) -> PyTree:
        """Return the batch that the loss function is given."""
        del params
        return requested.batch

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Return the types of the parameters and the batch that the loss function is given."""
        return params, share

    def differentiated(
        self, requested: Requested, params: PyTree, compute: Callable[..., Any], *operands: PyTree
    ) -> tuple[Any, PyTree, Rows, PyTree]:
        """Return results and gradients, no gradients of rows, and the batch."""
        results, grads, _ = compute(params, requested.batch, *operands)
        return results, grads, {}, requested.batch

    def following(self, *_: Any) -> tuple[None, tuple[()]]:
        """Return that the next batch asks for nothing, and that nothing was read for it."""
        return None, ()


AnyLookup = Lookup | NoTables


class WithResults(NamedTuple):
    """A batch, and what a dispatched loss function has computed of it.

    Attributes:
      batch: the batch itself.
      results: what the loss function takes in the place of the batch, inside of a program; leaves
        have a leading dimension over the positions between which the batch is split.
    """

    batch: PyTree
    results: PyTree


@dataclass(frozen=True)
class Dispatched:
    """A loss function with a method `dispatch`, as a pipeline dispatched by the host has one.

    Attributes:
      loss_fn: the loss function.
      completed: wraps a loss function in what the step does around it, such as a policy.
      parts: into how many parts `accumulate` cuts a batch, for `dispatch` to average over.
      is_cast: whether the loss function is given other parameters and batches than the step.
    """

    loss_fn: Any
    completed: Callable[[Callable[..., Any]], FullLoss]
    parts: int
    is_cast: bool

    def loss(
        self, params: PyTree, batch: WithResults, *, rng: Any, model_state: PyTree
    ) -> tuple[Any, Any]:
        """Return loss, metrics and model state of a batch whose results are known."""

        def of_results(params: PyTree, _: PyTree, **keywords: Any) -> Any:
            return self.loss_fn(params, batch.results, **keywords)

        full = self.completed(self._with_signature(of_results))
        return full(params, batch.batch, rng=rng, model_state=model_state)

    def arguments(self, params: PyTree, batch: PyTree, *, rng: Any, model_state: PyTree) -> Any:
        """Return parameters, batch, key and model state as the loss function is given them."""
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
