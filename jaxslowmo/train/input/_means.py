"""Metrics of several batches as those of one update."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...tree import at_least_float32

Metrics = dict[str, jax.Array]


def means_over_batches(batches: Sequence[Metrics]) -> Metrics:
    """Each replica's means, weighted where the batches have weights.

    Args:
      batches: metrics of each, leaves (replicas, ...), as a step returns them.

    Returns:
      The same metrics, in at least float32 where they are of several batches; "weight" is the sum
      of the weights, and a replica that was idle in all has zeros. What the last batch alone tells
      is of the update that it made, such as the loss scale, and stays as it is.

    Communication: none.
    """
    return batches[0] if len(batches) == 1 else _means(tuple(batches))


@jax.jit
def _means(batches: tuple[Metrics, ...]) -> Metrics:
    count = len(batches)
    weights = [batch["weight"] for batch in batches] if "weight" in batches[0] else None

    def mean(name: str) -> jax.Array:
        values = [batch[name].astype(at_least_float32(batch[name].dtype)) for batch in batches]
        if weights is None:
            return sum(values[1:], values[0]) / count
        # An idle replica's metrics are zeros.
        shares = [w.reshape(-1, *(1,) * (values[0].ndim - 1)) for w in weights]
        total, *rest = (w * x for w, x in zip(shares, values, strict=True))
        whole = sum(shares[1:], shares[0])
        return sum(rest, total) / jnp.where(whole > 0, whole, jnp.inf)

    means = {name: mean(name) for name in batches[0] if name != "weight"}
    means = {**batches[-1], **means}
    if weights is None:
        return means
    return {**means, "weight": sum(weights[1:], weights[0])}
