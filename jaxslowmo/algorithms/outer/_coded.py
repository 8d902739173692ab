"""What replicas have moved, sent in the form of a codec."""

import jax

from ..._typing import PyTree
from ...collectives import quotient
from ...transform import Exchange, mean_and_residual
from ...tree import subtracted


def coded_displacement(
    anchor: PyTree, x: PyTree, mass: jax.Array | None, exchange: Exchange
) -> tuple[PyTree, PyTree]:
    """Mean of the replicas' D = anchor - x / mass, and what of its own a replica did not send.

    What travels is D and not x: it is small, and what a codec loses is in proportion to it.

    Args:
      anchor: tree like the parameters, equal on all replicas, in at least float32.
      x: the weighted parameters of this replica, likewise.
      mass: () float32, their weight, with which D counts in the mean; None: 1 on all replicas.
      exchange: with a codec.

    Communication: as `mean_and_residual`.
    """
    z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
    own = jax.tree.map(subtracted, anchor, z)
    return mean_and_residual(own, exchange, mass, role="slow")


def shards_state(
    owner: str, shard_state: bool | None, exchange: Exchange, *, exact_average: bool = True
) -> bool:
    """Whether slow state is sharded; `shard_state` as users give it.

    Raises:
      ValueError: a codec where the anchor is sharded, or where there is no exchange.
    """
    codec = exchange.codec
    if codec is not None and not exact_average:
        raise ValueError(
            f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is nothing "
            f"for `codec`; got {codec!r}. Give it to the `base`."
        )
    if codec is not None and shard_state:
        raise ValueError(
            f"{owner}: with a `codec` a replica sends what it has moved from the anchor, of which "
            f"it must hold all; got {codec!r} and shard_state=True. Leave `shard_state` out or set "
            "it to False."
        )
    return (exact_average and codec is None) if shard_state is None else shard_state
