"""Whether something overflowed, on any device that must not take the step alone."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._scopes import LOSS_SCALE
from .._typing import PyTree
from ..mesh import vary_over
from ..tree import cast, kept_if


def is_number(x: Any) -> bool:
    """Whether an array holds what can overflow: row numbers, counters and keys do not."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def overflowed(tree: PyTree) -> jax.Array:
    """() bool: whether something in `tree` is infinite or NaN, on this device.

    Of leaves that the compiler shards it is whether something is anywhere.
    """
    found = [~jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if is_number(x)]
    return functools.reduce(jnp.logical_or, found, jnp.zeros([], bool))


def anywhere(found: jax.Array, axes: Iterable[str], weight: jax.Array | None) -> jax.Array:
    """`found`, () bool, on some device along `axes`.

    Args:
      found: on this device.
      axes: mapped axes; none leaves it as it is.
      weight: () this replica's share. Where some along `axes` have one above 0 those of weight 0,
        whose batch may hold anything, are not asked; where none has, all are.

    Communication: one all-reduce (max) of 4 bytes over `axes`, if there are any.
    """
    names = tuple(sorted(axes))
    if not names:
        return found
    flag = found.astype(jnp.int32)
    if weight is not None:
        # Any replica that counts outbids those that do not; the lowest bit is the answer.
        flag = flag + 2 * (weight > 0).astype(jnp.int32)
    with jax.named_scope(LOSS_SCALE):
        return lax.pmax(vary_over(flag, names), names) % 2 == 1


def zero_if(overflow: jax.Array, tree: PyTree) -> PyTree:
    """`tree` with zeros in place of all its numbers where `overflow`, () bool, is True."""
    keep = ~overflow
    return jax.tree.map(lambda x: kept_if(keep, jnp.asarray(x)) if is_number(x) else x, tree)


def as_before_if(overflow: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`old` where `overflow`, () bool, is True, else `new`, in the dtypes of `new`."""

    def one(n: Any, o: Any) -> jax.Array:
        return jnp.where(overflow, cast(jnp.asarray(o), jnp.asarray(n).dtype), n)

    return jax.tree.map(one, new, old)
