"""What one device has to compute with, and what it sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...mesh import vary_over
from ...tree import at_least_float32
from ..model import keyed_microbatch
from ._data import is_shared
from ._table import Channel, Half


@dataclass(frozen=True)
class Device:
    """What a device computes with in one step.

    Attributes:
      buffers: parameters of its stage, by name (*sizes, elements).
      states: model state of its layers, by name (elements,).
      layouts: by name how those lie over axes that the compiler handles; None: whole.
      batch: leaves (microbatches, examples, ...), and `Shared` ones.
      rng: the key of the step, or None.
      shifts: per stage of the model, how far its layers are from those of the stage that stands
        for its kind.
      axes: those over which values vary.
      axis_name: of the stages.
    """

    buffers: dict[str, jax.Array]
    states: dict[str, jax.Array]
    layouts: Mapping[str, P | None]
    batch: PyTree
    rng: Any
    shifts: np.ndarray
    axes: tuple[str, ...]
    axis_name: str

    def microbatch(self, now: Half) -> PyTree:
        """The one that an operation computes."""

        def one(x: Any) -> jax.Array:
            if is_shared(x):
                x = x.value
            else:
                x = lax.dynamic_index_in_dim(x, now.microbatch, 0, keepdims=False)
            waits = jax.typeof(x).memory_space == jax.memory.Space.Host
            return jax.device_put(x, jax.memory.Space.Device) if waits else x

        own = jax.tree.map(one, self.batch, is_leaf=is_shared)
        shift = jnp.asarray(self.shifts)[now.model_stage]
        return keyed_microbatch(own, self.rng, now.microbatch, shift)

    def varied(self) -> "Device":
        """With all that it has typed alike."""
        rng = None if self.rng is None else self.vary(self.rng)
        own = self.vary((self.buffers, self.states, self.batch))
        return replace(self, buffers=own[0], states=own[1], batch=own[2], rng=rng)

    def vary(self, tree: PyTree) -> PyTree:
        """`tree` typed as all values here are: branches must agree."""
        return vary_over(tree, self.axes)

    def sent(self, leaves: Sequence[jax.Array], channel: Channel) -> list[jax.Array]:
        """What arrives here over a channel.

        Communication: one collective-permute per array; none if all stages send to themselves.
        """
        if all(at == to for at, to in channel):
            return list(leaves)
        return [lax.ppermute(x, self.axis_name, channel) for x in leaves]

    def own_column(self, table: np.ndarray) -> jax.Array:
        """This device stage's column of a table (ticks, stages)."""
        here = lax.axis_index(self.axis_name)
        return lax.dynamic_index_in_dim(jnp.asarray(table), here, 1, keepdims=False)

    def zero_gradient(self, name: str) -> jax.Array | None:
        """Zeros to add gradients of a buffer to, at least float32; None for integers."""
        buffer, layout = self.buffers[name], self.layouts[name]
        if not jnp.issubdtype(buffer.dtype, jnp.inexact):
            return None
        zeros = jnp.zeros(buffer.shape, at_least_float32(buffer.dtype))
        return zeros if layout is None else lax.with_sharding_constraint(zeros, layout)
