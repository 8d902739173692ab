"""Sums over stages of the gradients of parameters of which several stages hold a copy."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType

from .._support.checks import as_int, records_settings
from .._support.scopes import TIED
from .._support.types import PyTree
from ..collectives import permute
from ..mesh import axis_size, require_axes
from ..transform import GradientTransform, Reduction
from ..tree import leaf_names, plan_buffers, type_text
from ._leaves import check_varying

TiedGroup = Mapping[int, str]
"""One tied parameter: maps each stage with a copy to the copy's leaf name, `"embed/table"`."""
TiedGroups = Sequence[TiedGroup]
"""All tied parameters of a model, one `TiedGroup` for each."""


def checked_groups(owner: str, argument: str, groups: Iterable[TiedGroup]) -> list[dict[int, str]]:
    """Return the groups as dicts in the order of the stages.

    Raises:
      ValueError: an invalid group, one of fewer than two stages, or a leaf on a stage that is in
        two groups.
    """
    checked: list[dict[int, str]] = []
    seen: dict[tuple[int, str], int] = {}
    for number, group in enumerate(groups):
        is_mapping = isinstance(group, Mapping) and all(map(_is_entry, group.items()))
        if not is_mapping or len(group) < 2:
            raise ValueError(
                f"{owner}: groups of `{argument}` must map two stages or more to names of leaves, "
                f'such as {{0: "embed/table", 3: "head/table"}}, got {group!r}.'
            )
        for member in group.items():
            if member in seen:
                stage, name = member
                raise ValueError(
                    f"{owner}: groups of `{argument}` must not overlap, got {name!r} on stage "
                    f"{stage} in groups {seen[member]} and {number}."
                )
            seen[member] = number
        checked.append({int(stage): group[stage] for stage in sorted(group)})
    return checked


def tied_members(
    owner: str, argument: str, groups: Iterable[TiedGroup], tree: PyTree, num_stages: int
) -> list[dict[int, int]]:
    """Return the groups with positions of leaves in `tree`, in flattening order, for names.

    Raises:
      ValueError: a stage or a leaf that does not exist; copies of unequal shapes or dtypes.
    """
    leaves = jax.tree.leaves(tree)
    position = {name: i for i, name in enumerate(leaf_names(tree))}
    members = []
    for group in groups:
        if late := [stage for stage in group if stage >= num_stages]:
            raise ValueError(
                f"{owner}: `{argument}` must name stages below {num_stages}, got {late}."
            )
        if unknown := sorted(set(group.values()) - set(position)):
            raise ValueError(
                f"{owner}: `{argument}` must name leaves of {list(position)}, got {unknown}."
            )
        kinds = {name: type_text(leaves[position[name]]) for name in group.values()}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"{owner}: copies in `{argument}` must have equal shapes and dtypes, got "
                f"{', '.join(f'{name} {kind}' for name, kind in kinds.items())}."
            )
        members.append({stage: position[name] for stage, name in group.items()})
    return members


def _is_entry(item: tuple[Any, Any]) -> bool:
    stage, name = item
    return as_int(stage, 0) is not None and isinstance(name, str)


def sum_over_holders(
    leaves: Sequence[jax.Array], holders: Sequence[Sequence[int]], axis_name: str
) -> list[jax.Array]:
    """Sum each array over the positions along an axis that hold one, and over no others.

    Args:
      leaves: this device's arrays; number, shapes and dtypes are equal on all positions.
      holders: two or more positions that hold a copy, in rising order, one sequence per array.
      axis_name: mapped axis, such as `"stage"`.

    Returns:
      On holders the sums, bitwise equal on all of them; elsewhere the arrays as they were.

    Communication: one exchange for each set of holders and dtype, whose arrays are flattened into
      one buffer of N bytes, in their dtype. Two holders: one collective-permute, N bytes each way.
      All positions: one all-reduce. Otherwise 2 (k - 1) collective-permutes of N bytes for k
      holders, one after the other: sums go along the chain of holders to the last one, and from
      there back. Other positions send and receive nothing. (XLA has all-reduces of groups, but TPUs
      only run groups of equal size, and jax does not allow them where types are checked.) Inside a
      `shard_map` that leaves axes to the compiler each array is sent by itself, as it is sharded
      over these: a buffer would be gathered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    has_automatic = any(kind != AxisType.Manual and size > 1 for kind, size in axes)
    is_alone = has_automatic and bool(mesh.manual_axes)  # a buffer would be gathered
    groups: dict[Any, list[int]] = {}
    for i, (x, positions) in enumerate(zip(leaves, holders, strict=True)):
        groups.setdefault((tuple(positions), x.dtype, is_alone and i), []).append(i)
    sums = list(leaves)
    with jax.named_scope(TIED):
        for (positions, *_), members in groups.items():
            is_holder = is_one_of(positions, axis_name)
            copies = [leaves[i] for i in members]
            total = partial(_sum_copies, positions, axis_name)
            if len(members) == 1:
                totals = [total(copies[0])]
            else:
                plan = plan_buffers(copies)
                totals = plan.unpack([total(flat) for flat in plan.pack(copies)])
            for i, x in zip(members, totals, strict=True):
                sums[i] = jnp.where(is_holder, x, leaves[i])
    return sums


def is_one_of(positions: Sequence[int], axis_name: str) -> jax.Array:
    """Return whether this device is at one of these positions along an axis, () bool."""
    mask = np.zeros(axis_size(axis_name), bool)
    mask[list(positions)] = True
    return jnp.asarray(mask)[lax.axis_index(axis_name)]


def _sum_copies(holders: tuple[int, ...], axis_name: str, x: jax.Array) -> jax.Array:
    """Return the sum over the holders, valid on these only."""
    if len(holders) == axis_size(axis_name):
        return lax.psum(x, axis_name)
    if len(holders) == 2:
        # Floating-point addition commutes: both holders get the same bits.
        one, other = holders
        return x + permute(x, axis_name, [(one, other), (other, one)])
    for link in pairwise(holders):
        x = x + permute(x, axis_name, [link])
    position = lax.axis_index(axis_name)
    for link in pairwise(holders[::-1]):
        x = jnp.where(position == link[1], permute(x, axis_name, [link]), x)
    return x


_OWNER = "sum_tied_gradients"


@records_settings
def sum_tied_gradients(axis_name: str, groups: TiedGroups) -> GradientTransform:
    """Sum the gradients of each tied parameter over the stages that hold a copy of it.

        tx = js.chain(
            js.pipeline.sum_tied_gradients("stage", [{0: "embed/table", 3: "head/table"}]),
            optax.adamw(1e-3),
        )

    It is for your own loops under a `shard_map` over the stages, in which the tree has the same
    leaves on all stages, and each device holds its stage's values (zeros where the stage has none).
    The sums are bitwise equal on all holders. Copies that begin equal then stay bitwise equal where
    they are the same leaf; in different leaves of one program the compiler may round the same
    optimizer differently (in Adam on CPU sometimes by 1 ulp). Nothing is divided: a parameter that
    is used twice has the sum of two gradients.

    Args:
      axis_name: mapped axis of the stages.
      groups: one mapping per shared parameter, from a stage, counted from 0, to the name of the
        leaf that holds its copy, as in `jax.tree_util.keystr(path, simple=True, separator="/")`.
        `{0: "table", 3: "table"}` if it is the same leaf on both stages.

    Returns:
      A gradient transform without state. It may come before or after `js.all_reduce_gradients` over
      replicas; put it before `js.clip_by_global_norm`, which needs the same groups.

    Raises:
      ValueError: at construction: an invalid group, a group of one stage, a leaf on a
        stage in two groups. At trace time: an axis that is not mapped, stages that do not exist,
        names of no leaf, copies of unequal shapes or dtypes, gradients that are typed as equal over
        the axis (jax has summed those).

    Communication: one exchange over `axis_name` for each set of stages and dtype, between these
      stages alone. Two stages: one collective-permute of the gradients' bytes each way; all stages:
      one all-reduce; otherwise 2 (k - 1) collective-permutes, one after the other, for k stages.

    Source: ColossalAI (commit 96780e6), `PipelineSharedModuleGradientHandler`.
    """
    if not isinstance(axis_name, str):
        raise ValueError(f"{_OWNER}: `axis_name` must be one name, got {axis_name!r}.")
    checked = checked_groups(_OWNER, "groups", groups)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        require_axes(_OWNER, "axis_name", axis_name)
        if not jax.tree.leaves(updates):  # optax calls some transforms with an empty tree
            return updates, state
        tied = tied_members(_OWNER, "groups", checked, updates, axis_size(axis_name))
        leaves, treedef = jax.tree.flatten(updates)
        members = {i for group in tied for i in group.values()}
        named = enumerate(zip(leaf_names(updates), leaves, strict=True))
        check_varying(_OWNER, dict(pair for i, pair in named if i in members), axis_name)
        copies = [_stage_copy(leaves, group, axis_name) for group in tied]
        sums = sum_over_holders(copies, [tuple(group) for group in tied], axis_name)
        for group, total in zip(tied, sums, strict=True):
            for position, stages in _stages_by_leaf(group).items():
                is_holder = is_one_of(stages, axis_name)
                leaves[position] = jnp.where(is_holder, total, leaves[position])
        return treedef.unflatten(leaves), state

    return GradientTransform(optax.init_empty_state, update_fn, Reduction(axes=(axis_name,)))


def _stage_copy(leaves: list[jax.Array], group: dict[int, int], axis_name: str) -> jax.Array:
    """Return this stage's copy; on stages without one any leaf that is a copy elsewhere."""
    (first, _), *others = _stages_by_leaf(group).items()
    copy = leaves[first]
    for position, stages in others:
        copy = jnp.where(is_one_of(stages, axis_name), leaves[position], copy)
    return copy


def _stages_by_leaf(group: dict[int, int]) -> dict[int, list[int]]:
    """Return the stages of a group by the position of the leaf that they hold."""
    stages_of: dict[int, list[int]] = {}
    for stage, position in group.items():
        stages_of.setdefault(position, []).append(stage)
    return stages_of
