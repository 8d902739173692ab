"""Sums over some of the positions along an axis, in which the others have no part."""

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from ..._support.scopes import TIED
from ...collectives import permute
from ...mesh import axis_size, checks_varying, require_axes, vary_over, varying_axes
from ...tree import plan_buffers

_OWNER = "sum_over_holders"


def sum_over_holders(
    leaves: Sequence[jax.Array], holders: Sequence[Sequence[int]], axis_name: str
) -> list[jax.Array]:
    """Each array summed over the positions along an axis that hold one, and over no others.

    Args:
      leaves: this device's arrays, the same number of them, shapes and dtypes on all positions.
      holders: per array the positions that hold one, two or more.
      axis_name: mapped axis, such as `"stage"`.

    Returns:
      On holders the sums, equal to the bit on all of them; elsewhere the arrays as they were.

    Raises:
      ValueError: at trace time: an axis that is not mapped, fewer than two holders, one twice, one
        that is no position; arrays that are typed as equal over the axis.

    Communication: one exchange for each set of holders and dtype, whose arrays are flattened into
      one buffer of N bytes, in their dtype. Two holders: one collective-permute, N bytes each way.
      All positions: one all-reduce. Otherwise 2 (k - 1) collective-permutes of N bytes for k
      holders, one after the other: sums go along the chain of holders to the last one, and from
      there back. Nothing is sent by or to other positions. (XLA has all-reduces of groups, but TPUs
      only run those whose groups are equally large, and jax none where types are checked.) Inside a
      `shard_map` that leaves axes to the compiler each array travels by itself, as it is sharded
      over these: a buffer would be gathered.
    """
    require_axes(_OWNER, "axis_name", axis_name)
    size = axis_size(axis_name)
    known = [_checked(own, size) for own in holders]
    _check_varying(leaves, axis_name)
    groups: dict[Any, list[int]] = {}
    for i, (x, own) in enumerate(zip(leaves, known, strict=True)):
        groups.setdefault((own, x.dtype, *_apart(i)), []).append(i)
    sums = list(leaves)
    with jax.named_scope(TIED):
        for (own, *_), members in groups.items():
            mine = is_one_of(own, axis_name)
            total = _summed([leaves[i] for i in members], own, axis_name)
            for i, x in zip(members, total, strict=True):
                sums[i] = jnp.where(mine, x, leaves[i])
    return sums


def _checked(holders: Sequence[int], size: int) -> tuple[int, ...]:
    own = tuple(sorted(map(operator.index, holders)))
    if len(own) < 2 or len(set(own)) < len(own) or own[0] < 0 or own[-1] >= size:
        raise ValueError(
            f"{_OWNER}: `holders` must be two or more different positions of {size}, counted from "
            f"0, got {tuple(holders)}."
        )
    return own


def _check_varying(leaves: Sequence[jax.Array], axis_name: str) -> None:
    if not checks_varying(axis_name):
        return
    if equal := [i for i, x in enumerate(leaves) if axis_name not in varying_axes(x)]:
        raise ValueError(
            f"{_OWNER}: arrays {equal} are typed as equal over {axis_name!r}, so jax has summed "
            "these gradients over all stages already. Make the parameters varying before "
            'differentiating: `jax.lax.pcast(params, axis_name, to="varying")`, or leave them out.'
        )


def _apart(i: int) -> tuple[int, ...]:
    """What keeps array `i` out of the buffer of others: see `sum_over_holders`."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    is_left = any(kind != AxisType.Manual and size > 1 for kind, size in sizes)
    return (i,) if is_left and mesh.manual_axes else ()


def is_one_of(positions: Sequence[int], axis_name: str) -> jax.Array:
    """() bool: whether this device is at one of these positions along an axis."""
    mask = np.zeros(axis_size(axis_name), bool)
    mask[list(positions)] = True
    return jnp.asarray(mask)[lax.axis_index(axis_name)]


def _summed(leaves: list[jax.Array], holders: tuple[int, ...], axis_name: str) -> list[jax.Array]:
    """The sums on holders; elsewhere anything."""
    total = _exchange(holders, axis_name)
    if len(leaves) == 1:
        return [total(leaves[0])]
    plan = plan_buffers(leaves)
    return plan.unpack([total(flat) for flat in plan.pack(leaves)])


def _exchange(holders: tuple[int, ...], axis_name: str) -> Callable[[jax.Array], jax.Array]:
    if len(holders) == axis_size(axis_name):
        return lambda x: vary_over(lax.psum(x, axis_name), [axis_name])
    if len(holders) == 2:
        one, other = holders
        pair = [(one, other), (other, one)]
        # Addition commutes, also of rounded numbers: both get the same bits.
        return lambda x: x + permute(x, axis_name, pair)
    return lambda x: _along_chain(x, holders, axis_name)


def _along_chain(x: jax.Array, holders: tuple[int, ...], axis_name: str) -> jax.Array:
    for link in pairwise(holders):
        x = x + permute(x, axis_name, [link])
    me = lax.axis_index(axis_name)
    for link in pairwise(holders[::-1]):
        x = jnp.where(me == link[1], permute(x, axis_name, [link]), x)
    return x
