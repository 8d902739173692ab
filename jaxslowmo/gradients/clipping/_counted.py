"""Which device counts which leaf, so that each parameter is in a norm once."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import axes_of, axis_names, axis_size, checks_varying, specs_of_leaves
from ...transform import check_are_specs
from ...tree import leaf_names
from ..sparse import WithRows, is_row_gradient
from ..tied import TiedGroup, tied_members

OWNER = "clip_by_global_norm"


@dataclass(frozen=True)
class Counting:
    """How the devices of a model share its parameters.

    Attributes:
      axes: mapped axes between whose devices it is shared.
      param_specs: which leaves are sharded over which of them; None: the types tell.
      tied: groups of copies, by stage.
      tied_axis: axis of the stages.
    """

    axes: tuple[str, ...]
    param_specs: PyTree | None
    tied: Sequence[TiedGroup]
    tied_axis: str

    def beside_rows(self, tree: PyTree) -> "Counting":
        """The same for gradients with rows of tables beside them, which devices may share, too."""
        if not isinstance(tree, WithRows):
            return self
        shared = [a for a in tree.inner_axes if a in axes_of(tree.rows) and a not in self.axes]
        return replace(self, axes=(*self.axes, *shared))

    def shares(self, tree: PyTree) -> list[jax.Array | None]:
        """By leaf whether this device counts it, () bool; None where all do.

        Raises:
          ValueError: nothing tells which leaves are sharded, specs that do not fit, groups that
            do not.
        """
        leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
        first = {axis: lax.axis_index(axis) == 0 for axis in self.axes if axis_size(axis) > 1}
        equal = [tuple(a for a in first if a not in own) for own in self._sharded(tree, leaves)]
        later = self._later_copies(tree)
        found: dict[Any, jax.Array | None] = {}
        keys = [(axes, later.get(i, ())) for i, axes in enumerate(equal)]
        for key in dict.fromkeys(keys):
            axes, stages = key
            conditions = [first[a] for a in axes]
            if stages and self.tied_axis not in axes:
                me = lax.axis_index(self.tied_axis)
                conditions.append(~jnp.isin(me, jnp.asarray(stages)))
            found[key] = functools.reduce(jnp.logical_and, conditions) if conditions else None
        return [found[key] for key in keys]

    def _sharded(self, tree: PyTree, leaves: list[Any]) -> list[frozenset[str]]:
        """By leaf the axes over which its parts, or what stages have in it, differ."""
        axes = frozenset(a for a in self.axes if axis_size(a) > 1)
        tracked = frozenset(filter(checks_varying, axes))
        typed = [axes_of(leaf) & tracked for leaf in leaves]
        if self.param_specs is None:
            if unknown := sorted(axes - tracked):
                raise ValueError(
                    f"{OWNER}: nothing tells which leaves are sharded over {unknown}: types do "
                    "under shard_map(check_vma=True) alone. Pass `param_specs`, one PartitionSpec "
                    "per leaf (P() for leaves that all devices have whole)."
                )
            return typed
        named = [_named(spec) & axes for spec in self._specs(tree)]
        wrong = [
            f"{name} (over {sorted((own & tracked) - types)})"
            for name, own, types in zip(leaf_names(_one_leaf_each(tree)), named, typed, strict=True)
            if (own & tracked) - types
        ]
        if wrong:
            raise ValueError(
                f"{OWNER}: `param_specs` shard leaves that are typed as equal over these axes: "
                f"{', '.join(wrong)}."
            )
        return named

    def _specs(self, tree: PyTree) -> list[P]:
        if isinstance(tree, WithRows):
            own = P(tuple(sorted(axes_of(tree.rows) & set(tree.inner_axes))))
            return [*self._specs(tree.dense), *[own] * len(tree.rows)]
        try:
            return list(specs_of_leaves(self.param_specs, _one_leaf_each(tree)))
        except ValueError as error:
            raise ValueError(
                f"{OWNER}: `param_specs` must be a tree of PartitionSpec with the structure of the "
                f"gradients, or a prefix of it: {error}"
            ) from None

    def _later_copies(self, tree: PyTree) -> dict[int, tuple[int, ...]]:
        """By position of a leaf the stages on which it is a copy that an earlier stage counts."""
        found: dict[int, tuple[int, ...]] = {}
        if not self.tied:
            return found
        dense = tree.dense if isinstance(tree, WithRows) else tree
        whole, size = _one_leaf_each(dense), axis_size(self.tied_axis)
        for group in tied_members(OWNER, "tied", self.tied, whole, size):
            for stage, position in list(group.items())[1:]:
                found[position] = (*found.get(position, ()), stage)
        return found


def check_specs(param_specs: PyTree | None, axes: tuple[str, ...]) -> None:
    """Raise `ValueError` for what is no tree of specs, or says nothing about any of the axes."""
    if param_specs is None:
        return
    check_are_specs(OWNER, param_specs)
    if not axes:
        raise ValueError(
            f"{OWNER}: `param_specs` say what is sharded over `model_axes`, and none are given: "
            "what the compiler shards is in the norm already."
        )


def _named(spec: P) -> frozenset[str]:
    return frozenset(name for entry in spec for name in axis_names(entry or ()))


def _one_leaf_each(tree: PyTree) -> PyTree:
    """`tree` with the values of gradients of rows in their place."""
    return jax.tree.map(
        lambda x: x.values if is_row_gradient(x) else x, tree, is_leaf=is_row_gradient
    )
