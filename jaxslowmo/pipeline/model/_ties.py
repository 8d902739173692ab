"""Tied leaves: leaves of several layers that are one parameter."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..._support.types import PyTree
from ...tree import leaf_names

TiedLeaf = tuple[int, str]
"""A layer, and the path of a leaf in its parameters, such as `"dense/kernel"`."""

Ties = tuple[tuple[TiedLeaf, ...], ...]


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
    is_pair = isinstance(leaf, tuple | list) and len(leaf) == 2
    if not is_pair or not isinstance(leaf[0], int) or not isinstance(leaf[1], str):
        raise ValueError(
            '`tied` must hold groups of (layer, path) such as ((0, "table"), (9, "table")), got '
            f"{leaf!r}."
        )
    if not 0 <= leaf[0] < num_layers:
        raise ValueError(f"`tied` names layer {leaf[0]}; the model has {num_layers} layers.")
    return leaf[0], leaf[1]


def check_ties(ties: Ties, params: Sequence[PyTree]) -> None:
    """Raise `ValueError` for tied leaves that `params` lacks, or whose shapes or dtypes differ."""
    for group in ties:
        types = []
        for layer, path in group:
            named = dict(
                zip(leaf_names(params[layer]), jax.tree.leaves(params[layer]), strict=True)
            )
            if path not in named:
                has = ", ".join(named) or "no leaves"
                raise ValueError(f"`tied` names {path!r} of layer {layer}, which has {has}.")
            types.append((jnp.shape(named[path]), jnp.result_type(named[path])))
        if len(set(types)) > 1:
            kinds = ", ".join(
                f"{path!r} of layer {layer} is {dtype}{list(shape)}"
                for (layer, path), (shape, dtype) in zip(group, types, strict=True)
            )
            raise ValueError(f"`tied` leaves must have equal shapes and dtypes: {kinds}.")


def as_one(ties: Ties, params: Sequence[PyTree], *, differentiable: bool = True) -> list[PyTree]:
    """Return `params` with every tied leaf equal to the first of its group.

    Args:
      ties: the groups of tied leaves of the model.
      params: one tree per layer.
      differentiable: whether the gradient of each leaf is the sum over its group. If False, each
        leaf keeps its own gradient, for callers that add up the gradients of stages themselves.
    """
    if not ties:
        return list(params)
    split = [jax.tree.flatten(layer) for layer in params]
    leaves = [list(of_layer) for of_layer, _ in split]
    places = [{name: i for i, name in enumerate(leaf_names(layer))} for layer in params]
    for group in ties:
        spots = [(layer, places[layer][path]) for layer, path in group]
        copies = [leaves[layer][i] for layer, i in spots]
        if differentiable or any(isinstance(x, Tracer) for x in copies):
            equal: Any = _first_of(differentiable, copies)
        else:
            equal = [copies[0]] * len(copies)
        for (layer, i), leaf in zip(spots, equal, strict=True):
            leaves[layer][i] = leaf
    pairs = zip(leaves, split, strict=True)
    return [treedef.unflatten(of_layer) for of_layer, (_, treedef) in pairs]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first_of(adds_up: bool, copies: list[jax.Array]) -> list[jax.Array]:
    """Return the first copy for each; the gradient of each is its own, or if `adds_up` the sum."""
    return [copies[0]] * len(copies)


def _forward(adds_up: bool, copies: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return _first_of(adds_up, copies), None


def _backward(adds_up: bool, _: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    if not adds_up:
        return (cotangents,)
    return ([sum(cotangents[1:], start=cotangents[0])] * len(cotangents),)


_first_of.defvjp(_forward, _backward)
