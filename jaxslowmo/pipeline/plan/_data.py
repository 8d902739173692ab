"""What a step begins with, its microbatches, and what it ends with, sums over all devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...gradients.tied import sum_over_holders
from ...mesh import axis_names, axis_size, from_first
from ...tree import leaf_names
from ..model import Loss, LossTerms, Packing, Place, keyed_microbatch, quotient
from ._plan import Plan


class Shared(NamedTuple):
    """A leaf of a batch that belongs to all examples, as it is."""

    value: Any


def in_microbatches(batch: PyTree, count: int, shares: Mapping[str, int]) -> PyTree:
    """Leaves (count, examples / count, ...) of a batch, and `Shared` ones.

    Args:
      batch: leaves (examples, ...); a scalar, or a leaf whose leading dimension is 1 where others
        have several examples, is shared by all of them.
      count: of microbatches.
      shares: sizes of the axes between whose devices each microbatch is split.

    Raises:
      ValueError: no leaf with examples, unlike numbers of them, a number that the microbatches, or
        the axes then, do not divide.
    """
    named = dict(zip(leaf_names(batch), jax.tree.leaves(batch), strict=True))
    sizes = {name: jnp.shape(x)[0] for name, x in named.items() if jnp.ndim(x)}
    examples = max(sizes.values(), default=0)
    if not sizes or set(sizes.values()) - {1, examples}:
        raise ValueError(
            "`batch` must have leaves whose leading dimension counts its examples, or is 1 where "
            "all share them, got "
            f"{', '.join(f'{n}: {sizes.get(n)}' for n in named) or 'no leaves'}."
        )
    if not examples or examples % count:
        raise ValueError(
            f"`schedule` has {count} microbatches, which must divide the batch of a replica, got "
            f"{examples} examples."
        )
    parts = 1
    for name, size in shares.items():
        parts *= size
        if examples // count % parts:
            raise ValueError(
                f"`data_axes` {tuple(shares)} split each microbatch of {examples // count} "
                f"examples in parts, which axis {name!r} of size {size} does not divide."
            )

    def cut(x: Any) -> Any:
        if not jnp.ndim(x) or jnp.shape(x)[0] < examples:
            return Shared(x)
        return jnp.reshape(x, (count, examples // count, *jnp.shape(x)[1:]))

    return jax.tree.map(cut, batch)


def microbatch_specs(microbatches: PyTree, data_axes: Sequence[str]) -> PyTree:
    """How microbatches lie over the data axes: each split, and what they share whole."""

    def spec(x: Any) -> Any:
        return Shared(P()) if is_shared(x) else P(None, tuple(data_axes))

    return jax.tree.map(spec, microbatches, is_leaf=is_shared)


def is_shared(x: Any) -> bool:
    """Whether a part of a batch belongs to all examples."""
    return isinstance(x, Shared)


def microbatch_of(
    batch: PyTree, rng: Any, number: Any, shift: Any, *, key_number: Any = None
) -> PyTree:
    """Return a microbatch as the layers of a stage take it.

    Args:
      batch: leaves (microbatches, examples, ...), and `Shared` ones.
      rng: the key of the step on this device, or None.
      number: () int32, the number of the microbatch.
      shift: () int32, what is added to the index of each layer; see `Keyed`.
      key_number: () int32, the number of the microbatch among those of this key; None: `number`.
    """

    def one(x: Any) -> jax.Array:
        if is_shared(x):
            x = x.value
        else:
            x = lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
        waits = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if waits else x

    key_number = number if key_number is None else key_number
    return keyed_microbatch(jax.tree.map(one, batch, is_leaf=is_shared), rng, key_number, shift)


def share_of_microbatches(batch: PyTree, data_axes: Sequence[str]) -> PyTree:
    """Return the part of microbatches that this position along `data_axes` computes."""

    def share(x: Any) -> Any:
        if is_shared(x):
            return x
        size = x.shape[1] // math.prod(map(axis_size, data_axes))
        index = 0
        for name in data_axes:
            index = index * axis_size(name) + lax.axis_index(name)
        return lax.dynamic_slice_in_dim(x, index * size, size, 1)

    return jax.tree.map(share, batch, is_leaf=is_shared) if data_axes else batch


def laid_out(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """`tree` as `specs` say over Explicit axes, of whose layout types tell; of others as it is."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]

    def place(x: jax.Array, spec: P) -> jax.Array:
        own = only_over(spec, explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, own)) if any(own) else x

    return jax.tree.map(place, tree, specs) if explicit else tree


def only_over(spec: Iterable[Any], axes: Iterable[str]) -> P:
    """`spec` without axes but `axes`."""
    kept = [tuple(n for n in axis_names(entry or ()) if n in axes) for entry in spec]
    return P(*(names[0] if len(names) == 1 else names or None for names in kept))


def gathered(x: jax.Array, spec: P) -> jax.Array:
    """A leaf, whole, of the parts that devices hold.

    Communication: one all-gather over each axis in `spec`.
    """
    for dim, entry in enumerate(spec):
        # The parts along a later axis lie inside of those along an earlier one.
        for name in reversed(axis_names(entry or ())):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def scattered_sum(x: jax.Array, spec: P, axes: Sequence[str]) -> jax.Array:
    """A sum over `axes`, of which each device has the part that `spec` says.

    Communication: one reduce-scatter over each axis in `spec`, one all-reduce over the others.
    """
    named = set()
    for dim, entry in enumerate(spec):
        for name in axis_names(entry or ()):
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
            named.add(name)
    others = tuple(name for name in axes if name not in named)
    return lax.psum(x, others) if others else x


class Totals(NamedTuple):
    """What the operations of a step add up to on one device.

    Attributes:
      loss: the sum over microbatches of what the last stage returns; at least float32.
      grads: for each buffer the sum of its gradients, (*sizes, elements) in at least float32; None
        for buffers without gradients.
      states: for each buffer the model state of the layers after the last microbatch.
    """

    loss: LossTerms
    grads: Mapping[str, jax.Array | None]
    states: dict[str, jax.Array]


@dataclass(frozen=True)
class Ending:
    """What is done once per step with the totals of all devices, under their axes.

    Attributes:
      plan: the pipeline.
      data_axes: the axes over which this program splits microbatches.
      outer_axes: data axes that are mapped outside, between whose devices the caller has split the
        batch, and averages.
    """

    plan: Plan
    data_axes: tuple[str, ...]
    outer_axes: tuple[str, ...]

    def loss(self, terms: LossTerms, dtype: jnp.dtype) -> tuple[Loss, LossTerms]:
        """Return loss and metrics, the loss in its own dtype, and the terms of all microbatches.

        Communication: one all-reduce of a few numbers over the stages and the data axes; of a
          weight one over data axes that are mapped outside.
        """
        if self.outer_axes:
            # The caller takes the mean over these axes, of quotients by the mean weight.
            terms = terms.with_weights(lambda x: lax.pmean(x, self.outer_axes))
        # The last stage alone has added something up.
        terms = lax.psum(terms, (self.plan.axis_name, *self.data_axes))
        value = terms.value(self.plan.schedule.num_microbatches * self._num_shares)
        if isinstance(value, tuple):
            return (value[0].astype(dtype), value[1]), terms
        return value.astype(dtype), terms

    def states(self, totals: Totals) -> dict[str, jax.Array]:
        """Return by buffer the model state of a stage, (1, elements), after all microbatches.

        Communication: over the data axes one all-reduce of each buffer.
        """

        def agreed(x: jax.Array) -> jax.Array:
            if not self.data_axes:
                return x
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            return lax.pmean(x, self.data_axes) if is_float else from_first(x, self.data_axes)

        return {name: agreed(x)[None] for name, x in totals.states.items()}

    def gradients(self, totals: Totals, terms: LossTerms) -> dict[str, jax.Array]:
        """Return by buffer the gradients, (1, *sizes, elements), in the dtypes of the parameters.

        Communication: over the data axes one reduce-scatter of each buffer that is sharded there,
          an all-reduce of the others; over the stages that of tied parameters.
        """
        plan = self.plan
        scale = 1 / (plan.gradient_scale * (1 if terms.weight is not None else self._num_shares))
        sums: dict[str, jax.Array] = {}
        for name, total in totals.grads.items():
            if total is not None:
                total = scattered_sum(total, self.spec(name), self.data_axes)
                total = total if scale == 1 else total * scale
                sums[name] = total if terms.weight is None else quotient(total, terms.weight)
        sums = _with_tied_sums(sums, plan.tied, plan.layout.packing, plan.axis_name)
        dtypes = {name: name.partition("/")[0] for name in sums}
        return {name: total[None].astype(dtypes[name]) for name, total in sums.items()}

    def spec(self, name: str) -> P:
        """Return how a stage's buffer is sharded over the data axes."""
        return only_over(self.plan.layout.specs[name][1:], self.data_axes)

    @property
    def _num_shares(self) -> int:
        return math.prod(map(axis_size, self.data_axes))


def _with_tied_sums(
    grads: dict[str, jax.Array],
    groups: Sequence[Sequence[Place]],
    packing: Packing,
    axis_name: str,
) -> dict[str, jax.Array]:
    """Return gradients by buffer, (*sizes, elements), in which copies of a leaf have their sum.

    Communication: that of `sum_over_holders` for the groups of which several stages hold copies.
    """
    groups = [group for group in groups if group[0].leaf.buffer in grads]
    if not groups:
        return grads

    def part_of(buffers: dict[str, jax.Array], place: Place) -> jax.Array:
        """What lies at a place; on other stages anything."""
        end = place.start + packing.part_size(place.leaf)
        return buffers[place.leaf.buffer][..., place.start : end]

    stage = lax.axis_index(axis_name)
    sums: list[jax.Array] = []
    for group in groups:
        parts = [(part_of(grads, place), place.stage) for place in group]
        masked = [jnp.where(stage == holder, x, jnp.zeros_like(x)) for x, holder in parts]
        sums.append(sum(masked[1:], start=masked[0]))
    holders = [tuple(sorted({place.stage for place in group})) for group in groups]
    across = [i for i, stages in enumerate(holders) if len(stages) > 1]
    exchanged = sum_over_holders([sums[i] for i in across], [holders[i] for i in across], axis_name)
    for i, total in zip(across, exchanged, strict=True):
        sums[i] = total
    new = dict(grads)
    for group, total in zip(groups, sums, strict=True):
        for place in group:
            buffer = new[place.leaf.buffer]
            part = jnp.where(stage == place.stage, total, part_of(new, place))
            new[place.leaf.buffer] = lax.dynamic_update_slice_in_dim(
                buffer, part, place.start, buffer.ndim - 1
            )
    return new
