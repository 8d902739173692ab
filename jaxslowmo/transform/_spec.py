"""What a parameter transform says of itself, and the states that belong to such transforms.

A `TransformSpec` has four groups, of which an algorithm must give two.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import optax

from .._support.types import Phase, PyTree
from ._due import Every, as_schedule
from ._transform_states import Carry, LikeOn, Shares, carry_plainly

Others = list[jax.Array]
"""Floating arrays that are no parameters and travel with them, such as batch statistics."""

Step = Callable[..., tuple[PyTree, Others, PyTree]]
"""`step(updates, others, state, params, ...)`: see `ExchangeSpec.exchange`."""


Numerator = tuple[PyTree, jax.Array | None]
"""Weighted parameters and their weight; None where it is always 1."""

_UNKNOWN: Any = None  # until there is a transform, which is made with `update`


class WithSpec(optax.GradientTransformationExtraArgs):
    """An optax transform that has a spec beside its functions, and copies that have it too."""

    # Tuples are copied from their items alone, without what they have beside these. What is here
    # are functions, which copies of any depth share.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleSpec:
    """When a parameter transform exchanges.

    Attributes:
      phase: `phase(t, skipped=0)` on the host: the events of update t = 1, 2, ... as a hashable
        tuple of names; `()` exchanges nothing. `skipped`: in how many updates before t its exchange
        was skipped (`communicate=False`); gossip does not rotate in those. Slow steps with an exact
        average do not count: gossip does not rotate in them anyway.
      due: `due(t)`: whether update t exchanges anything, for an int or an array.
      schedules: when it exchanges by itself, then what else its phases repeat with.
      skipped: `skipped(state)`: see `phase`, from the state of one replica; None where phases do
        not ask for it.
      events: the names that a phase may hold; None where a transform inside knows some.
    """

    phase: Callable[..., Phase]
    due: Callable[[Any], Any]
    schedules: tuple[Every, ...]
    skipped: Callable[[PyTree], Any] | None = None
    events: tuple[str, ...] | None = None

    @classmethod
    def of(cls, event: str, sync_every: int | Every) -> "ScheduleSpec":
        """The schedule of one event.

        Args:
          event: its name.
          sync_every: its period in updates, or `js.every(...)`.

        Returns:
          A `ScheduleSpec` with `(event,)` as the phase of updates in which it is due.

        Raises:
          ValueError: a period < 1.

        Communication: none.
        """
        due = as_schedule(sync_every)
        return cls(
            phase=lambda t, skipped=0: (event,) if due(t) else (),  # `due` counts updates
            due=due,
            schedules=(due,),
            events=(event,),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeSpec:
    """What a parameter transform exchanges, and what others must know who exchange around it.

    Attributes:
      axes: names of all mapped axes over which it exchanges.
      local_axes: names of those inside a replica, whose devices share an exchange.
      exchange: `exchange(updates, others, state, params, ...)`, `update` that also takes a list of
        other floating arrays, such as batch statistics, and returns `(updates, others, state)`. In
        an update that averages the parameters, these are averaged too, over the same axes and with
        the same weights; in others they stay as they are. `js.make_train_step` calls it. None:
        `update`, which takes no others.
      numerator: `numerator(state, y) -> (x, w)`: the weighted parameters and their weight, whose
        sums over replicas give the exact mean; w is None where it is always 1.
      reset: `reset(state)`: the state after all replicas were set to one mean.
      permit: `permit(state, y, others, axes) -> (allowed, state)`: asked by who wraps it before an
        exchange of its own over `axes`, which takes place if all allow it; None allows all.
      wants_learning_rate: whether each update must be told the optimizer's rate, `learning_rate=`.
    """

    axes: tuple[str, ...] = ()
    local_axes: tuple[str, ...] = ()
    exchange: Step = _UNKNOWN
    numerator: Callable[[PyTree, PyTree], Numerator] = lambda state, y: (y, None)
    reset: Callable[[PyTree], PyTree] = lambda state: state
    permit: Callable[[PyTree, PyTree, Others, Sequence[str]], tuple[Any, PyTree]] | None = None
    wants_learning_rate: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointSpec:
    """What becomes of the state of a parameter transform on disk, and on other replicas.

    Without it the state moves leaf by leaf: floats are averaged where replicas differ.

    Attributes:
      state: class of its state, which no other transform uses. None: that of the first state that
        is made, if it is a NamedTuple of its own.
      shards: `shards(state)`: the leaves of which each replica keeps another part.
      carry: `carry(state, params, old, new)` on the host: the state of all replicas, NumPy arrays
        stacked on placement `old`, as it is on `new` once all parameters are the consensus; where
        the number of replicas is the same, in another layout only. Given shapes and dtypes of one
        copy of the parameters.
      like_on: `like_on(state, params, at)` likewise: of the types of a state those that it has on
        placement `at`, where shards are others in number and shape.
      shares: `shares(state)` likewise: pairs of weights (replicas,) and stacked parameters, None
        for the replicas' own, whose weighted mean is the consensus.
    """

    state: type | None = None
    shards: Callable[[PyTree], list[Any]] = lambda state: []
    carry: Carry = carry_plainly
    like_on: LikeOn = lambda state, params, at: state
    shares: Shares = lambda state: [(1.0, None)]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutSpec:
    """How a parameter transform depends on the mesh, and on how leaves lie inside a replica.

    Attributes:
      sized: `sized(axis_sizes)`: the transform for axes of known sizes, by name. That fixes what
        depends on them: the graph that `js.sgp` chooses by itself. None: nothing does.
      with_specs: `with_specs(param_specs)`: the transform for parameters of which the layout over
        automatic axes is known; specs that it was made with stay, and so does the layout of its
        state. Where it says `shards_whole_leaves`, `of_state=True` gives the state that layout
        too, before there is one. None: nothing depends on it.
      shards_whole_leaves: whether it keeps shards of leaves and was given no specs, so that it
        gathers leaves that are sharded over Auto axes inside a replica (types tell of others).
      shard_specs: `PartitionSpec` per leaf (or prefix of the tree) by which it cuts what it keeps
        in shards, if it was given any. It is part of the layout of its state.
      anchor: `anchor(state, params)`: the anchor, which may lie in shards, as a tree like the
        parameters, under the axis; None without one.
    """

    sized: Callable[[Mapping[str, int]], Any] | None = None
    with_specs: Callable[..., Any] | None = None
    shards_whole_leaves: bool = False
    shard_specs: PyTree | None = None
    anchor: Callable[[PyTree, PyTree], PyTree] | None = None


class Origin(NamedTuple):
    """A transform as it was made, before somebody changed it."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    spec: "TransformSpec"


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformSpec:
    """What a parameter transform says, beside optax's pair, to other transforms and to the step.

    `dataclasses.replace` makes a changed one. Where a group is changed it is of its class:

        never = dataclasses.replace(tx.spec.schedule, phase=lambda t, skipped=0: ())
        js.ParameterTransform(tx.init, tx.update, dataclasses.replace(tx.spec, schedule=never))

    Attributes:
      schedule: when it exchanges.
      exchange: what it exchanges.
      checkpoint: what becomes of its state elsewhere; by default it moves leaf by leaf.
      layout: what depends on the mesh; by default nothing does.
      origin: not for you: the transform that this was first the spec of. What differs from it
        stays different in the transforms that `sized` and `with_specs` make.

    Raises:
      ValueError: a group that is of another class.
    """

    schedule: ScheduleSpec
    exchange: ExchangeSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    layout: LayoutSpec = LayoutSpec()
    origin: Origin | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"TransformSpec: `{name}` must be a js.{kind.__name__}(...), got "
                    f"{getattr(self, name)!r}."
                )


_GROUPS: dict[str, Any] = {
    f.name: f.type for f in dataclasses.fields(TransformSpec) if f.name != "origin"
}


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
