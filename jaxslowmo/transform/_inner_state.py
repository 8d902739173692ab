"""Moments in the state of the inner optimizer, which an exchange may reset or average.

An algorithm sees parameters alone. So its caller gives it a mark after the other arrays, False,
which it returns as True if its exchange took place, and then changes the optimizer's state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from .._support.types import PyTree
from ..tree import apply_exactly
from ._checks import check_weight
from ._due import phase_scope, run_if
from ._replica_exchange import replica_mean
from ._sync import Others, Sync, inner_changer


class Mark(NamedTuple):
    """A note that an exchange changes the state of the inner optimizer.

    Attributes:
      layer: the algorithm that changes it.
      is_due: whether its exchange took place: a bool, or a () bool array equal on all replicas.
      weight: () float32, this replica's share in means; None weighs all equally.
      axes: names of the axes over which programs communicate.
    """

    layer: Sync
    is_due: Any
    weight: jax.Array | None
    axes: tuple[str, ...]


def exchange_marked(
    sync: Any, updates: PyTree, others: Others, *args: Any, **extra: Any
) -> tuple[PyTree, Others, PyTree, Mark | None]:
    """Return the results of `sync.exchange`, and its mark; None if it keeps all moments."""
    layer = inner_changer(sync.sync)
    if layer is None:
        return *sync.exchange(updates, others, *args, **extra), None
    updates, (*others, is_due), state = sync.exchange(updates, [*others, False], *args, **extra)
    weight = check_weight(layer.owner, extra.get("weight"))
    return updates, others, state, Mark(layer, is_due, weight, sync.bound_axes)


def after_exchange(
    mark: Mark | None,
    init: Callable[[PyTree], PyTree],
    state: PyTree,
    params: PyTree,
    updates: PyTree,
    param_specs: PyTree | None = None,
) -> PyTree:
    """Return the state of an optimizer after an exchange, its moments kept, reset or averaged.

    Moments are the trees like the parameters. "reset" makes them those of `init`, and with them the
    arrays beside them in the same state, such as the counter of Adam's bias correction. "average"
    makes them, and floating arrays beside them, their means. States without moments, such as those
    of schedules, go on, and so does what a transform around others keeps, such as the sum of
    gradients of optax.MultiSteps.

    Args:
      mark: that of the exchange; None keeps the moments.
      init: the optimizer's `init`.
      state: the optimizer's state of this replica.
      params: the parameters before the update.
      updates: the updates that the exchange returned.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica; None: those of
        the exchange.

    Raises:
      ValueError: arrays in states without moments.

    Communication: with "average" one all-reduce of the bytes of the moments over the axes of the
      exchange, if it took place.
    """
    if mark is None:
        return state
    layer, is_moment = mark.layer, _like(params)
    places, treedef = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: is_moment(x) or isinstance(x, optax.EmptyState)
    )
    nodes = {path[:-1] for path, x in places if is_moment(x)}
    # Sums of gradients and copies of parameters, of a state that holds those of other transforms.
    around = {node for node in nodes if any(_is_inside(node, path, x) for path, x in places)}
    chosen = [i for i, (path, _) in enumerate(places) if path[:-1] in nodes - around]
    for path, x in places:
        if path[:-1] not in nodes and np.ndim(x) and _is_floating(x):
            raise ValueError(
                f"{layer.owner}: `inner_state`={layer.inner_state!r} changes what an optimizer "
                f"keeps in trees like the parameters, and this one has {x.dtype}{list(x.shape)} in "
                'another form: leave out what brings it there, or use inner_state="keep".'
            )

    def reset(state: PyTree) -> PyTree:
        fresh = init(apply_exactly(params, updates))
        parts, new = map(treedef.flatten_up_to, (state, fresh))
        for i in chosen:
            parts[i] = new[i]
        return treedef.unflatten(parts)

    def averaged(state: PyTree) -> PyTree:
        parts, over = treedef.flatten_up_to(state), layer.groups[-1]
        floating = [i for i in chosen if _is_floating(parts[i])]
        trees, specs = [parts[i] for i in floating], param_specs or over.param_specs
        if specs is not None:
            specs = [_specs(x, params, specs) if is_moment(x) else P() for x in trees]
        # A codec is for parameters: the smallest second moments would become 0 in float16.
        over = replace(over, codec=None, param_specs=specs)
        with phase_scope(layer.events()[-1].name):
            means = replica_mean(trees, over, mark.weight)
        for i, mean in zip(floating, means, strict=True):
            parts[i] = mean
        return treedef.unflatten(parts)

    change = reset if layer.inner_state == "reset" else averaged
    return run_if(mark.is_due, change, lambda state: state, state, axes=mark.axes)


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
