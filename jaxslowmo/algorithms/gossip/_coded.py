"""Gossip with values that travel in the form of a codec."""

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from ...codecs import Codec
from ...transform import Exchange, packing_of
from ...tree import Buffer, added, at_least_float32, by_dtype, cast, subtracted
from ._exchange import Arrival


def unsent(values: PyTree, over: Exchange, codec: Codec, like: PyTree) -> PyTree:
    """What of `values` a node does not send, in the dtypes of `like`, in which they are packed.

    Communication: none.
    """

    def of(buffer: Buffer, flat: jax.Array) -> jax.Array:
        narrowed = codec.narrows(buffer.dtype)
        return codec.encode(flat)[1] if narrowed else jnp.zeros_like(flat)

    return packing_of(like, over).through(of, values)


def pulled_with_residual(
    updates: PyTree,
    own: PyTree,
    residual: PyTree,
    arrival: Arrival,
    codec: Codec,
    *,
    share: jax.Array,
    given: jax.Array,
) -> PyTree:
    """`pulled`, for a node that keeps what it has not sent of the share that it gave away.

    With z = `own` and r = `residual` the others have got z - r, and the numerator keeps r times the
    weight that they got it with, so that the sum over all nodes is as it was:

        z + share (z_arrived - z) + given r

    Where nodes give as much weight as they get, that is r + what z - r becomes. A codec that
    `rounds_mixtures` rounds the latter.

    Args:
      updates: in at least float32, which move the parameters beside.
      own: z.
      residual: r; leaves that travel as they are have none, and tell it by their dtype.
      arrival: what the node got.
      codec: in which form it came.
      share: () weight that arrived over the weight afterwards.
      given: () weight that the node gave away over the weight afterwards.
    """
    of_arrived, of_residual = by_dtype(share), by_dtype(given - share)

    def pull(u: jax.Array, mine: jax.Array, left: jax.Array, theirs: jax.Array) -> jax.Array:
        wide = at_least_float32(u.dtype)
        r = cast(left, wide)
        sent = subtracted(cast(mine, wide), r)
        away = of_arrived(wide) * subtracted(cast(theirs, wide), sent)
        if codec.rounds_mixtures and codec.narrows(left.dtype):
            away = subtracted(codec.rounded(added(sent, away)), sent)
        return added(cast(u, wide), away + of_residual(wide) * r)

    return jax.tree.map(pull, updates, own, residual, arrival.mean)
