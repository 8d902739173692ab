"""Gradients of parameters that lie in several places."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..model import Packing, Place
from ..tied import sum_over_holders

TiedPlaces = Sequence[Sequence[Place]]


def with_tied_sums(
    grads: dict[str, jax.Array], groups: TiedPlaces, packing: Packing, axis_name: str
) -> dict[str, jax.Array]:
    """Gradients by buffer, (*sizes, elements), in which copies of a parameter have their sum.

    Communication: that of `sum_over_holders` for the groups of which several stages hold copies.
    """
    here = lax.axis_index(axis_name)
    sums: list[jax.Array] = []
    known = [group for group in groups if group[0].leaf.buffer in grads]
    for group in known:
        total = None
        for place in group:
            part = _part(grads, place, packing)
            own = jnp.where(here == place.stage, part, jnp.zeros_like(part))
            total = own if total is None else total + own
        assert total is not None, "a group has copies"
        sums.append(total)
    holders = [tuple(sorted({place.stage for place in group})) for group in known]
    apart = [i for i, own in enumerate(holders) if len(own) > 1]
    exchanged = sum_over_holders([sums[i] for i in apart], [holders[i] for i in apart], axis_name)
    for i, total in zip(apart, exchanged, strict=True):
        sums[i] = total
    new = dict(grads)
    for group, total in zip(known, sums, strict=True):
        for place in group:
            buffer = new[place.leaf.buffer]
            part = jnp.where(here == place.stage, total, _part(new, place, packing))
            new[place.leaf.buffer] = lax.dynamic_update_slice_in_dim(
                buffer, part, place.start, buffer.ndim - 1
            )
    return new


def _part(buffers: dict[str, jax.Array], place: Place, packing: Packing) -> jax.Array:
    """What lies at a place; on other stages anything."""
    end = place.start + packing.part_size(place.leaf)
    return buffers[place.leaf.buffer][..., place.start : end]
