"""Clipping by the global norm as a transform, for models that several devices share."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._scopes import CLIP
from .._typing import AxisName, PyTree
from ..mesh import axes_of, axis_names, match_varying, require_axes, vary_over
from ..pipeline import TiedGroup, checked_groups
from ..sparse import WithRows, is_row_gradient
from ..transform import (
    GradientSpec,
    GradientTransform,
    Validation,
    check_axis_argument,
    passing_state,
)
from ..tree import Staged, cast, parts_of
from ._counted import OWNER, Counting, check_specs
from ._norm import global_norm, scaled, widest

_EPSILON = 1e-6  # torch's
_IN_THE_NORM = (
    "Axes over which the compiler shards are not mapped: leave them out, since what lies there is "
    "in the norm already."
)


@passing_state
class ClipByGlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`: what it did in the last update."""

    norm: jax.Array  # () float32, of the gradients before
    clip_factor: jax.Array  # () float32, by which they were multiplied; 1 where nothing was clipped

    @property
    def scale(self) -> jax.Array:
        """The value of `clip_factor`, by the name that the field had in 0.1.0."""
        return self.clip_factor


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
    """Scales all gradients down together where their common norm exceeds `max_norm`.

        grads * min(1, max_norm / (norm + 1e-6))

    The norm is that of the whole model, each parameter counted once: parts that devices along
    `model_axes` hold are added up, leaves that these hold all alike are counted on the first, and
    a tied parameter on the first stage that holds it. It stands behind what averages or sums
    gradients (`js.all_reduce_gradients`, `js.pipeline.sum_tied_gradients`) and in front of the
    optimizer; `js.dynamic_loss_scale` stands around it. Replicas whose gradients differ have norms
    of their own.

    Unlike `optax.clip_by_global_norm` (`grads * max_norm / norm` where the norm is not below
    `max_norm`) it follows torch: a clipped norm is `max_norm * norm / (norm + 1e-6)`, which the two
    have in common up to 1e-6 / norm; norms are float32 for half-precision gradients, too.

    Args:
      max_norm: > 0; also an array, as `optax.inject_hyperparams(js.clip_by_global_norm, "norm")`
        gives it.
      model_axes: *mapped* axes between whose devices the model is shared, a name or a tuple:
        tensor, fsdp, stage. Axes over which the compiler shards are not mapped: what lies there is
        in the norm already. Not the axis of the replicas.
      norm: 2, infinity for the largest absolute value, or any other number >= 1.
      param_specs: one `PartitionSpec` per leaf, or a prefix of the tree: over which of
        `model_axes` a leaf is sharded, or stages have different parameters in it. Without, the
        types of `shard_map(check_vma=True)` tell; where there are none it must be given.
      tied: groups as `js.pipeline.sum_tied_gradients` takes them; the gradients are summed before.
      tied_axis_name: the axis of their stages, one of `model_axes`.
      counted: a tree like the gradients, or a prefix of it, of masks that broadcast to the leaves
        (None: all): elements where they are 0 are scaled, and not in the norm. For copies that
        are parts of one array. Of `js.pipelined` tied parameters count once without it.

    Returns:
      A gradient transform with state `ClipByGlobalNormState`. A norm that is infinite or NaN makes
      all gradients NaN, on all devices along `model_axes`, so that whatever looks for that finds it
      everywhere (`js.dynamic_loss_scale` around it looks before, and gives it zeros). Of
      `js.RowGradient` leaves each row counts by the sum of its entries. Integers are left alone.
      In the `gradients` of a step with tables (`embeddings=`) it counts and scales their rows, too.

    Raises:
      ValueError: at construction: `max_norm` that is not > 0, `norm` below 1, axes that are no
        names, specs without axes, groups that are none or whose axis is not in `model_axes`. At
        trace time: an axis that is not mapped, nothing that tells what is sharded, specs, groups or
        masks that do not fit the gradients.

    Communication: every update one all-reduce of 4 bytes (8 in double precision) over
      `model_axes`, and beside tables over the axis that these are sharded over, a sum or a maximum;
      none without axes.

    Source: torch 2.13, `torch.nn.utils.clip_grad_norm_`; ColossalAI (commit 96780e6),
      `clip_grad_norm_fp32`, which counts tied parameters once per stage.
    """
    if not isinstance(max_norm, jax.Array) and not (_is_number(max_norm) and max_norm > 0):
        raise ValueError(f"{OWNER}: `max_norm` must be a number > 0, got {max_norm!r}.")
    if not _is_number(norm) or not norm >= 1:
        raise ValueError(f"{OWNER}: `norm` must be a number >= 1 or infinity, got {norm!r}.")
    if model_axes != ():
        check_axis_argument(OWNER, "model_axes", model_axes)
    axes = axis_names(model_axes)
    check_specs(param_specs, axes)
    groups = checked_groups(OWNER, "tied", tied)
    if groups and tied_axis_name not in axes:
        raise ValueError(
            f"{OWNER}: `tied_axis_name`, the axis of the stages in `tied`, must be one of "
            f"`model_axes`={axes}, got {tied_axis_name!r}."
        )
    counting = Counting(axes, param_specs, groups, tied_axis_name)

    def init_fn(params: PyTree) -> ClipByGlobalNormState:
        dtype = widest(jax.tree.leaves(params))
        start = ClipByGlobalNormState(jnp.zeros([], dtype), jnp.ones([], dtype))
        return vary_over(start, axes_of(params) - set(axes))

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        validation: Validation | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        if validation is not None and validation.clipped is not None:
            new = match_varying(validation.clipped, state)
            return scaled(updates, new.clip_factor), new
        require_axes(OWNER, "model_axes", axes, _IN_THE_NORM)
        masks, known = _masks(counted, updates), counting.beside_rows(updates)
        with jax.named_scope(CLIP):  # what the compiler exchanges for it, too
            found = global_norm(updates, norm, known.axes, known.shares(updates), masks)
        ratio = jnp.asarray(max_norm, found.dtype) / (found + jnp.asarray(_EPSILON, found.dtype))
        one = jnp.ones_like(ratio)
        factor = jnp.where(jnp.isfinite(found), jnp.minimum(ratio, one), jnp.nan * one)
        factor = cast(factor, state.clip_factor.dtype)
        new = ClipByGlobalNormState(cast(found, state.norm.dtype), factor)
        new = match_varying(new, state)
        if validation is not None:
            return updates, new
        return scaled(updates, new.clip_factor), new

    spec = GradientSpec(takes=frozenset({"validation"}), clips=True, of_rows=True)
    return GradientTransform(init_fn, update_fn, spec)


def clip_state(state: PyTree) -> ClipByGlobalNormState | None:
    """The state of the `clip_by_global_norm` in a state, wherever it stands; None without one.

    Raises:
      ValueError: there are several.
    """
    found = parts_of(state, ClipByGlobalNormState)
    if len(found) > 1:
        raise ValueError(
            f'{OWNER}: `validate`="after" takes one js.clip_by_global_norm, found {len(found)}. '
            'Several, such as one for each part of an optax.partition, work with validate="before".'
        )
    return found[0] if found else None


def _masks(counted: PyTree | None, tree: PyTree) -> list[Any]:
    if isinstance(tree, WithRows):
        return [*_masks(counted, tree.dense), *[None] * len(tree.rows)]
    leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
    if counted is None:
        parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Staged) or is_row_gradient(x))
        return [mask for part in parts for mask in _masks_of(part)]
    like = jax.tree.map(lambda _: 0, tree, is_leaf=is_row_gradient)
    try:
        whole = jax.tree.broadcast(counted, like, is_leaf=lambda x: x is None)
        masks = jax.tree.leaves(whole, is_leaf=lambda x: x is None)
        for mask, leaf in zip(masks, leaves, strict=True):
            if mask is not None and jnp.broadcast_shapes(np.shape(mask), leaf.shape) != leaf.shape:
                raise ValueError(f"a mask of shape {np.shape(mask)} for a leaf of {leaf.shape}")
    except ValueError as error:
        raise ValueError(
            f"{OWNER}: `counted` must be a tree of masks with the structure of the gradients, or a "
            f"prefix of it, that broadcast to the leaves: {error}."
        ) from None
    return masks


def _masks_of(part: Any) -> list[Any]:
    """Masks of what is in the norm: of parameters in stages all but later copies of tied ones."""
    if not isinstance(part, Staged):
        return [None]
    later = [part.packing.repeated(name) for name in sorted(part)]
    return [None if own is None else ~own for own in later]


def _is_number(x: Any) -> bool:
    is_one = isinstance(x, int | float | np.number | np.ndarray) and not isinstance(x, bool)
    return is_one and np.shape(x) == () and not math.isnan(float(x))
