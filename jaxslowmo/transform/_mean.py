"""The mean of the replicas."""

import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..collectives import all_mean, all_mean_in_slices, relative_weight, total_weight
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

    With a weight it is the weighted mean; where all weights are 0, the tree as it is. `role` names
    what the buffers are exchanged for, to those who listen (`note_buffers`).

    Communication: one all-reduce per buffer over `exchange.axis_name`; with `local_axis_name` 1/L
      of each per device, and an all-gather over that axis; with a weight, before, one of 8 bytes.
      None for a tree without leaves.
    """
    if not jax.tree.leaves(tree):
        return tree
    axes, local = exchange.axis_name, exchange.local_axis_name
    whole: list[jax.Array] = []  # this replica's factor, and whether any replica weighs more than 0
    if weight is not None:
        total = total_weight(weight, axes)
        whole = [relative_weight(weight, total, axes), total.weight > 0]

    def mean_of(
        buffer: Buffer,
        flat: jax.Array,
        factor: jax.Array | None = None,
        anyone: jax.Array | None = None,
    ) -> jax.Array:
        del buffer
        # With devices inside a replica each moves its part: N bytes leave a replica, not L * N.
        if local is None:
            mean = all_mean(flat, axes, factor=factor)
        else:
            mean = all_mean_in_slices(flat, axes, local, factor=factor)
        # Where all have run out of data the mean is 0 / 0: all stay as they are.
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    return packing_of(tree, exchange).through(mean_of, tree, *whole, role=role)
