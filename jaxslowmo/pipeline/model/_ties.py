"""Tied leaves: leaves of several layers that are one parameter.

An optimizer sees such a parameter once, as the first leaf of its group, whatever holds the copies.
So there is one set of moments, one decay and one share in a norm.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import optax
from jax.core import Tracer

from ..._support.types import PyTree
from ...transform import GradientTransform
from ...tree import leaf_names, type_text

TiedLeaf = tuple[int, str]
"""A layer, and the path of a leaf in its parameters, such as `"dense/kernel"`."""

Ties = tuple[tuple[TiedLeaf, ...], ...]

Groups = tuple[tuple[int, ...], ...]
"""Positions of the leaves of each tied parameter among those of the model, the first one first."""


def as_ties(tied: Any, num_layers: int) -> Ties:
    """Return `tied` as tuples.

    Raises:
      ValueError: leaves that are not (layer, path) pairs, layers that the model does not have,
        groups of fewer than two leaves, a leaf that is named twice.
    """
    ties = tuple(tuple(_as_leaf(leaf, num_layers) for leaf in group) for group in tied)
    for group in ties:
        if len(group) < 2:
            raise ValueError(f"`tied` must name at least two leaves per group, got {group!r}.")
    named = [leaf for group in ties for leaf in group]
    twice = sorted({leaf for leaf in named if named.count(leaf) > 1})
    if twice:
        raise ValueError(f"`tied` must name each leaf once, got {twice!r} again.")
    return ties


def _as_leaf(leaf: Any, num_layers: int) -> TiedLeaf:
    is_pair = isinstance(leaf, tuple | list) and list(map(type, leaf)) == [int, str]
    if not is_pair or not 0 <= leaf[0] < num_layers:
        raise ValueError(
            f'`tied` must hold groups of (layer, path) such as (0, "table"), with layers below '
            f"{num_layers}, got {leaf!r}."
        )
    return leaf[0], leaf[1]


def tied_positions(ties: Ties, params: Sequence[PyTree]) -> Groups:
    """Return the positions of tied leaves among the leaves of all layers.

    Raises:
      ValueError: a leaf that `params` lacks, a group whose shapes or dtypes differ.
    """
    leaves, names = jax.tree.leaves(list(params)), [leaf_names(layer) for layer in params]
    first = [0, *accumulate(map(len, names))]
    groups = []
    for group in ties:
        for layer, path in group:
            if path not in names[layer]:
                has = ", ".join(names[layer]) or "no leaves"
                raise ValueError(f"`tied` names {path!r} of layer {layer}, which has {has}.")
        positions = tuple(first[layer] + names[layer].index(path) for layer, path in group)
        kinds = [type_text(leaves[i]) for i in positions]
        if len(set(kinds)) > 1:
            each = zip(group, kinds, strict=True)
            raise ValueError(
                "`tied` leaves must have equal shapes and dtypes: "
                f"{', '.join(f'{path!r} of layer {layer} is {x}' for (layer, path), x in each)}."
            )
        groups.append(positions)
    return tuple(groups)


def tie_leaves(
    groups: Groups, params: Sequence[PyTree], *, differentiable: bool = True
) -> list[PyTree]:
    """Return `params` with every tied leaf equal to the first of its group.

    Args:
      groups: the result of `tied_positions`.
      params: one tree per layer.
      differentiable: whether the gradient of each leaf is the sum over its group. If False, each
        leaf keeps its own gradient, for callers that add up the gradients of stages themselves.
    """
    leaves, treedef = jax.tree.flatten(list(params))
    for group in groups:
        copies = [leaves[i] for i in group]
        if differentiable or any(isinstance(x, Tracer) for x in copies):
            equal: Any = _copy_first(differentiable, copies)
        else:
            equal = [copies[0]] * len(copies)
        for i, leaf in zip(group, equal, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_first(adds_up: bool, copies: list[jax.Array]) -> list[jax.Array]:
    """Return the first copy for each; the gradient of each is its own, or if `adds_up` the sum."""
    return [copies[0]] * len(copies)


def _forward(adds_up: bool, copies: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return _copy_first(adds_up, copies), None


def _backward(adds_up: bool, _: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    if not adds_up:
        return (cotangents,)
    return ([sum(cotangents[1:], start=cotangents[0])] * len(cotangents),)


_copy_first.defvjp(_forward, _backward)


def drop_tied_copies(parts: Sequence[Any], groups: Groups, held: Collection[int]) -> list[Any]:
    """Return the parts of a tree like the parameters as an optimizer sees them.

    Args:
      parts: what stands in the place of each parameter.
      groups: the tied parameters.
      held: positions of the parameters that a device has; the first of each group that it has
        moves to the place of the first of all, and nothing, None, stands for the others.
    """
    parts = list(parts)
    for group in groups:
        if here := [i for i in group if i in held]:
            part = parts[here[0]]
            for i in here:
                parts[i] = None
            parts[group[0]] = part
    return parts


def restore_tied_copies(parts: Sequence[Any], groups: Groups, held: Collection[int]) -> list[Any]:
    """Return what an optimizer gives, with that of a tied parameter in the place of each copy."""
    parts = list(parts)
    for group in groups:
        if here := [i for i in group if i in held]:
            part, parts[group[0]] = parts[group[0]], None
            for i in here:
                parts[i] = part
    return parts


TiedMap = Callable[[Sequence[Any], Groups, Collection[int]], list[Any]]
"""`drop_tied_copies` or `restore_tied_copies`."""


def has_prefix(outer: Any, x: Any) -> bool:
    """Return whether `x` has the structure `outer` of parameters, with any trees as leaves."""
    try:
        outer.flatten_up_to(x)
    except (ValueError, TypeError):
        return False
    return True


def tied_transform(
    groups_of: Callable[[PyTree], Groups], tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that sees each tied parameter of a model without stages once.

    Args:
      groups_of: the tied parameters, from a tree like the parameters.
      tx: the transform.
    """
    inner = optax.with_extra_args_support(tx)

    def map_copies(tree: PyTree, params: PyTree, change: TiedMap) -> PyTree:
        outer, groups = jax.tree.structure(params), groups_of(params)
        held, is_like = range(outer.num_leaves), partial(has_prefix, outer)

        def one(x: Any) -> Any:
            return (
                outer.unflatten(change(outer.flatten_up_to(x), groups, held)) if is_like(x) else x
            )

        return jax.tree.map(one, tree, is_leaf=is_like)

    def init(params: PyTree) -> PyTree:
        return map_copies(
            inner.init(map_copies(params, params, drop_tied_copies)), params, restore_tied_copies
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        like = updates
        if (order := extra.get("ready_order")) is not None:
            extra["ready_order"] = _order_without_copies(order, groups_of(like))
        seen = map_copies((updates, state, params, extra), like, drop_tied_copies)
        updates, state, params, extra = seen
        return map_copies(inner.update(updates, state, params, **extra), like, restore_tied_copies)

    if isinstance(tx, GradientTransform):
        return GradientTransform(init, update, tx.spec, tx.settings)
    return inner._replace(init=init, update=update)


def _order_without_copies(
    order: Callable[[], Sequence[int]], groups: Groups
) -> Callable[[], Sequence[int]]:
    """Return a function for an order of leaves without all but the first copies."""
    later = sorted(i for group in groups for i in group[1:])
    return lambda: tuple(i - sum(j < i for j in later) for i in order() if i not in later)
