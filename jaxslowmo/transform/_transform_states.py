"""States of transforms: whose they are, and how they move to other replicas on the host.

The functions that move them take and return NumPy arrays, so that a checkpoint of a mesh that no
longer exists can be read.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..mesh import axis_names

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


@dataclass(frozen=True)
class SavedForm:
    """The form that parameters had when a run was saved.

        then, now = saved_layout, pipe.layout  # of four stages, and of two
        SavedForm(then.stack_like(types), lambda tree: now.stack_like(then.unstack(tree)))

    Attributes:
      params: types of one copy of the parameters as they were saved, `ShapeDtypeStruct`s.
      convert: of a tree like these, of NumPy arrays, the tree like the parameters of now. It moves
        elements and computes nothing: moments, anchor and momentum are converted by it too, in
        their own dtypes, and leaves may have a first dimension more, of replicas.
    """

    params: PyTree
    # By whoever knows both forms: nothing in a tree tells which element is whose.
    convert: Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class StatePlacement:
    """The mesh that stacked state belongs to.

    Attributes:
      replicas: their number, the leading dimension of every leaf.
      axis_sizes: of all axes of the mesh.
      automatic: axes over which leaves of the parameters are sharded inside a replica.
      is_certain: whether `axis_sizes` are known; without devices they leave no trace in arrays.
      specs: how leaves are sharded over the automatic axes where state is kept in shards of them:
        a `PartitionSpec` for each leaf of the parameters, in order. None: as the transform says.
      form: of the parameters there, where it was another one than now.
    """

    replicas: int
    axis_sizes: Mapping[str, int]
    automatic: frozenset[str] = frozenset()
    is_certain: bool = True
    specs: tuple[P, ...] | None = None
    form: SavedForm | None = None

    def size(self, axis_name: AxisName | None) -> int:
        """Number of positions along an axis or several; 1 for what the mesh does not have."""
        names = () if axis_name is None else axis_names(axis_name)
        return math.prod(self.axis_sizes.get(name, 1) for name in names)

    def mesh(self) -> AbstractMesh:
        """The mesh as a transform sees it while it is traced: replica axes are manual."""
        # Axes over which leaves are sharded are the compiler's; all others are mapped by hand.
        kinds = [AxisType.Auto if a in self.automatic else AxisType.Manual for a in self.axis_sizes]
        return AbstractMesh(tuple(self.axis_sizes.values()), tuple(self.axis_sizes), tuple(kinds))


class Carried(NamedTuple):
    """State on another placement, and what became of it."""

    state: PyTree
    notes: tuple[str, ...] = ()  # sentences


Carry = Callable[[PyTree, PyTree, StatePlacement, StatePlacement], Carried]
"""`carry(state, params, old, new)`: see `CheckpointSpec.carry`."""

Shares = Callable[[PyTree], Sequence[tuple[Any, PyTree | None]] | None]
"""`shares(state)`: see `CheckpointSpec.shares`."""


LikeOn = Callable[[PyTree, PyTree, StatePlacement], PyTree]
"""`like_on(state, params, at)`: see `CheckpointSpec.like_on`."""


def stacked(one: Any, new: StatePlacement) -> Any:
    """The same array for every replica, as a view."""
    # Nothing is copied: a model may be large, and each replica's part is read once.
    one = np.asarray(one)
    return np.broadcast_to(one, (new.replicas, *one.shape))


def carry_leaf(x: Any, old: StatePlacement, new: StatePlacement) -> Any:
    """A leaf of which nothing else is known: the mean of floats, replica 0's of the others."""
    return x if old.replicas == new.replicas else stacked(replica_average(x), new)


def replica_average(x: np.ndarray) -> np.ndarray:
    """The mean of a floating leaf over its replicas, exact where they agree; else replica 0's."""
    # Counters are equal on all replicas; keys and flags have no mean.
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.all(x == x[:1]):
        return x[0]
    # In float64: the sum of many replicas in half precision would lose digits.
    return np.mean(x.astype(np.float64), axis=0).astype(x.dtype)


def carry_plainly(
    state: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement
) -> Carried:
    """A state of counters, and of values that may be averaged."""
    del params
    return Carried(jax.tree.map(lambda x: carry_leaf(x, old, new), state))
