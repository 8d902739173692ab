"""An optimizer that leaves alone what no replica used."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._support.scopes import SKIP_UNUSED
from ..._support.types import AxisName, PyTree
from ...mesh import axes_of, axis_names, axis_size, match_varying, require_axes, settle, vary_over
from ...transform import (
    GradientTransform,
    ParameterTransform,
    check_axis_argument,
    checked_optax,
    spec_of,
)
from ...tree import leaf_names, parts_of
from ._all_reduce import AllReduceGradientsState

_OWNER = SKIP_UNUSED


class SkipUnusedState(NamedTuple):
    """State of `skip_unused`; leaves of the parameters in flattening order."""

    used_by: jax.Array  # (leaves,) int32, replicas that used it in the last update; -1: none yet
    times_used: jax.Array  # (leaves,) int32, updates in which some replica used it
    inner: PyTree  # state of the wrapped optimizer


def skip_unused(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    sticky: bool = False,
) -> GradientTransform:
    """An optimizer that leaves parameters alone in updates in which no replica used them.

    Such a parameter gets update 0, without weight decay or momentum, and the entries of the
    optimizer's state that belong to it stay as they are; what belongs to no parameter, such as a
    step count, goes on. A parameter that some replicas used is updated on all of them, from the
    mean with zeros from the others, which is what the reduction gives.

    Wrap the reduction and the optimizer together, so that it sees each replica's own gradients:

        tx = js.skip_unused(
            js.chain(js.all_reduce_gradients("replica"), optax.adamw(1e-3)), "replica"
        )

    Around the optimizer alone, behind the reduction, it works too: a mean is zero where all
    gradients are, or where they cancel to the last bit. Parameter transforms (`js.local_sgd`, ...)
    stay outside, behind it. For accumulation put `optax.MultiSteps` around it, not inside.

    Args:
      inner: the optimizer, or a chain of reduction and optimizer. It may hold state per parameter
        (trees like the parameters, found as `optax.tree_utils.tree_map_params` does) and state of
        other kinds; the state of `js.all_reduce_gradients` and its hooks is not touched.
      axis_name: mapped axis, or several, over which uses are counted: all axes that the gradients
        given to `update` differ over.
      sticky: a parameter once used counts as used from then on, as in torch with
        `zero_grad(set_to_none=False)`.

    Returns:
      A transform with state `SkipUnusedState`; `js.unused_names` reads it. Its
      `update(grads, state, params, used=None, **extra)` takes

      `used`: which parameters this replica used: bools, () each, in a tree like the parameters or a
      prefix of it (`True` for all). None: those whose gradient is not identically zero (a NaN is a
      use); with `weight=0` none, as that replica's gradients are ignored. `extra` goes to `inner`.

    Raises:
      ValueError: `inner` is a parameter transform or not a transform; when the state is made,
        state per parameter that can't be found (`optax.sm3`, `optax.lbfgs`); at trace time an
        unbound axis, or `used` that is not bools or does not fit the gradients.

    Communication: every update, one all-reduce over `axis_name` of 4 bytes per leaf; and what
      `inner` does.

    Source: torch 2.13, `DistributedDataParallel(find_unused_parameters=True)`, `reducer.cpp`.
    """
    check_axis_argument(_OWNER, "axis_name", axis_name)
    if isinstance(inner, ParameterTransform):
        raise ValueError(
            f"{_OWNER}: `inner` must be an optimizer; put the parameter transform behind it: "
            "js.chain(js.skip_unused(optimizer, axis_name), transform)."
        )
    inner = checked_optax(_OWNER, "inner", inner)

    def init_fn(params: PyTree) -> SkipUnusedState:
        state = inner.init(params)
        count = len(jax.tree.leaves(params))
        _select(inner, jax.tree.map(lambda _: True, params), state, state)
        zeros = jnp.zeros(count, jnp.int32)
        zeros = vary_over(zeros, axes_of(params) - set(axis_names(axis_name)))
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
            mine = [jnp.any(g != 0) for g in jax.tree.leaves(updates)]
            if (weight := extra.get("weight")) is not None:
                mine = [u & (jnp.asarray(weight) > 0) for u in mine]
        else:
            mine = _per_leaf(used, updates)
        with jax.named_scope(_OWNER):
            used_by = _sum(mine, axis_name)
            times_used = state.times_used + (used_by > 0).astype(jnp.int32)
            live = times_used > 0 if sticky else used_by > 0
            mask = treedef.unflatten([live[i] for i in range(treedef.num_leaves)])
        # Not in a conditional: `inner` may communicate, and is one program for all parameters.
        updates, after = inner.update(updates, state.inner, params, **extra)
        updates = jax.tree.map(lambda m, u: jnp.where(m, u, jnp.zeros_like(u)), mask, updates)
        kept = _select(inner, mask, after, state.inner)
        # Sums are typed as equal on all replicas. A state that comes into a shard_map is not.
        used_by = match_varying(used_by, state.used_by)
        return updates, SkipUnusedState(used_by, times_used, kept)

    own = spec_of(inner)
    spec = own.around(
        lambda state: state.inner,
        takes=own.takes | {"weight"},
        skips=True,
        returns_updates=True,
        of_rows=False,
    )
    return GradientTransform(init_fn, update_fn, spec)


def unused_names(state: PyTree, params: PyTree, *, ever: bool = False) -> list[str]:
    """Names of the parameters that no replica used in the last update.

    On the host; waits for the update.

    Args:
      state: a `SkipUnusedState`, or what holds exactly one: the state of a chain, a `TrainState`;
        of one replica or stacked.
      params: the parameters, of one replica or stacked; only names matter.
      ever: those that no replica used in any update so far.

    Returns:
      Leaf names such as `"head/bias"`, in flattening order; [] before the first update.

    Raises:
      ValueError: no `SkipUnusedState` in `state` or several, or one of other parameters.

    Communication: none.
    """
    found = parts_of(state, SkipUnusedState)
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold one SkipUnusedState, of js.skip_unused, got {len(found)}."
        )
    names = leaf_names(params)
    used_by, times_used = (_first_replica(x) for x in found[0][:2])
    if len(used_by) != len(names):
        raise ValueError(
            f"`params` must be the {len(used_by)} leaves that `state` was made for, got "
            f"{len(names)}."
        )
    counts = times_used - (used_by < 0) if ever else used_by
    return [name for name, count in zip(names, counts, strict=True) if count == 0]


def _first_replica(x: jax.Array) -> Any:
    """One replica's (leaves,) of a stacked array, equal on all; here on this process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_shards[0].data
    found = jax.device_get(x)
    return found.reshape(-1, found.shape[-1])[0] if found.size else found.reshape(-1)


def _sum(mine: list[Any], axis_name: AxisName) -> jax.Array:
    """(leaves,) int32, over how many replicas each is True."""
    if not mine:
        return jnp.zeros(0, jnp.int32)
    counts = jnp.stack([jnp.asarray(u).astype(jnp.int32) for u in mine])
    if axis_size(axis_name) == 1:
        return settle(counts, axis_name)
    # Of several axes, gradients may be equal over some, and typed so.
    return lax.psum(vary_over(counts, axis_names(axis_name)), axis_name)


def _per_leaf(used: PyTree, updates: PyTree) -> list[Any]:
    """A mask for each leaf of `updates`, from a prefix of its tree."""
    wrong = [
        f"{name} ({jnp.result_type(u)}{list(jnp.shape(u))})"
        for name, u in zip(leaf_names(used), jax.tree.leaves(used), strict=True)
        if jnp.shape(u) != () or jnp.result_type(u) != jnp.bool_
    ]
    if wrong:
        raise ValueError(f"{_OWNER}: `used` must hold bools of shape (), got {', '.join(wrong)}.")
    try:
        return jax.tree.leaves(jax.tree.broadcast(used, updates))
    except ValueError as error:
        raise ValueError(
            f"{_OWNER}: `used` must be a tree of bools like the gradients, or a prefix of it, got "
            f"{jax.tree.structure(used)} for {jax.tree.structure(updates)}."
        ) from error


def _select(inner: optax.GradientTransformation, mask: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """State of `inner`: entries of a parameter from `new` where `mask`, else from `old`."""
    is_hole = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    is_reduction = lambda x: isinstance(x, AllReduceGradientsState)  # noqa: E731

    def without_reduction(state: PyTree) -> PyTree:  # what belongs to no parameter
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
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{_OWNER}: can't tell which entries of the state of `inner` belong to which parameter "
            "(optax.tree_utils.tree_map_params can't), so it can't leave them alone."
        ) from error

    def choose(use: Any, new: Any, old: Any) -> Any:
        return new if use is None or use is True else jnp.where(use, new, old)

    return jax.tree.map(choose, masks, new, old, is_leaf=lambda x: x is None)
