"""Clipping by the norm of all gradients together, wherever the parts of a model are."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.checks import records_settings
from .._support.scopes import CLIP
from .._support.types import AxisName, PyTree, checks_varying, varying_axes
from ..mesh import axis_names, axis_size, leaf_specs, max_over, require_axes, sum_over
from ..transform import (
    GradientTransform,
    Reduction,
    check_are_specs,
    check_axis_argument,
    transient_state,
)
from ..tree import Staged, at_least_float32, cached_cast, cast, leaf_names, zero_unless
from ._leaves import is_number, map_in_float32
from .sparse import RowGradient, WithRows, arrays_of, coalesce, is_row_gradient
from .tied import TiedGroup, checked_groups, tied_members

_OWNER = "clip_by_global_norm"
_EPSILON = 1e-6  # torch's
_IN_THE_NORM = "Leave out axes over which the compiler shards: the norm covers them."


@transient_state
class ClipByGlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`: the norm and the factor of the last update."""

    norm: jax.Array  # () float32, norm of the gradients before clipping
    clip_factor: jax.Array  # () float32, factor of the gradients; 1: not clipped


@records_settings
def clip_by_global_norm(
    max_norm: float,
    model_axes: AxisName | tuple[()] = (),
    norm: float = 2,
    *,
    param_specs: PyTree | None = None,
    tied: Iterable[TiedGroup] = (),
    tied_axis_name: str = "stage",
    counted: PyTree | None = None,
) -> GradientTransform:
    """Scale all gradients down by one factor if their norm over the whole model exceeds `max_norm`.

        grads * min(1, max_norm / (norm + 1e-6))

    Put it after the transforms that average or sum gradients and before the optimizer;
    `js.dynamic_loss_scale` wraps both. Each parameter counts once in the norm, even if devices or
    stages hold parts or copies of it. Norms are float32 for half-precision gradients, too.
    More: [docs/api/gradients.md](#details).

    Args:
      max_norm: > 0; also an array, as `optax.inject_hyperparams(js.clip_by_global_norm, "norm")`
        gives it.
      model_axes: *mapped* axes between whose devices the model is shared, a name or a tuple:
        tensor, fsdp, stage. Not the axis of the replicas, nor axes that the compiler shards over.
      norm: 2, infinity for the largest absolute value, or any other number >= 1.
      param_specs: one `PartitionSpec` per leaf, or a prefix of the tree: over which of
        `model_axes` a leaf differs. By default it is read off the types of
        `shard_map(check_vma=True)`; without these it is required.
      tied: groups as `js.pipeline.sum_tied_gradients` takes them; sum their gradients before.
      tied_axis_name: the axis of their stages, one of `model_axes`.
      counted: a tree like the gradients, or a prefix of it, of masks that broadcast to the leaves
        (None: all elements count). Elements whose mask is 0 are scaled, but are not in the norm.

    Returns:
      A gradient transform with state `ClipByGlobalNormState`. A norm that is infinite or NaN makes
      all gradients NaN, on all devices along `model_axes`. Integers are left alone.

    Raises:
      ValueError: numbers out of range, axes that are no names, specs or groups without their axis;
        at trace time an axis that is not mapped, neither specs nor types that say what is sharded,
        or specs, groups or masks that do not fit the gradients.

    Communication: every update one all-reduce of 4 bytes (8 in double precision) over
      `model_axes` (a sum or a maximum), with tables also over theirs; none without axes.

    Source: torch 2.13, `torch.nn.utils.clip_grad_norm_`; ColossalAI, `clip_grad_norm_fp32`.
    """
    if not isinstance(max_norm, jax.Array) and not max_norm > 0:
        raise ValueError(f"{_OWNER}: `max_norm` must be a number > 0, got {max_norm!r}.")
    if not norm >= 1:
        raise ValueError(f"{_OWNER}: `norm` must be a number >= 1 or infinity, got {norm!r}.")
    if model_axes != ():
        check_axis_argument(_OWNER, "model_axes", model_axes)
    axes = axis_names(model_axes)
    groups = checked_groups(_OWNER, "tied", tied) if tied != () else []
    ownership = OwnershipRule(axes, param_specs, groups, tied_axis_name)

    def init_fn(params: PyTree) -> ClipByGlobalNormState:
        dtype = widest(jax.tree.leaves(params))
        return ClipByGlobalNormState(jnp.zeros([], dtype), jnp.ones([], dtype))

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        require_axes(_OWNER, "model_axes", axes, _IN_THE_NORM)
        masks, rule = _element_masks(counted, updates), ownership
        if isinstance(updates, WithRows):
            rule = replace(ownership, axes=tuple(dict.fromkeys((*axes, *updates.table_axes))))
        with jax.named_scope(CLIP):  # also names what the compiler itself exchanges for the norm
            total = global_norm(updates, norm, rule.axes, rule.leaf_masks(updates), masks)
        ratio = jnp.asarray(max_norm, total.dtype) / (total + jnp.asarray(_EPSILON, total.dtype))
        one = jnp.ones_like(ratio)
        factor = jnp.where(jnp.isfinite(total), jnp.minimum(ratio, one), jnp.nan * one)
        numbers = cast(total, state.norm.dtype), cast(factor, state.clip_factor.dtype)
        new = ClipByGlobalNormState(*numbers)
        scale = cached_cast(new.clip_factor)
        clipped = map_in_float32(lambda x: x * scale(jnp.finfo(x.dtype).dtype), updates)
        return clipped, new

    return GradientTransform(init_fn, update_fn, Reduction(clips=True, of_rows=True))


@dataclass(frozen=True)
class OwnershipRule:
    """The rule by which each parameter of a model counts once, though devices share it.

    Attributes:
      axes: mapped axes between whose devices the model is shared.
      param_specs: which leaves are sharded over which of them; None: read off the types.
      tied: groups of copies, by stage.
      tied_axis: axis of the stages.
    """

    axes: tuple[str, ...]
    param_specs: PyTree | None
    tied: Sequence[TiedGroup]
    tied_axis: str

    def __post_init__(self) -> None:
        if self.param_specs is not None:
            check_are_specs(_OWNER, self.param_specs)
            if not self.axes:
                raise ValueError(f"{_OWNER}: `param_specs` need `model_axes`, got none.")
        if self.tied and self.tied_axis not in self.axes:
            raise ValueError(
                f"{_OWNER}: `tied_axis_name` must be one of `model_axes`={self.axes}, got "
                f"{self.tied_axis!r}."
            )

    def leaf_masks(self, tree: PyTree) -> list[jax.Array | None]:
        """Return for each leaf whether this device counts it, () bool; None where all do.

        Raises:
          ValueError: neither specs nor types say which leaves are sharded; specs or groups that
            do not fit.
        """
        first = {axis: lax.axis_index(axis) == 0 for axis in self.axes if axis_size(axis) > 1}
        # Maps a leaf's position to the stages whose copy of it an earlier stage counts.
        later: dict[int, tuple[int, ...]] = {}
        if self.tied:
            dense = arrays_of(tree.dense if isinstance(tree, WithRows) else tree)
            size = axis_size(self.tied_axis)
            for group in tied_members(_OWNER, "tied", self.tied, dense, size):
                for stage, position in list(group.items())[1:]:
                    later[position] = (*later.get(position, ()), stage)

        @functools.cache
        def mask(equal_over: tuple[str, ...], stages: tuple[int, ...]) -> jax.Array | None:
            conditions = [first[axis] for axis in equal_over]
            if stages and self.tied_axis not in equal_over:
                this_stage = lax.axis_index(self.tied_axis)
                conditions.append(~jnp.isin(this_stage, jnp.asarray(stages)))
            return functools.reduce(jnp.logical_and, conditions) if conditions else None

        leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
        equal = [
            tuple(a for a in first if a not in axes) for axes in self._shard_axes(tree, leaves)
        ]
        return [mask(axes, later.get(i, ())) for i, axes in enumerate(equal)]

    def _shard_axes(self, tree: PyTree, leaves: list[Any]) -> list[frozenset[str]]:
        """Return for each leaf the axes over which its shards or its stages' parameters differ."""
        axes = frozenset(a for a in self.axes if axis_size(a) > 1)
        tracked = frozenset(filter(checks_varying, axes))
        arrays = [leaf.values if is_row_gradient(leaf) else leaf for leaf in leaves]
        typed = [varying_axes(x) & tracked for x in arrays]
        if self.param_specs is None:
            tables = frozenset[str]()
            if isinstance(tree, WithRows):  # the other leaves are whole on these devices
                tables = axes.intersection(tree.table_axes)
                typed[len(typed) - len(tree.rows) :] = [tables] * len(tree.rows)
            if unknown := sorted(axes - tracked - tables):
                raise ValueError(
                    f"{_OWNER}: pass `param_specs`, one PartitionSpec per leaf: no types say which "
                    f"leaves are sharded over {unknown}."
                )
            return typed
        named = [
            axes.intersection(name for entry in spec for name in axis_names(entry or ()))
            for spec in self._specs(tree)
        ]
        wrong = [
            f"{name} (over {sorted((spec & tracked) - types)})"
            for name, spec, types in zip(leaf_names(arrays_of(tree)), named, typed, strict=True)
            if (spec & tracked) - types
        ]
        if wrong:
            raise ValueError(
                f"{_OWNER}: `param_specs` shard leaves that are typed as equal over these axes: "
                f"{', '.join(wrong)}."
            )
        return named

    def _specs(self, tree: PyTree) -> list[P]:
        if isinstance(tree, WithRows):
            table_spec = P(tree.table_axes)
            return [*self._specs(tree.dense), *[table_spec] * len(tree.rows)]
        return list(leaf_specs(self.param_specs, arrays_of(tree)))


def _element_masks(counted: PyTree | None, tree: PyTree) -> list[Any]:
    if isinstance(tree, WithRows):
        return [*_element_masks(counted, tree.dense), *[None] * len(tree.rows)]
    if counted is None:
        masks: list[Any] = []
        for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Staged | RowGradient)):
            # The norm counts all parameters in stages except later copies of tied ones.
            packed = isinstance(part, Staged)
            later = [part.packing.tied_copy_mask(n) for n in sorted(part)] if packed else [None]
            masks += [None if copies is None else ~copies for copies in later]
        return masks
    leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
    is_none = lambda x: x is None  # noqa: E731
    whole = jax.tree.broadcast(counted, arrays_of(tree), is_leaf=is_none)
    places = jax.tree.leaves(arrays_of(tree), is_leaf=is_none)
    pairs = zip(jax.tree.leaves(whole, is_leaf=is_none), places, strict=True)
    masks = [mask for mask, place in pairs if place is not None]
    for mask, leaf in zip(masks, leaves, strict=True):
        if mask is not None and jnp.broadcast_shapes(np.shape(mask), leaf.shape) != leaf.shape:
            raise ValueError(
                f"{_OWNER}: masks of `counted` must broadcast to the leaves, got one of "
                f"{np.shape(mask)} for a leaf of {leaf.shape}."
            )
    return masks


def global_norm(
    tree: PyTree,
    norm: float,
    axes: tuple[str, ...],
    leaf_masks: Sequence[jax.Array | None],
    element_masks: Sequence[Any],
) -> jax.Array:
    """Return the `norm`-norm of all numbers in `tree`, (), in the widest dtype, float32 or wider.

    Args:
      tree: gradients of this device.
      norm: exponent, 1 or more; infinity for the largest absolute value.
      axes: mapped axes between whose devices the model is shared.
      leaf_masks: one () bool per leaf: whether this device counts it; None where all devices do.
      element_masks: one mask per leaf of the elements that count; None for all.

    Communication: one all-reduce of () over `axes`; none without any of more than one position.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
    largest = np.isinf(norm)
    parts: dict[int, tuple[jax.Array | None, list[jax.Array]]] = {}
    for leaf, counts, mask in zip(leaves, leaf_masks, element_masks, strict=True):
        if is_number(leaf.dtype):
            parts.setdefault(id(counts), (counts, []))[1].append(_leaf_term(leaf, norm, mask))
    reducer = jnp.maximum if largest else jnp.add
    wide = widest(leaves)

    def combine(terms: Iterable[jax.Array]) -> jax.Array:
        return functools.reduce(reducer, [cast(x, wide) for x in terms], jnp.zeros([], wide))

    # A maximum does not change if several devices count the same leaf.
    total = combine(
        combine(leaf_terms)
        if counts is None or largest
        else zero_unless(counts, combine(leaf_terms))
        for counts, leaf_terms in parts.values()
    )
    if largest:  # not every backend's maximum keeps a NaN
        total = jnp.where(jnp.isnan(total), jnp.inf, total)
    total = (max_over if largest else sum_over)(total, axes)
    if largest or norm == 1:
        return total
    return jnp.sqrt(total) if norm == 2 else total ** jnp.asarray(1 / norm, wide)


def _leaf_term(leaf: Any, norm: float, mask: Any) -> jax.Array:
    """Return the sum of powers of the numbers in a leaf, or the largest of them, ()."""
    # A row may occur several times in a gradient of rows, and counts by its sum.
    values = coalesce(leaf).gradient.values if isinstance(leaf, RowGradient) else jnp.asarray(leaf)
    size = jnp.abs(cast(values, at_least_float32(values.dtype)))
    if mask is not None:
        counts = jnp.broadcast_to(jnp.asarray(mask, bool), size.shape)
        size = jnp.where(counts, size, jnp.zeros_like(size))
    if np.isinf(norm):
        return jnp.max(size, initial=0.0)
    if norm == 1:
        return jnp.sum(size)
    return jnp.sum(size * size if norm == 2 else size ** jnp.asarray(norm, size.dtype))


def widest(leaves: Sequence[Any]) -> np.dtype:
    """Return float32, or float64 if a leaf is in double precision."""
    dtypes = [x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in leaves]
    sizes = [jnp.finfo(kind).bits for kind in dtypes if jnp.issubdtype(kind, jnp.inexact)]
    return np.dtype(np.float64 if max(sizes, default=32) > 32 else np.float32)
