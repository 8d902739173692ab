"""The loss of a batch and its gradients over microbatches, also where it is dispatched."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._support.types import PyTree
from ....embedding import WithVectors
from ....gradients.precision import scaled_value_and_grad
from ....mesh import match_varying
from ....tracing import FullLoss
from ....tree import at_least_float32
from ._window import wide_zeros


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
