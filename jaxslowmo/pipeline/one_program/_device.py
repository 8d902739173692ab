"""What one device has to compute with, and what travels between devices."""

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
from ..plan import microbatch_of
from ._rings import Values, empty
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
        """Return the microbatch that an operation computes."""
        shift = jnp.asarray(self.shifts)[now.model_stage]
        return microbatch_of(self.batch, self.rng, now.microbatch, shift)

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


@dataclass(frozen=True)
class Activations:
    """The type of what every stage but the last gives to the next.

    Attributes:
      treedef: of it.
      types: of its leaves.
    """

    treedef: Any
    types: tuple[Any, ...]

    @property
    def floating(self) -> tuple[int, ...]:
        """Positions of the leaves that have cotangents."""
        return tuple(i for i, x in enumerate(self.types) if jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """Types of the cotangents."""
        return tuple(self.types[i] for i in self.floating)

    def flat(self, y: PyTree) -> list[jax.Array]:
        """The leaves, of the dtypes that the type says."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def tree(self, leaves: Values) -> PyTree:
        """The way back from `flat`."""
        return self.treedef.unflatten(leaves)

    def flat_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Of a tree with None for leaves without any."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def cotangent_tree(self, leaves: Values) -> PyTree:
        """The way back from `flat_cotangents`."""
        own = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([own.get(i) for i in range(len(self.types))])


def nothing(types: Sequence[Any]) -> list[jax.Array]:
    """What is sent where nothing is to be sent."""
    return [empty(x.shape, x.dtype) for x in types]


def activations_of(results: Sequence[PyTree]) -> Activations:
    """The one type of what the stages before the last give.

    Args:
      results: types of their results, in the order of the model.

    Raises:
      ValueError: two that differ in structure, shapes or dtypes.
    """
    if not results:
        return Activations(jax.tree.structure(()), ())
    leaves, treedef = jax.tree.flatten(results[0])
    first = _text(results[0])
    for k, other in enumerate(results[1:], start=1):
        if _text(other) != first or jax.tree.structure(other) != treedef:
            raise ValueError(
                "`model`: one program sends activations of one type between all stages, and here "
                f"stage 0 gives {first}, but stage {k} {_text(other)}. Cut the model elsewhere "
                "(`parts`), let layers give the same type, or use js.pipeline.HostPipeline, which does not "
                "need it."
            )
    return Activations(treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


def _text(tree: PyTree) -> str:
    return str(jax.tree.map(lambda x: _Type(f"{x.dtype}{list(x.shape)}"), tree))


class _Type(str):
    """A type that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)
