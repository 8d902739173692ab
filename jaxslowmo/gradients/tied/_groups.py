"""Which leaves on which stages are one parameter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._support.types import PyTree
from ...tree import leaf_names

TiedGroup = Mapping[int, str]
"""By stage the name of the leaf that holds this stage's copy, such as `"embed/table"`."""
TiedGroups = Sequence[TiedGroup]
"""The groups of tied leaves, one for each parameter that several stages hold a copy of."""


def checked_groups(owner: str, argument: str, groups: Iterable[TiedGroup]) -> list[dict[int, str]]:
    """Groups as dicts in the order of the stages.

    Raises:
      ValueError: something that is no group, one of fewer than two stages, or a leaf on a stage
        that is in two groups.
    """
    if isinstance(groups, Mapping | str) or not isinstance(groups, Iterable):
        raise ValueError(
            f"{owner}: `{argument}` must be a list of groups such as "
            f'[{{0: "embed/table", 3: "head/table"}}], got {groups!r}.'
        )
    found: list[dict[int, str]] = []
    seen: dict[tuple[int, str], int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not all(map(_is_entry, group.items())):
            raise ValueError(
                f"{owner}: each group of `{argument}` must map stages, ints >= 0, to names of "
                f'leaves, such as {{0: "embed/table", 3: "head/table"}}, got {group!r}.'
            )
        if len(group) < 2:
            raise ValueError(
                f"{owner}: a group of `{argument}` must have two stages or more that hold a copy, "
                f"got {dict(group)}."
            )
        for member in group.items():
            if member in seen:
                stage, name = member
                raise ValueError(
                    f"{owner}: groups of `{argument}` must not overlap, got {name!r} on stage "
                    f"{stage} in group {seen[member]} and in group {number}: make one of them."
                )
            seen[member] = number
        found.append({int(stage): group[stage] for stage in sorted(group)})
    return found


def tied_members(
    owner: str, argument: str, groups: Iterable[TiedGroup], tree: PyTree, num_stages: int
) -> list[dict[int, int]]:
    """The groups with positions of leaves in `tree`, in flattening order, in place of names.

    Raises:
      ValueError: a stage or a leaf that does not exist; copies of unequal shapes or dtypes.
    """
    leaves = jax.tree.leaves(tree)
    position = {name: i for i, name in enumerate(leaf_names(tree))}
    found = []
    for group in groups:
        if late := [stage for stage in group if stage >= num_stages]:
            raise ValueError(
                f"{owner}: `{argument}` names stages {late} in {dict(group)}, of {num_stages} "
                "stages counted from 0."
            )
        if unknown := sorted(set(group.values()) - set(position)):
            raise ValueError(
                f"{owner}: `{argument}` names leaves {unknown} that are not among {list(position)}."
            )
        kinds = {name: _kind(leaves[position[name]]) for name in group.values()}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"{owner}: copies of one parameter must have equal shapes and dtypes, got "
                f"{', '.join(f'{name} {kind}' for name, kind in kinds.items())} in `{argument}`."
            )
        found.append({stage: position[name] for stage, name in group.items()})
    return found


def _is_entry(item: tuple[Any, Any]) -> bool:
    stage, name = item
    is_int = isinstance(stage, int | np.integer) and not isinstance(stage, bool)
    return is_int and int(stage) >= 0 and isinstance(name, str)


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
