"""Moments in the state of the inner optimizer, which an exchange may reset or average."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from .._support.checks import ArgumentError
from .._support.types import PyTree
from ._algorithm import Carry, InnerState, UpdateContext, rounded
from ._optax_states import moved_copies
from ._replica_group import ReplicaGroup


def changed_moments(
    old: Carry,
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    inner_state: InnerState,
) -> Carry:
    """Return the carry after an exchange, the inner optimizer's moments kept, reset or averaged.

    `old` is the carry before it. Copies of parameters in the optimizer's state first move as they
    did.

    Moments are the trees like the parameters. "reset" makes them those of `context.init`, and with
    them the arrays beside them in the same state, such as the counter of Adam's bias correction.
    "average" makes them, and floating arrays beside them, their means. States without moments, such
    as those of schedules, go on, and so does what a transform around others keeps, such as the sum
    of gradients of optax.MultiSteps.

    Raises:
      ValueError: arrays in states without moments.

    Communication: with "average" one all-reduce of the bytes of the moments.
    """
    if inner_state == "keep":
        return carry
    params, after = context.part(carry.before), context.part(rounded(carry))
    is_moment = _like(params)
    places, treedef = jax.tree_util.tree_flatten_with_path(
        moved_copies(carry.moments, context.part(rounded(old)), after),
        is_leaf=lambda x: is_moment(x) or isinstance(x, optax.EmptyState),
    )
    nodes = {path[:-1] for path, x in places if is_moment(x)}
    # Sums of gradients and copies of parameters, of a state that holds those of other transforms.
    around = {node for node in nodes if any(_is_inside(node, path, x) for path, x in places)}
    chosen = [i for i, (path, _) in enumerate(places) if path[:-1] in nodes - around]
    for path, x in places:
        if path[:-1] not in nodes and np.ndim(x) and _is_floating(x):
            raise ArgumentError(
                "inner_state",
                f"`inner_state`={inner_state!r} changes what an optimizer keeps in trees like the "
                f"parameters, and this one has {x.dtype}{list(x.shape)} in another form: leave out "
                'what brings it there, or use inner_state="keep".',
            )
    parts = [x for _, x in places]
    if inner_state == "reset":
        assert context.init is not None, "checked by the transform"
        fresh = treedef.flatten_up_to(context.init(after))
        for i in chosen:
            parts[i] = fresh[i]
        return carry._replace(moments=treedef.unflatten(parts))
    floating = [i for i in chosen if _is_floating(parts[i])]
    trees, specs = [parts[i] for i in floating], replicas.param_specs
    if specs is not None:
        specs = [_specs(x, params, context.part(specs)) if is_moment(x) else P() for x in trees]
    # A codec is for parameters: the smallest second moments would become 0 in float16.
    means = replicas.over(codec=None, param_specs=specs).mean(trees, context.weight)
    for i, mean in zip(floating, means, strict=True):
        parts[i] = mean
    return carry._replace(moments=treedef.unflatten(parts))


def check_inner_state(owner: str, inner_state: Any) -> InnerState:
    """Return the argument `inner_state`; raise `ValueError` unless it is one."""
    if inner_state not in get_args(InnerState):
        raise ArgumentError(
            "inner_state",
            f"{owner}: `inner_state` must be one of {get_args(InnerState)}, got {inner_state!r}.",
        )
    return inner_state


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


def _like(params: PyTree) -> Callable[[PyTree], bool]:
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

    def of(x: Any, leaf: Any, spec: Any) -> Any:
        return x if _is_hole(x) else spec if x.shape == leaf.shape else P()

    return jax.tree.map(of, moment, params, jax.tree.broadcast(specs, params), is_leaf=_is_hole)
