"""Gradients over microbatches."""

import jax
import jax.numpy as jnp
from jax import lax

from ...._typing import PyTree
from ....mesh import match_varying
from ....tracing import FullLoss
from ....tree import at_least_float32


def _split(batch: PyTree, parts: int) -> PyTree:
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


def value_and_gradients(
    loss: FullLoss,
    params: PyTree,
    batch: PyTree,
    *,
    rng: jax.Array,
    model_state: PyTree,
    accumulate: int,
) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
    """Metrics (loss included), model state and mean gradients over `accumulate` microbatches.

    Gradients and the loss are summed in at least float32 and returned in their own dtypes; model
    state is threaded through in order.

    Communication: none, whatever the number of microbatches.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def one(state: PyTree, part: PyTree, key: jax.Array):
        (value, (metrics, state)), grads = differentiate(params, part, rng=key, model_state=state)
        return with_loss(metrics, value), state, grads

    if accumulate == 1:
        return one(model_state, batch, rng)
    parts, keys = _split(batch, accumulate), jax.random.split(rng, accumulate)
    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(one, model_state, first, keys[0])
    kinds = (shapes[0], shapes[2])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, at_least_float32(s.dtype)), kinds)
    totals = match_varying(zeros, kinds)
    carried = match_varying(model_state, shapes[1])

    def add(carry: tuple[PyTree, PyTree], x: tuple[PyTree, jax.Array]):
        totals, state = carry
        metrics, state, grads = one(state, *x)
        state = match_varying(state, carried)
        totals = jax.tree.map(lambda t, x: t + x.astype(t.dtype), totals, (metrics, grads))
        return (totals, state), None

    (totals, model_state), _ = lax.scan(add, (totals, carried), (parts, keys))
    metrics, grads = jax.tree.map(lambda t, s: (t / accumulate).astype(s.dtype), totals, kinds)
    return metrics, model_state, grads
