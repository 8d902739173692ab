"""Moments in the state of the inner optimizer, which an exchange may reset or average."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, keystr

from .._support.checks import ArgumentError, check_names
from .._support.scopes import MOMENTS
from .._support.types import PyTree
from ._algorithm import Carry, Event, InnerPeriods, InnerState, UpdateContext, rounded_params
from ._due import as_schedule
from ._optax_states import move_copies
from ._replica_group import ReplicaGroup


def update_moments(
    old: Carry,
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    inner_state: InnerState,
    field: str | None = None,
) -> Carry:
    """Return the carry after an exchange, the inner optimizer's moments kept, reset or averaged.

    `old` is the carry before it. Copies of parameters in the optimizer's state first move as they
    did.

    Moments are the trees like the parameters. "reset" makes them those of `context.init`, and with
    them the arrays beside them in the same state, such as the counter of Adam's bias correction.
    "average" makes them, and floating arrays beside them, their means; with a `field` only those
    which have this name in their states. States without moments, such
    as those of schedules, go on, and so does what a transform around others keeps, such as the sum
    of gradients of optax.MultiSteps.

    Raises:
      ValueError: arrays in states without moments.

    Communication: with "average" one all-reduce of the bytes of the moments.
    """
    if inner_state == "keep":
        return carry
    params, after = context.part(carry.before), context.part(rounded_params(carry))
    moments = move_copies(carry.moments, context.part(rounded_params(old)), after)
    parts, treedef, names = _parts(moments, params)
    chosen = [i for i, name in names.items() if field in (None, name)]
    if inner_state == "reset":
        assert context.init is not None, "checked by the transform"
        fresh = treedef.flatten_up_to(context.init(after))
        for i in chosen:
            parts[i] = fresh[i]
        return carry._replace(moments=treedef.unflatten(parts))
    floating = [i for i in chosen if _is_floating(parts[i])]
    trees, specs = [parts[i] for i in floating], replicas.param_specs
    is_moment = _moment_matcher(params)
    if specs is not None:
        specs = [_specs(x, params, context.part(specs)) if is_moment(x) else P() for x in trees]
    # A codec is for parameters: the smallest second moments would become 0 in float16.
    with jax.named_scope(MOMENTS):
        means = replace(replicas, codec=None, param_specs=specs).mean(trees, context.weight)
    for i, mean in zip(floating, means, strict=True):
        parts[i] = mean
    return carry._replace(moments=treedef.unflatten(parts))


def moment_events(
    owner: str, inner_state: InnerPeriods, group: ReplicaGroup
) -> tuple[InnerState, tuple[Event, ...]]:
    """Return what an exchange of parameters does to moments, and the events of moments alone.

    The latter follow those of the parameters, which may replace what is before them.

    Raises:
      ValueError: an argument `inner_state` that is no `InnerPeriods`, or a period below 1.
    """
    if not isinstance(inner_state, Mapping):
        if inner_state not in get_args(InnerState):
            raise ArgumentError(
                "inner_state",
                f"{owner}: `inner_state` must be one of {get_args(InnerState)}, or map fields of "
                f'optax states to periods, such as {{"mu": js.every(96)}}, got {inner_state!r}.',
            )
        return inner_state, ()

    def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, field: str) -> Carry:
        return update_moments(carry, carry, replicas, context, "average", field)

    return "keep", tuple(
        Event(
            field,
            as_schedule(period, "inner_state"),
            functools.partial(run, field=field),
            group,
            inner_state="average",
            field=field,
        )
        for field, period in inner_state.items()
    )


def check_fields(owner: str, fields: list[str], moments: PyTree, params: PyTree) -> None:
    """Raise `ValueError` for names that no field with moments has in an optimizer's state."""
    if fields:
        parts, _, names = _parts(moments, params)
        known = {name: None for i, name in names.items() if _is_floating(parts[i])}
        check_names(f"{owner}: `inner_state`", fields, list(known), "moments of this optimizer")


def _parts(moments: PyTree, params: PyTree) -> tuple[list[Any], Any, dict[int, str]]:
    """Return the parts of an optimizer's state, its structure, and the names of some of them.

    Those, by their positions, are the moments and what stands beside them.
    """
    is_moment = _moment_matcher(params)
    places, treedef = jax.tree_util.tree_flatten_with_path(
        moments, is_leaf=lambda x: is_moment(x) or isinstance(x, optax.EmptyState)
    )
    nodes = {path[:-1] for path, x in places if is_moment(x)}
    # Sums of gradients and copies of parameters, of a state that holds those of other transforms.
    around = {node for node in nodes if any(_is_inside(node, path, x) for path, x in places)}
    for path, x in places:
        if path[:-1] not in nodes and np.ndim(x) and _is_floating(x):
            raise ArgumentError(
                "inner_state",
                "`inner_state` changes trees like the parameters in an optimizer's state, and "
                f"this one has {x.dtype}{list(x.shape)} in another form: leave that out.",
            )
    names = {
        i: keystr(path[-1:], simple=True)
        for i, (path, _) in enumerate(places)
        if path[:-1] in nodes - around
    }
    return [x for _, x in places], treedef, names


def _is_inside(node: tuple[Any, ...], path: tuple[Any, ...], x: Any) -> bool:
    """Return whether an array, or a state without any, is in a state that this state holds."""
    inner = path[len(node) + 1 :]
    is_state = isinstance(x, optax.EmptyState) or any(isinstance(k, GetAttrKey) for k in inner)
    return path[: len(node)] == node and len(path) > len(node) and is_state


def _is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _is_floating(tree: PyTree) -> bool:
    kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(tree)]
    return bool(kinds) and all(kinds)


def _moment_matcher(params: PyTree) -> Callable[[PyTree], bool]:
    """Return a function that tells whether a tree is like the parameters, or a masked part."""
    leaves, form = jax.tree.flatten(params, is_leaf=_is_hole)
    # Any array has the structure of parameters that are one array.
    shape = leaves[0].shape if jax.tree_util.treedef_is_leaf(form) else None

    def is_like(x: PyTree) -> bool:
        is_same = jax.tree.structure(x, is_leaf=_is_hole) == form
        return is_same and _is_floating(x) and (shape is None or shape == x.shape)

    return is_like


def _specs(moment: PyTree, params: PyTree, specs: PyTree) -> PyTree:
    """Return the specs of a moment, whose arrays may be smaller than the parameters (adafactor)."""

    def leaf_spec(x: Any, leaf: Any, spec: Any) -> Any:
        return x if _is_hole(x) else spec if x.shape == leaf.shape else P()

    return jax.tree.map(
        leaf_spec, moment, params, jax.tree.broadcast(specs, params), is_leaf=_is_hole
    )
