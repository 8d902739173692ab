"""The classes of states, by which chains and checkpoints know what a state is of."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
import typing
from typing import Any, Literal, Self, TypeVar

import jax
import optax

from .._support.settings import Settings
from .._support.types import PyTree
from .._support.varying import tracks_types, varying_axes
from ..mesh import match_varying, vary_over


class TypedTransform(optax.GradientTransformationExtraArgs):
    """An optax transform whose state keeps its types of varying axes from update to update.

    Values have such types in a `jax.shard_map` with its default check, `check_vma=True`: in loops
    of users, not in a training step. A state that is made there varies over the axes that all
    parameters vary over, and each update returns it typed as it was, so that it can be carried by a
    loop or leave the `shard_map` as it came in. Results of means stay typed as equal. Elsewhere
    both functions are called as they are.
    """

    def __new__(cls, init: Callable[[PyTree], PyTree], update: Callable[..., Any]) -> Self:
        """Make the transform of two functions, which need not care for these types."""

        @functools.wraps(init)
        def typed_init(params: PyTree) -> PyTree:
            state = init(params)
            axes = [varying_axes(x) for x in jax.tree.leaves(params)] if tracks_types() else []
            return vary_over(state, frozenset.intersection(*axes)) if axes else state

        @functools.wraps(update)
        def typed_update(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
        ) -> tuple[PyTree, PyTree]:
            updates, after = update(updates, state, params, **extra)
            return updates, match_varying(after, state) if tracks_types() else after

        return super().__new__(cls, typing.cast("optax.TransformInitFn", typed_init), typed_update)


class WithSpec(TypedTransform):
    """An optax transform that holds more than its two functions, which copies keep.

    Attributes:
      settings: the factory of this package that made it, and its arguments; None for other ones.
    """

    settings: Settings | None = None

    # `copy` makes a tuple from its items, without other attributes. Copies of any depth share
    # functions, so a transform is its own copy.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


Moves = Literal["gradients", "parameters"]
_Class = TypeVar("_Class", bound=type)

# Maps the class of a state to what its transform exchanges, and to whether only that transform can
# convert the state for other replicas.
_OWNERS: dict[type, tuple[Moves, bool]] = {}
_TRANSIENT: set[type] = set()


def register_state(kind: type, moves: Moves, *, needs_owner: bool = False) -> None:
    """Register the state class of a transform that exchanges.

    Args:
      kind: the class, which only this kind of transform uses.
      moves: what its transform exchanges.
      needs_owner: whether the state cannot be converted leaf by leaf for other replicas.
    """
    _OWNERS[kind] = moves, needs_owner


def gradient_state(kind: _Class) -> _Class:
    """Register the decorated state class of a transform that exchanges gradients."""
    register_state(kind, "gradients")
    return kind


def transient_state(kind: _Class) -> _Class:
    """Register the decorated state class: it describes the last update, and no update reads it."""
    _TRANSIENT.add(kind)
    return kind


def persistent_leaves(state: PyTree) -> list[Any]:
    """Return the leaves of a state on which later updates may depend."""

    def is_transient(x: Any) -> bool:
        return type(x) in _TRANSIENT

    return [x for x in jax.tree.leaves(state, is_leaf=is_transient) if not is_transient(x)]


def holds_state(tree: PyTree, moves: Moves, *, needs_owner: bool = False) -> bool:
    """Return whether `tree` holds, at any depth, a state of a transform that exchanges `moves`.

    Args:
      tree: a state of optax transforms.
      moves: what the transform exchanges.
      needs_owner: whether to count only states that only their transform can convert.
    """

    def is_match(x: Any) -> bool:
        return is_state_of(x, moves, needs_owner=needs_owner)

    return any(map(is_match, jax.tree.leaves(tree, is_leaf=is_match)))


def is_state_of(x: Any, moves: Moves, *, needs_owner: bool = False) -> bool:
    """Return whether `x` itself is the state of a transform that exchanges `moves`."""
    entry = _OWNERS.get(type(x))
    return entry is not None and entry[0] == moves and (entry[1] or not needs_owner)


def counters_in(tree: PyTree) -> list[tuple[str, jax.Array]]:
    """Return the class and the counter of every state of a transform that exchanges in `tree`.

    All replicas count alike: in what a program returns, a counter has the same value everywhere.
    """
    is_one = lambda x: type(x) in _OWNERS and isinstance(getattr(x, "count", None), jax.Array)  # noqa: E731
    states = filter(is_one, jax.tree.leaves(tree, is_leaf=is_one))
    return [(type(x).__name__, x.count) for x in states]


def check_order(owner: str, state: PyTree) -> None:
    """Raise `ValueError` for a chain in which something follows a parameter transform.

    A parameter transform returns the difference of the new and the old parameters. A transform
    after it would treat that as a step of the optimizer, and for example scale it by a rate.

    Args:
      owner: public name of the function that received the chain, for the message.
      state: state of any optax transform; chains are checked at any depth.
    """
    for chain in filter(_is_chain, jax.tree.leaves(state, is_leaf=_is_chain)):
        members = list(_members(chain))
        moves = [holds_state(member, "parameters") for _, member in members]
        if moves != sorted(moves):
            first = moves.index(True)
            before, late = members[first], members[moves.index(False, first)]
            raise ValueError(
                f"{owner}: `tx` is a chain in which something follows a parameter transform, "
                f"which must come last: after {before[0]}, {type(before[1]).__name__}, stands "
                f"{late[0]}, {type(late[1]).__name__}. It would change the difference that leads "
                "to the synchronised parameters, and replicas would drift apart: put it before."
            )
        for _, member in members:
            check_order(owner, member)


def _is_chain(x: PyTree) -> bool:
    return type(x) is tuple or isinstance(x, OrderedDict)  # `optax.chain`, `optax.named_chain`


def _members(chain: PyTree, name: str = "") -> Iterator[tuple[str, PyTree]]:
    """Yield path and state of each transform in a chain, and in chains in it, in running order."""
    for key, x in chain.items() if isinstance(chain, OrderedDict) else enumerate(chain):
        where = f"{name}[{key!r}]"
        yield from _members(x, where) if _is_chain(x) else [(where, x)]
