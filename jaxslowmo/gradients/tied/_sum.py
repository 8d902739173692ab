"""Gradients of parameters that several stages share, as a transform."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._support.types import PyTree
from ...mesh import axis_size, require_axes
from ...transform import GradientSpec, GradientTransform
from ._groups import TiedGroups, checked_groups, tied_members
from ._holders import is_one_of, sum_over_holders

_OWNER = "sum_tied_gradients"


def sum_tied_gradients(axis_name: str, groups: TiedGroups) -> GradientTransform:
    """Sums the gradients of a parameter of which several stages hold a copy, over these stages.

        tx = js.chain(
            js.pipeline.sum_tied_gradients("stage", [{0: "embed/table", 3: "head/table"}]),
            optax.adamw(1e-3),
        )

    For loops of your own under a `shard_map` over the stages, in which the tree has the same leaves
    on all of them, and each device holds what its stage has there (zeros where it has nothing).
    The sums are equal to the bit on all holders. Copies that begin equal then stay equal to the bit
    where they are the same leaf; in different leaves of one program the compiler may round the same
    optimizer differently (in Adam on CPU by 1 ulp now and then). Nothing is divided: a parameter
    that is used twice has the sum of two gradients.

    Args:
      axis_name: mapped axis of the stages.
      groups: one mapping per shared parameter: by stage, counted from 0, the name of the leaf that
        holds this stage's copy, as `jax.tree_util.keystr(path, simple=True, separator="/")` has
        it. `{0: "table", 3: "table"}` where it is the same leaf on both.

    Returns:
      A gradient transform without state. Where it stands beside `js.all_reduce_gradients` over
      replicas does not matter; before `js.clip_by_global_norm`, which is told the same groups.

    Raises:
      ValueError: at construction: something that is no group, a group of one stage, a leaf on a
        stage in two groups. At trace time: an axis that is not mapped, stages that do not exist,
        names of no leaf, copies of unequal shapes or dtypes, gradients that are typed as equal over
        the axis (jax has summed those).

    Communication: one exchange over `axis_name` for each set of stages and dtype, between these
      stages alone. Of two: one collective-permute of the gradients' bytes each way; of all: one
      all-reduce; otherwise 2 (k - 1) collective-permutes, one after the other, for k stages.

    Source: ColossalAI (commit 96780e6), `PipelineSharedModuleGradientHandler`.
    """
    if not isinstance(axis_name, str):
        raise ValueError(f"{_OWNER}: `axis_name` must be one name, got {axis_name!r}.")
    known = checked_groups(_OWNER, "groups", groups)

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        require_axes(_OWNER, "axis_name", axis_name)
        if not jax.tree.leaves(updates):  # optax asks some transforms with an empty tree
            return updates, state
        tied = tied_members(_OWNER, "groups", known, updates, axis_size(axis_name))
        leaves, treedef = jax.tree.flatten(updates)
        own = [_of_stage(leaves, group, axis_name) for group in tied]
        sums = sum_over_holders(own, [tuple(group) for group in tied], axis_name)
        for group, total in zip(tied, sums, strict=True):
            for position, stages in _by_leaf(group).items():
                mine = is_one_of(stages, axis_name)
                leaves[position] = jnp.where(mine, total, leaves[position])
        return treedef.unflatten(leaves), state

    return GradientTransform(init_fn, update_fn, GradientSpec(axes=(axis_name,)))


def _of_stage(leaves: list[jax.Array], group: dict[int, int], axis_name: str) -> jax.Array:
    """This stage's copy; on stages without one any leaf that is a copy elsewhere."""
    (first, _), *others = _by_leaf(group).items()
    found = leaves[first]
    for position, stages in others:
        found = jnp.where(is_one_of(stages, axis_name), leaves[position], found)
    return found


def _by_leaf(group: dict[int, int]) -> dict[int, list[int]]:
    """The stages of a group by the position of the leaf that they hold."""
    found: dict[int, list[int]] = {}
    for stage, position in group.items():
        found.setdefault(position, []).append(stage)
    return found
