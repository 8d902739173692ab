"""Gradients over microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...._support.types import PyTree
from ....embedding import WithVectors
from ....gradients.precision import scaled_value_and_grad
from ....mesh import match_varying
from ....tracing import FullLoss
from ....tree import at_least_float32, zeros_like


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


def wide_zeros(kind: Any) -> jax.Array:
    """Zeros to add values of a type to: at least float32, varying and laid out as it is."""
    wide = kind.update(dtype=at_least_float32(kind.dtype))
    return match_varying(zeros_like(wide), kind)


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
