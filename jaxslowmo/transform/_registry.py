"""What a state tells of its owners: which of them exchange, and their order in a chain."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import optax

from .._support.types import PyTree

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


class NoExchangeState(NamedTuple):
    """State of `no_exchange`: unlike `optax.EmptyState`, which steps of optimizers have, too."""


def no_exchange() -> optax.GradientTransformation:
    """What stands in the place of a parameter transform where there is none."""
    return optax.GradientTransformation(
        lambda params: NoExchangeState(), lambda updates, state, params=None: (updates, state)
    )


def check_order(owner: str, state: PyTree) -> None:
    """Raise `ValueError` for a chain in which something follows a parameter transform.

    A parameter transform returns the update that lands on the new parameters. What comes after
    would take that for a step of the optimizer, such as a rate by which to scale it.

    Args:
      owner: who was given the chain, for the message.
      state: of any optax transform. Chains are looked at wherever they are in it.
    """
    for chain in filter(_is_chain, jax.tree.leaves(state, is_leaf=_is_chain)):
        members = [x for x in _members(chain) if not isinstance(x[1], NoExchangeState)]
        moves = [holds_state(member, "parameters") for _, member in members]
        if moves != sorted(moves):
            first = moves.index(True)
            before, late = members[first], members[moves.index(False, first)]
            raise ValueError(
                f"{owner}: `tx` is a chain in which something follows a parameter transform, "
                f"which must come last: after {before[0]}, {type(before[1]).__name__}, stands "
                f"{late[0]}, {type(late[1]).__name__}. What it does to an update would be done to "
                "the way to the synchronised parameters, and replicas would drift apart: put it "
                "before."
            )
        for _, member in members:
            check_order(owner, member)


def _is_chain(x: PyTree) -> bool:
    return type(x) is tuple or isinstance(x, OrderedDict)  # `optax.chain`, `optax.named_chain`


def _members(chain: PyTree, name: str = "") -> Iterator[tuple[str, PyTree]]:
    """The states of a chain, and of chains in it, as their transforms run, and where they stand."""
    for key, x in chain.items() if isinstance(chain, OrderedDict) else enumerate(chain):
        where = f"{name}[{key!r}]"
        yield from _members(x, where) if _is_chain(x) else [(where, x)]
