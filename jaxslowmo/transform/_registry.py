"""Which states belong to transforms that exchange: what a state in a chain tells of its owner."""

from typing import Any, Literal, TypeVar

import jax

from .._typing import PyTree

Moves = Literal["gradients", "parameters"]
_Class = TypeVar("_Class", bound=type)

# What the owner of a state class exchanges, and whether the state can be moved to other replicas
# by its owner alone (`CheckpointSpec.carry`).
_OWNERS: dict[type, tuple[Moves, bool]] = {}
_PASSING: set[type] = set()


def register_state(kind: type, moves: Moves, *, needs_owner: bool = False) -> None:
    """Take note of the state class of a transform that exchanges.

    Args:
      kind: a class of its own, which no other transform uses.
      moves: what its transform exchanges.
      needs_owner: whether it can't be moved to other replicas leaf by leaf. A class for which some
        can (`js.only_finite` around this or that) does not by itself.
    """
    _, before = _OWNERS.get(kind, (moves, True))
    _OWNERS[kind] = moves, needs_owner and before


def gradient_state(kind: _Class) -> _Class:
    """Decorator of the state class of a transform that exchanges gradients."""
    register_state(kind, "gradients")
    return kind


def passing_state(kind: _Class) -> _Class:
    """Decorator of a state class that tells of the last update, and of which none depends."""
    _PASSING.add(kind)
    return kind


def remembered(state: PyTree) -> list[Any]:
    """The leaves of a state on which later updates may depend."""

    def is_passing(x: Any) -> bool:
        return type(x) in _PASSING

    return [x for x in jax.tree.leaves(state, is_leaf=is_passing) if not is_passing(x)]


def learn_state(state: PyTree, *, needs_owner: bool) -> None:
    """Register the class of a state that its parameter transform did not name.

    Only a class of its own tells anything: a NamedTuple with a `count` that neither optax has made
    nor a gradient transform, around which the other one may be.
    """
    kind = type(state)
    is_own = "count" in getattr(kind, "_fields", ()) and kind.__module__.split(".")[0] != "optax"
    if is_own and _OWNERS.get(kind, ("parameters",))[0] == "parameters":
        register_state(kind, "parameters", needs_owner=needs_owner)


def holds_state(tree: PyTree, moves: Moves, *, needs_owner: bool = False) -> bool:
    """Whether a state of a transform that exchanges such is in `tree`, wrapped or not.

    Args:
      tree: a state of optax transforms, of any depth.
      moves: what the transform exchanges.
      needs_owner: ask only for states that can't be moved to other replicas without it.
    """

    def is_one(x: Any) -> bool:
        known = _OWNERS.get(type(x))
        return known is not None and known[0] == moves and (known[1] or not needs_owner)

    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))
