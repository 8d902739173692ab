"""What a step refuses of the states and windows that it is given, and warns of."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..._support.types import PyTree
from ...gradients.precision import loss_scale_of
from ...mesh import AnyMesh
from ...transform import NoExchangeState
from ...tree import leaf_names, not_floating
from .._state import TrainState
from ._probe import check_remembered
from ._transforms import check_transforms
from .update import GradientWindow, StepParts


def check_state(
    state: TrainState,
    parts: StepParts,
    mesh: AnyMesh,
    mode: str,
    warn: Callable[[str], None],
    *,
    is_first: bool,
) -> None:
    """Refuse what can be said of a step's transforms only when there is a state, and warn of it.

    Args:
      state: of the step.
      parts: of the step.
      mesh: of the step.
      mode: of the step.
      warn: issues each message once.
      is_first: whether this is the first state of the step; what follows from its types is not
        asked again.

    Communication: none.
    """
    sync, lookup = parts.sync, parts.lookup
    refuse_untrainable(lookup.dense(state.params))
    check_transforms(state, parts, mesh, mode, is_first=is_first)
    computes = None if parts.policy is None else parts.policy.compute
    if computes == "float16" and loss_scale_of(state.opt_state) is None:
        warn(
            '`policy` is js.Policy("float16"), and `optimizer` has no loss scale, so that '
            "gradients below 6e-8 become 0: put js.dynamic_loss_scale(...) around `optimizer`, "
            'or use js.Policy("bfloat16"). If the loss function scales its loss by itself, '
            "nothing is wrong."
        )
    if sync is not None and is_first:
        optimizer_state, params = lookup.dense(state.opt_state[1]), lookup.dense(state.params)
        check_remembered(parts.optimizer, optimizer_state, params, sync, warn)


def check_shards(shards: list[Any]) -> None:
    """Raise `ValueError` for shards of which each replica has the same one.

    Another library's `unreplicate` takes replica 0's, and the rest of the anchor is lost. The first
    elements are compared of what this process holds: a glance, not a proof.

    Args:
      shards: stacked arrays (replicas, rows, lanes), on devices; others are not looked at.

    Communication: device to host, a few elements per replica; none between replicas.
    """
    known = [x for x in shards if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    parts = [_glance(x) for x in known]
    # Parameters that start as one number have such shards, too.
    telling = any(len(x) > 1 and x.size and np.ptp(x[0]) for x in parts)
    if telling and all(np.all(x == x[:1]) for x in parts):
        raise ValueError(
            "`state`: every replica keeps another part of the anchor and of what goes with it, and "
            "here all have replica 0's: the state was made from one replica's, as "
            "`flax.jax_utils.unreplicate` and `x[0]` give it, and the rest is lost. Save all of "
            "it, by jaxslowmo.checkpoint or stacked as it is; for one copy of the parameters take "
            "`js.consensus`."
        )


_GLANCE = 64


def _glance(x: jax.Array) -> np.ndarray:
    """(replicas here, n) first elements of (replicas, rows, lanes), as this process holds them."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = math.ceil(_GLANCE / max(x.shape[-1], 1))
    found = [np.asarray(parts[start][:, :rows]) for start in sorted(parts)]
    return np.concatenate([part.reshape(len(part), -1) for part in found])


def refuse_others(state: TrainState) -> None:
    """Raise `ValueError` for what is no state."""
    if not all(hasattr(state, name) for name in TrainState._fields):
        raise ValueError(
            "`state` must be a js.TrainState, as `step.init(params)` makes it and the step returns "
            f"it, got {type(state).__name__}."
        )


def refuse_donated(state: TrainState) -> None:
    """Raise `ValueError` for a state whose buffers are gone, with which jax 0.10 may crash.

    Of parameters and optimizer the first array is looked at: what donates one donates all.
    """
    for x in (state.step, state.rng, first_array(state.params), first_array(state.opt_state)):
        if _is_gone(x):
            raise ValueError(
                "`state` was given to a step before, which reuses its buffers (donate=True): go on "
                "with the state that this step returned, or make the step with donate=False."
            )


def refuse_untrainable(params: PyTree) -> None:
    """Raise `ValueError` for parameters that have no gradient, or none that optimizers can follow.

    jax refuses to differentiate integers, and optimizers would move complex numbers to the wrong
    side: their gradients are conjugated.
    """
    if wrong := not_floating(params):
        raise ValueError(
            "`params`: a training step differentiates real floating-point leaves only, got "
            f"{', '.join(wrong)}. Pass other leaves to `step.init` as `model_state`, which the "
            "loss function is given and returns, or let it close over them. Instead of a complex "
            "leaf that shall be trained give real and imaginary part, and join them in the loss "
            "function by `jax.lax.complex`."
        )


def refuse_state_of_others(state: TrainState, parts: StepParts) -> None:
    """Raise `ValueError` for the state of a step with another `sync` or `gradients`, by its class.

    What the optimizer keeps is not looked at, nor what has no class of its own.
    """
    sync, gradients = parts.sync, parts.gradients
    members = isinstance(state.opt_state, tuple) and len(state.opt_state) == 3
    first, *_, last = state.opt_state if members else 2 * (state.opt_state,)
    wanted = [
        ("sync", last, NoExchangeState if sync is None else sync.state),
        ("gradients", first, optax.EmptyState if gradients is None else None),
    ]
    for argument, held, kind in wanted:
        if kind is not None and not isinstance(held, kind):
            raise ValueError(
                f"`state` must come from a step with the same `{argument}`: this step keeps "
                f"{kind.__name__} for it, and `state.opt_state` has {type(held).__name__}. Make "
                "the state by this step's `init`; `state.params` go over by `js.consensus`."
            )


def refuse_unusable_window(window: Any, state: TrainState, weight: Any = ...) -> None:
    """Raise `ValueError` for what is no window, one that was used, or one of other parameters.

    Also for one of batches unlike this: without a weight that is not looked at.
    """
    if window is None:
        return
    if not isinstance(window, GradientWindow):
        raise ValueError(
            "`window` must be what `step.collect(state, batch)` returns first, got "
            f"{type(window).__name__}."
        )
    if _is_gone(first_array(window.totals)):
        raise ValueError(
            "`window` was given to a step before, which reuses its buffers (donate=True): go on "
            "with the window that `step.collect` returned last, or begin another with None."
        )
    _refuse_others_gradients(window, state)
    if weight is not ... and (weight is None) != (window.weight is None):
        has = "none" if window.weight is None else "some"
        raise ValueError(
            f"`weight` must be given for all batches of a window or for none: those before had "
            f"{has}, and this one has {'none' if weight is None else 'one'}."
        )


def _refuse_others_gradients(window: GradientWindow, state: TrainState) -> None:
    """Raise `ValueError` for sums that are not those of the parameters in `state`."""
    replicas, others = state.step.shape, window.count.shape
    if replicas != others:
        raise ValueError(
            f"`window` must be of the replicas of `state`, {replicas}, got one of {others}."
        )
    params = state.params
    (leaves, structure), (totals, collected) = map(jax.tree.flatten, (params, window.totals))
    pairs = zip(leaves, totals, strict=False)
    if structure == collected and all(x.shape[1:] == total.shape[1:] for x, total in pairs):
        return
    own, given = (
        {name: x.shape[1:] for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
        for tree in (params, window.totals)
    )
    name = next((n for n in {**own, **given} if own.get(n) != given.get(n)), None)
    if name is None:  # nodes of other types, of which jax tells
        return
    has, holds = (
        f"shape {found[name]}" if name in found else "none of that name" for found in (own, given)
    )
    raise ValueError(
        "`window` must hold gradients of the parameters in `state`, of which it was collected: "
        f"of leaf {name!r} `state` has {has}, and the window {holds}."
    )


def forget(window: GradientWindow) -> None:
    """Let go of the gradients of a window that has become an update.

    No result of that has their shapes, so they cannot be donated; they live until it has run.
    """
    for x in jax.tree.leaves(window.totals):
        if not isinstance(x, Tracer):
            x.delete()


def tells_where_it_lies(state: TrainState) -> bool:
    """Whether all leaves have a place on a mesh: arrays do, shapes alone need not."""
    lies = (getattr(x, "sharding", None) for x in jax.tree.leaves(state))
    return all(isinstance(each, NamedSharding) for each in lies)


def _is_gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def first_array(tree: PyTree) -> Any:
    """Some leaf of `tree`, found without looking at the others; None if it has none."""
    # Every step asks this. Built-in types are told apart ten times faster than abstract ones are.
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return tree if isinstance(tree, jax.Array) else next(iter(jax.tree.leaves(tree)), None)
    for child in tree:
        if (found := first_array(child)) is not None:
            return found
    return None
