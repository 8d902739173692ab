"""Gradients of parameters that lie in several places."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..model import Place
from ..tied import sum_over_holders

TiedPlaces = Sequence[Sequence[Place]]


def with_tied_sums(
    grads: list[jax.Array | None], groups: TiedPlaces, axis_name: str
) -> list[jax.Array | None]:
    """Gradients by slot, (rows, *shape), in which all copies of a parameter have their sum.

    Communication: that of `sum_over_holders` for the groups of which several stages hold copies.
    """
    here = lax.axis_index(axis_name)
    own: list[jax.Array] = []
    known: list[tuple[Sequence[Place], tuple[int, ...]]] = []
    for group in groups:
        copies = []
        for place in group:
            slot = grads[place.slot]
            if slot is not None:
                row = slot[place.row]
                copies.append(jnp.where(here == place.stage, row, jnp.zeros_like(row)))
        if copies:
            own.append(sum(copies[1:], start=copies[0]))
            known.append((group, tuple(sorted({place.stage for place in group}))))
    apart = [i for i, (_, holders) in enumerate(known) if len(holders) > 1]
    sums = sum_over_holders([own[i] for i in apart], [known[i][1] for i in apart], axis_name)
    for i, total in zip(apart, sums, strict=True):
        own[i] = total
    new = list(grads)
    for (group, _), total in zip(known, own, strict=True):
        for place in group:
            slot = new[place.slot]
            assert slot is not None, "tied leaves are of one dtype"
            row = jnp.where(here == place.stage, total, slot[place.row])
            new[place.slot] = slot.at[place.row].set(row)
    return new
