"""An exchange without the package, which others are compared with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxslowmo as js


class NoState(NamedTuple):
    """The state of a hand-written exchange."""

    count: jax.Array


@dataclass(frozen=True)
class ByHand(js.spec.Sync):
    """Parameters averaged in every step, as one would write it: one buffer, and slices of it."""

    axis: str
    owner = "by hand"
    state = NoState

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def init(self, params: Any) -> NoState:
        del params
        return NoState(jnp.zeros([], jnp.int32))

    def events(self) -> list[js.spec.Event]:
        return [js.spec.Event("average", js.every(1), self.average, replaces=True)]

    def average(self, operand: Any, now: js.spec.Now) -> Any:
        updates, others, state = operand
        leaves, treedef = jax.tree.flatten(jax.tree.map(jax.lax.add, now.params, updates))
        flat = jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in leaves], 0)
        mean = jax.lax.psum(flat, self.axis) / jax.lax.axis_size(self.axis)
        parts = jax.lax.split(mean, [x.size for x in leaves])
        means = treedef.unflatten(map(jax.lax.reshape, parts, [x.shape for x in leaves]))
        return jax.tree.map(jax.lax.sub, means, now.params), others, state


def averaged_by_hand(axis: str) -> js.ParameterTransform:
    """Return the exchange written by hand.

    Communication: one all-reduce over `axis`.
    """
    return js.ParameterTransform(ByHand(axis))
