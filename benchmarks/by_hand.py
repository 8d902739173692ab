"""An exchange without the package, which others are compared with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxslowmo as js


class NoState(NamedTuple):
    """The state of a hand-written exchange."""

    count: jax.Array


def averaged_by_hand(axis: str) -> js.ParameterTransform:
    """The parameters averaged in every step, as one would write it: one buffer, and slices of it.

    Communication: one all-reduce over `axis`.
    """

    def update(updates: Any, state: NoState, params: Any, **told: Any) -> tuple[Any, NoState]:
        del told
        leaves, treedef = jax.tree.flatten(jax.tree.map(jax.lax.add, params, updates))
        flat = jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in leaves], 0)
        mean = jax.lax.psum(flat, axis) / jax.lax.axis_size(axis)
        parts = jax.lax.split(mean, [x.size for x in leaves])
        means = treedef.unflatten(map(jax.lax.reshape, parts, [x.shape for x in leaves]))
        return jax.tree.map(jax.lax.sub, means, params), state

    always = js.every(1)
    return js.ParameterTransform(
        lambda params: NoState(jnp.zeros([], jnp.int32)),
        update,
        phase=lambda t, skipped=0: ("average",),
        due=always,
        schedules=(always,),
        state=NoState,
    )
