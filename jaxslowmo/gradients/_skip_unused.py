"""A wrapper whose optimizer does not update parameters that no replica used."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import checks_flags, records_settings
from .._support.scopes import SKIP_UNUSED
from .._support.types import AxisName, PyTree
from ..mesh import require_axes, sum_over
from ..transform import (
    GradientTransform,
    ParameterTransform,
    WrapperReduction,
    check_axis_argument,
    checked_optax,
    spec_of,
)
from ..tree import leaf_names, parts_of
from ._all_reduce import AllReduceGradientsState

_OWNER = SKIP_UNUSED


class SkipUnusedState(NamedTuple):
    """State of `skip_unused`; one entry per leaf, in the order of `jax.tree.leaves(params)`."""

    used_by: jax.Array  # (leaves,) int32, replicas that used it in the last update; -1: none yet
    times_used: jax.Array  # (leaves,) int32, updates in which some replica used it
    inner: PyTree  # state of the wrapped optimizer


@records_settings
def skip_unused(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    sticky: bool = False,
) -> GradientTransform:
    """Wrap an optimizer so that it does not update parameters that no replica used.

    Such a parameter gets update 0, without weight decay or momentum. Its entries in the optimizer's
    state stay as they are; entries of no parameter, such as a step count, are updated. A parameter
    that some replicas used is updated on all, from the mean in which the others count as zeros.
    Wrap the reduction and the optimizer together, so that it sees each replica's own gradients:

        tx = js.gradients.skip_unused(
            js.chain(js.all_reduce_gradients("replica"), optax.adamw(1e-3)), "replica"
        )

    It may also wrap the optimizer alone, after the reduction: a mean is zero where all gradients
    are, or where they cancel to the last bit. Put parameter transforms (`js.local_sgd`, ...) after
    it, not inside. For accumulation wrap it in `optax.MultiSteps`, not the other way round.

    Args:
      inner: the optimizer, or a chain of reduction and optimizer. Its state per parameter is found
        as by `optax.tree_utils.tree_map_params`; that of reductions and hooks is not touched.
      axis_name: mapped axis, or several, over which uses are counted: all axes over which the
        gradients that `update` receives differ.
      sticky: whether a parameter that was used once counts as used from then on, as in torch with
        `zero_grad(set_to_none=False)`.

    Returns:
      A transform with state `SkipUnusedState`; `js.gradients.unused_names` reads it. Its
      `update(grads, state, params, used=None, **extra)` takes `used`, which parameters this replica
      used: bools, () each, in a tree like the parameters or a prefix of it. None: those whose
      gradient is not identically zero (a NaN is a use), none with `weight=0`.

    Raises:
      ValueError: `inner` is a parameter transform or not a transform; at trace time an unbound
        axis, or `used` that does not fit the gradients.
      Exception: what optax raises for state that it can't find (`optax.sm3`), with a note.

    Communication: every update, one all-reduce over `axis_name` of 4 bytes per leaf; and the
      collectives of `inner`.

    Source: torch 2.13, `DistributedDataParallel(find_unused_parameters=True)`, `reducer.cpp`.
    """
    check_axis_argument(_OWNER, "axis_name", axis_name)
    if isinstance(inner, ParameterTransform):
        raise ValueError(
            f"{_OWNER}: `inner` must be an optimizer, got a js.ParameterTransform, which comes "
            "after it in a js.chain."
        )
    inner = checked_optax(_OWNER, "inner", inner)

    def init_fn(params: PyTree) -> SkipUnusedState:
        state = inner.init(params)
        count = len(jax.tree.leaves(params))
        _select_state(inner, jax.tree.map(lambda _: True, params), state, state)
        zeros = jnp.zeros(count, jnp.int32)
        return SkipUnusedState(zeros - 1, zeros, state)

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        require_axes(_OWNER, "axis_name", axis_name)
        treedef = jax.tree.structure(updates)
        if used is None:
            uses = [jnp.any(g != 0) for g in jax.tree.leaves(updates)]
            if (weight := extra.get("weight")) is not None:
                uses = [u & (jnp.asarray(weight) > 0) for u in uses]
        else:
            marks = jax.tree.leaves(jax.tree.broadcast(used, updates))
            uses = [jnp.any(jnp.asarray(mark, bool)) for mark in marks]
        with jax.named_scope(_OWNER):
            used_by = _count_uses(uses, axis_name)
            times_used = state.times_used + (used_by > 0).astype(jnp.int32)
            live = times_used > 0 if sticky else used_by > 0
            mask = treedef.unflatten([live[i] for i in range(treedef.num_leaves)])
        # Not in a conditional: `inner` may communicate, and is one program for all parameters.
        updates, after = inner.update(updates, state.inner, params, **extra)
        updates = jax.tree.map(lambda m, u: jnp.where(m, u, jnp.zeros_like(u)), mask, updates)
        kept = _select_state(inner, mask, after, state.inner)
        return updates, SkipUnusedState(used_by, times_used, kept)

    flags = {"skips": True, "returns_updates": True, "of_rows": False}
    spec = WrapperReduction.from_parts(spec_of(inner), takes={"weight"}, **flags)
    return GradientTransform(init_fn, update_fn, spec)


@checks_flags("unused_names")
def unused_names(state: PyTree, params: PyTree, *, ever: bool = False) -> list[str]:
    """Return the names of the parameters that no replica used in the last update.

    The names are on the host, so the call waits for the update.

    Args:
      state: a `SkipUnusedState`, or a state that contains exactly one, such as that of a chain or a
        `TrainState`; of one replica or stacked.
      params: the parameters, of one replica or stacked; only names matter.
      ever: whether to list only those that no replica used in any update so far.

    Returns:
      Leaf names such as `"head/bias"`, in flattening order; [] before the first update.

    Raises:
      ValueError: no `SkipUnusedState` in `state` or several, or one of other parameters.

    Communication: none.
    """
    states = parts_of(state, SkipUnusedState)
    if len(states) != 1:
        raise ValueError(f"`state` must hold one SkipUnusedState, got {len(states)}.")
    used_by, times_used = (_first_replica(x) for x in states[0][:2])
    counts = times_used - (used_by < 0) if ever else used_by
    return [name for name, count in zip(leaf_names(params), counts, strict=True) if count == 0]


def _first_replica(x: jax.Array) -> Any:
    """Return one replica's (leaves,) of a stacked array that is equal on all, on the host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_shards[0].data
    values = jax.device_get(x)
    return values.reshape(-1, values.shape[-1])[0] if values.size else values.reshape(-1)


def _count_uses(uses: list[Any], axis_name: AxisName) -> jax.Array:
    """Return over how many replicas each flag is True, (leaves,) int32."""
    if not uses:
        return jnp.zeros(0, jnp.int32)
    counts = jnp.stack([jnp.asarray(u).astype(jnp.int32) for u in uses])
    return sum_over(counts, axis_name)


def _select_state(
    inner: optax.GradientTransformation, mask: PyTree, new: PyTree, old: PyTree
) -> PyTree:
    """Return the state of `inner`: a parameter's entries from `new` where `mask`, else `old`."""
    is_hole = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    is_reduction = lambda x: isinstance(x, AllReduceGradientsState)  # noqa: E731

    def without_reduction(state: PyTree) -> PyTree:  # reduction states belong to no parameter
        return jax.tree.map(lambda x: None if is_reduction(x) else x, state, is_leaf=is_reduction)

    try:
        masks = optax.tree_utils.tree_map_params(
            lambda params: without_reduction(inner.init(params)),
            lambda entry, use: entry if is_hole(entry) else use,
            without_reduction(new),
            mask,
            transform_non_params=lambda _: True,
            is_leaf=is_hole,
        )
    except Exception as error:
        error.add_note(f"{_OWNER}: needs to know which state of `inner` is of which parameter.")
        raise

    def choose(use: Any, new: Any, old: Any) -> Any:
        return new if use is None or use is True else jnp.where(use, new, old)

    return jax.tree.map(choose, masks, new, old, is_leaf=lambda x: x is None)
