"""The mean of the replicas."""

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..collectives import all_mean_in_slices, coded_mean, relative_weight, total_weight
from ..tree import Buffer
from ._exchange import Exchange
from ._packing import packing_of


def replica_mean(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> PyTree:
    """Mean of a tree over the replicas, through flat buffers, in the leaves' dtypes.

    With a weight it is the weighted mean; where all weights are 0, the tree as it is. With a codec
    each replica's residual is on top, by which replicas then differ. `role` names what the buffers
    are exchanged for, to those who listen (`note_buffers`).

    Communication: one all-reduce per buffer over `exchange.axis_name`, in the dtype of a codec that
      narrows it; with `local_axis_name` 1/L of each per device, and an all-gather over that axis;
      with a weight, before, one of 8 bytes. None for a tree without leaves.
    """
    if not jax.tree.leaves(tree):
        return tree
    axes, local = exchange.axis_name, exchange.local_axis_name

    def mean_of(
        buffer: Buffer,
        flat: jax.Array,
        factor: jax.Array | None = None,
        anyone: jax.Array | None = None,
    ) -> jax.Array:
        del buffer
        # With devices inside a replica each moves its part: N bytes leave a replica, not L * N.
        if exchange.codec is None:
            mean = all_mean_in_slices(flat, axes, local, factor=factor)
        else:
            mean, residual = coded_mean(flat, exchange.codec, axes, local, factor=factor)
            mean += residual
        # Where all have run out of data the mean is 0 / 0: all stay as they are.
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    return packing_of(tree, exchange).through(mean_of, tree, *_shares(exchange, weight), role=role)


def mean_and_residual(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Mean of what travels of the replicas' trees, and what of this replica's does not.

    Args:
      tree: floating leaves.
      exchange: with a codec.
      weight: as in `replica_mean`. A replica of weight 0 has no residual; where all weights are 0,
        so is the mean.
      role: as in `replica_mean`.

    Communication: as `replica_mean`.
    """
    codec, axes, local = exchange.codec, exchange.axis_name, exchange.local_axis_name
    assert codec is not None

    def both(buffer: Buffer, flat: jax.Array, *factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        del buffer
        return coded_mean(flat, codec, axes, local, factor=factor[0] if factor else None)

    packing = packing_of(tree, exchange)
    pairs = packing.map(both, packing.pack(tree, role=role), *_shares(exchange, weight)[:1])
    means = [[mean for mean, _ in group] for group in pairs]
    residuals = [[residual for _, residual in group] for group in pairs]
    return packing.unpack(means), packing.unpack(residuals)


def _shares(exchange: Exchange, weight: jax.Array | None) -> list[jax.Array]:
    """This replica's factor, and whether any replica weighs more than 0; [] without weights.

    Communication: with a weight one all-reduce of 8 bytes over `exchange.axis_name`.
    """
    if weight is None:
        return []
    total = total_weight(weight, exchange.axis_name)
    return [relative_weight(weight, total, exchange.axis_name), total.weight > 0]
