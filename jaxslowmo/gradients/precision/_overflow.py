"""Whether something overflowed, on any device that must not take the step alone."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.scopes import LOSS_SCALE
from ..._support.types import PyTree
from ...mesh import vary_over
from ...transform import remembered
from ...tree import all_finite, cast, kept_if

Update = Callable[..., tuple[PyTree, PyTree]]


def is_number(x: Any) -> bool:
    """Whether an array holds what can overflow: row numbers, counters and keys do not."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def overflowed(tree: PyTree) -> jax.Array:
    """() bool: whether something in `tree` is infinite or NaN, on this device.

    Of leaves that the compiler shards it is whether something is anywhere.
    """
    return ~all_finite(tree)


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


def unless_overflow(update: Update, axes: Iterable[str], weight: jax.Array | None) -> Update:
    """`update(grads, state, params)` that keeps overflows out of what it remembers and sends.

    A hook that feeds back what it did not send would never be rid of a NaN. Where one of those
    along `axes` has an overflow all get NaN for the mean, which is what makes a loss scale skip;
    counters in the state count on, and what the state holds of gradients is as before.

    Args:
      update: of a gradient transform.
      axes: over which it reduces.
      weight: see `anywhere`.

    Communication: that of `update`, and where its state holds numbers that of `anywhere`.
    """

    def guarded(grads: PyTree, state: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        if not any(map(is_number, remembered(state))):
            return update(grads, state, *rest)
        overflow = anywhere(overflowed(grads), axes, weight)
        means, after = update(zero_if(overflow, grads), state, *rest)
        after = jax.tree.map(
            lambda n, o: jnp.where(overflow, o, n) if is_number(n) else n, after, state
        )
        means = jax.tree.map(
            lambda g: jnp.where(overflow, jnp.nan, g) if is_number(g) else g, means
        )
        return means, after

    return guarded
