"""The algebra of push-sum: values with weights, and parameters as their quotient."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from ...tree import added, at_least_float32, by_dtype, cast, subtracted
from ._exchange import Arrival


def over(tree: PyTree, weight: jax.Array) -> PyTree:
    """`tree / weight` leaf by leaf, for a scalar weight > 0, in the leaves' dtypes (not half)."""
    # Half precision never gets here: updates and numerators are at least float32.
    in_dtype = by_dtype(weight)
    return jax.tree.map(lambda x: x / in_dtype(x.dtype), tree)


def pulled(updates: PyTree, own: PyTree, arrival: Arrival, share: jax.Array) -> PyTree:
    """`updates` that also move `own` by `share` of the way to what arrived.

    With share = (weight that arrived) / (weight afterwards) this is push-sum's new estimate: the
    mean of own and received values, each with its weight. Where both are equal nothing moves.
    """
    in_dtype = by_dtype(share)

    def pull(u: jax.Array, mine: jax.Array, theirs: jax.Array) -> jax.Array:
        # The difference first: nodes that agree then move by exactly 0.
        wide = at_least_float32(u.dtype)
        away = subtracted(cast(theirs, wide), cast(mine, wide))
        return added(cast(u, wide), in_dtype(wide) * away)

    return jax.tree.map(pull, updates, own, arrival.mean)


def together(kept: jax.Array, weight: jax.Array, arrival: Arrival) -> jax.Array:
    """The push-sum weight after an exchange, in the dtype of the share that was kept."""
    return kept * weight.astype(kept.dtype) + arrival.weight.astype(kept.dtype)


def total_mass(
    values: PyTree, weight: jax.Array, in_flight: Sequence[Arrival]
) -> tuple[PyTree, jax.Array]:
    """Numerators and weight of a node, what was sent to it and not yet mixed in included.

    Returns:
      `(x, w)`, in at least float32; over all nodes sum x / sum w is the mean that gossip tends to.
    """

    def numerator(own: jax.Array, *arrived: jax.Array) -> jax.Array:
        wide = at_least_float32(own.dtype)
        # x = w z of what this node holds, and of each message under way to it.
        x = weight.astype(wide) * own.astype(wide)
        for arrival, mean in zip(in_flight, arrived, strict=True):
            x += arrival.weight.astype(wide) * mean.astype(wide)
        return x

    x = jax.tree.map(numerator, values, *(arrival.mean for arrival in in_flight))
    total = weight + sum((a.weight for a in in_flight), start=jnp.zeros_like(weight))
    return x, total
