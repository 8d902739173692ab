"""Specs of parameter transforms, and the registry of their states' classes.

A `TransformSpec` has four groups. Schedule and exchange are required.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import optax

from .._support.settings import Settings
from .._support.types import Phase, PyTree
from ._due import Every, as_schedule
from ._transform_states import Carry, LikeOn, Shares, carry_plainly

Others = list[jax.Array]
"""Floating arrays that are averaged with the parameters, such as batch statistics."""

Step = Callable[..., tuple[PyTree, Others, PyTree]]
"""`step(updates, others, state, params, ...)`: see `ExchangeSpec.exchange`."""


Numerator = tuple[PyTree, jax.Array | None]
"""Weighted parameters and their weight; None if it is always 1."""

_UNKNOWN: Any = None  # `ParameterTransform` replaces it by an exchange that calls `update`


class WithSpec(optax.GradientTransformationExtraArgs):
    """An optax transform with a spec, which copies keep."""

    # `copy` makes a tuple from its items, without other attributes. Copies of any depth share
    # functions, so a transform is its own copy.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleSpec:
    """The schedule of a parameter transform: in which updates it exchanges.

    Attributes:
      phase: `phase(t, skipped=0)` on the host: the events of update t = 1, 2, ... as a hashable
        tuple of names; `()` exchanges nothing. `skipped` is the number of updates before t whose
        exchange was skipped (`communicate=False`), in which gossip does not rotate. Slow steps with
        an exact average are not counted, since gossip does not rotate in them in any case.
      due: `due(t)`: whether update t exchanges anything, for an int or an array.
      schedules: the schedule of its own exchange, then other schedules on which phases depend.
      skipped: `skipped(state)`: the `skipped` of `phase`, from the state of one replica. None if
        phases do not depend on it.
      events: the names that a phase may hold; None if a transform that it wraps adds others.
    """

    phase: Callable[..., Phase]
    due: Callable[[Any], Any]
    schedules: tuple[Every, ...]
    skipped: Callable[[PyTree], Any] | None = None
    events: tuple[str, ...] | None = None

    @classmethod
    def of(cls, event: str, sync_every: int | Every) -> "ScheduleSpec":
        """Return the schedule of a single event.

        Args:
          event: name of the event.
          sync_every: period of the event in updates, or `js.every(...)`.

        Returns:
          A `ScheduleSpec` with `(event,)` as the phase of updates in which it is due.

        Raises:
          ValueError: a period < 1.

        Communication: none.
        """
        due = as_schedule(sync_every)
        return cls(
            # `due` counts updates, so skipped exchanges do not matter.
            phase=lambda t, skipped=0: (event,) if due(t) else (),
            due=due,
            schedules=(due,),
            events=(event,),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BesideSpec:
    """An exchange of several updates that a host can run as a program of its own beside them.

    Attributes:
      without: `without(phase)`: the phase without the events that send; the same phase if an update
        sends nothing.
      sent: `sent(state, phase)`: the part of the state that the events of this phase send.
      exchange: `exchange(values)`: what the events of all updates together make of `sent`, also
        if some of them have run; called inside the mapped axes, for one replica.
      put: `put(state, phase, values)`: the state with `values` in the place of `sent`.
      ends: `ends(phase)`: whether the update applies what its events and earlier ones have sent.
      is_behind: `is_behind(state, t)` on the host, from the state of one replica: whether update t
        expects that earlier updates have sent more than they did.
    """

    without: Callable[[Phase], Phase]
    sent: Callable[[PyTree, Phase], PyTree]
    exchange: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, Phase, PyTree], PyTree]
    ends: Callable[[Phase], bool]
    is_behind: Callable[[PyTree, int], bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeSpec:
    """The exchange of a parameter transform, and functions for transforms that wrap it.

    Attributes:
      axes: names of all mapped axes over which it exchanges.
      local_axes: names of axes inside a replica, whose devices split the work of an exchange.
      exchange: `exchange(updates, others, state, params, ...)`: like `update`, with a list of other
        floating arrays, such as batch statistics, and returns `(updates, others, state)`. In an
        update that averages the parameters, it averages the other arrays, too, over the same axes
        and with the same weights; otherwise it returns them unchanged. `js.make_train_step` calls
        it. None: a function that calls `update` and takes no other arrays.
      numerator: `numerator(state, y) -> (x, w)`: the weighted parameters and their weight, whose
        sums over replicas give the exact mean; w is None if it is always 1.
      reset: `reset(state)`: the state after all replicas were set to one mean.
      settle: `settle(state, move)`: the state after parameters were moved by `move(tree)`, which
        takes any tree like the parameters; parameters that are still under way are moved alike.
      permit: `permit(state, y, others, axes) -> (allowed, state)`: called by a transform that wraps
        it before the wrapper's exchange over `axes`, which runs if all replicas allow it. None
        allows every exchange.
      beside: the part of the exchange that may run beside several updates; None: there is none.
      wants_learning_rate: whether each update needs the optimizer's rate as `learning_rate=`.
    """

    axes: tuple[str, ...] = ()
    local_axes: tuple[str, ...] = ()
    exchange: Step = _UNKNOWN
    numerator: Callable[[PyTree, PyTree], Numerator] = lambda state, y: (y, None)
    reset: Callable[[PyTree], PyTree] = lambda state: state
    settle: Callable[[PyTree, Callable[[PyTree], PyTree]], PyTree] = lambda state, move: state
    permit: Callable[[PyTree, PyTree, Others, Sequence[str]], tuple[Any, PyTree]] | None = None
    beside: BesideSpec | None = None
    wants_learning_rate: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointSpec:
    """The conversion of a parameter transform's state for checkpoints and other meshes.

    By default the state is converted leaf by leaf: floats are averaged if replicas differ.

    Attributes:
      state: class of its state, which no other transform uses. None: the class of the first state
        that it makes, if that is a NamedTuple which optax does not define.
      shards: `shards(state)`: the leaves of which each replica keeps a different part.
      carry: `carry(state, params, old, new)` on the host: converts the state of all replicas, NumPy
        arrays stacked on placement `old`, to placement `new`, for parameters that are all the
        consensus. If the number of replicas is the same, only the layout changes. `params` are
        shapes and dtypes of one copy of the parameters.
      like_on: `like_on(state, params, at)` on the host: converts the types of a state to those on
        placement `at`, where shards have another number and shape.
      shares: `shares(state)` on the host: pairs of weights (replicas,) and stacked parameters, or
        None for the replicas' parameters, whose weighted mean is the consensus.
    """

    state: type | None = None
    shards: Callable[[PyTree], list[Any]] = lambda state: []
    carry: Carry = carry_plainly
    like_on: LikeOn = lambda state, params, at: state
    shares: Shares = lambda state: [(1.0, None)]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutSpec:
    """The dependence of a parameter transform on the mesh and on layouts inside a replica.

    Attributes:
      sized: `sized(axis_sizes)`: the transform for axes with these sizes by name, for a transform
        that depends on them, such as `js.sgp` with a default graph. None: nothing depends on them.
      with_specs: `with_specs(param_specs)`: the transform for parameters with this layout over
        automatic axes. It keeps specs that it was made with, and the layout of its state. If
        `shards_whole_leaves`, `of_state=True` changes the layout of the state, too; no state may
        exist yet. None: nothing depends on the layout.
      shards_whole_leaves: whether it keeps shards of leaves and has no specs, so that it gathers
        leaves that are sharded over Auto axes inside a replica (over others their types have it).
      shard_specs: `PartitionSpec` per leaf (or prefix of the tree) by which it cuts leaves into
        shards, or None. It is part of the layout of its state.
      anchor: `anchor(state, params)`: the anchor as a tree like the parameters, gathered from its
        shards; called inside the mapped axes. None: there is no anchor.
      stored: `stored()`: where its state is stored, and why, for `repr` and reports; "" if every
        replica has all of it in any case.
    """

    sized: Callable[[Mapping[str, int]], Any] | None = None
    with_specs: Callable[..., Any] | None = None
    shards_whole_leaves: bool = False
    shard_specs: PyTree | None = None
    anchor: Callable[[PyTree, PyTree], PyTree] | None = None
    stored: Callable[[], str] = lambda: ""


class Origin(NamedTuple):
    """The parts of a transform as it was made first, before `_replace` changed it."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    spec: "TransformSpec"


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformSpec:
    """A description of a parameter transform, for other transforms and for the training step.

    `dataclasses.replace` makes a changed spec. To change a value, replace its group:

        never = dataclasses.replace(tx.spec.schedule, phase=lambda t, skipped=0: ())
        js.ParameterTransform(tx.init, tx.update, dataclasses.replace(tx.spec, schedule=never))

    Attributes:
      schedule: the updates in which it exchanges.
      exchange: what it exchanges, over which axes.
      checkpoint: how its state is converted for other meshes; by default leaf by leaf.
      layout: what depends on the mesh; by default nothing does.
      settings: the factory of this package that made it, and its arguments; None for other ones.
      origin: internal: the transform whose spec this was first. The transforms that `sized` and
        `with_specs` make keep all differences from it.

    Raises:
      ValueError: a group that is of another class.
    """

    schedule: ScheduleSpec
    exchange: ExchangeSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    layout: LayoutSpec = LayoutSpec()
    settings: Settings | None = dataclasses.field(default=None, repr=False)
    origin: Origin | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"TransformSpec: `{name}` must be a js.{kind.__name__}(...), got "
                    f"{getattr(self, name)!r}."
                )


_GROUPS: dict[str, Any] = {
    f.name: f.type
    for f in dataclasses.fields(TransformSpec)
    if f.name not in ("settings", "origin")
}


Moves = Literal["gradients", "parameters"]
_Class = TypeVar("_Class", bound=type)

# Maps the class of a state to what its transform exchanges, and to whether only that transform can
# convert the state for other replicas (`CheckpointSpec.carry`).
_OWNERS: dict[type, tuple[Moves, bool]] = {}
_PASSING: set[type] = set()


def register_state(kind: type, moves: Moves, *, needs_owner: bool = False) -> None:
    """Register the state class of a transform that exchanges.

    Args:
      kind: the class, which only this kind of transform uses.
      moves: what its transform exchanges.
      needs_owner: whether the state cannot be converted leaf by leaf for other replicas. It is kept
        as False once a transform with this class (`js.only_finite` around another) says False.
    """
    _, before = _OWNERS.get(kind, (moves, True))
    _OWNERS[kind] = moves, needs_owner and before


def gradient_state(kind: _Class) -> _Class:
    """Register the decorated state class of a transform that exchanges gradients."""
    register_state(kind, "gradients")
    return kind


def passing_state(kind: _Class) -> _Class:
    """Register the decorated state class: it describes the last update, and no update reads it."""
    _PASSING.add(kind)
    return kind


def remembered(state: PyTree) -> list[Any]:
    """Return the leaves of a state on which later updates may depend."""

    def is_passing(x: Any) -> bool:
        return type(x) in _PASSING

    return [x for x in jax.tree.leaves(state, is_leaf=is_passing) if not is_passing(x)]


def learn_state(state: PyTree, *, needs_owner: bool) -> None:
    """Register the class of a state that its parameter transform did not name.

    Only a NamedTuple with a `count` that is neither from optax nor the state of a gradient
    transform identifies its transform. Other classes are not registered.
    """
    kind = type(state)
    is_custom = "count" in getattr(kind, "_fields", ()) and kind.__module__.split(".")[0] != "optax"
    if is_custom and _OWNERS.get(kind, ("parameters",))[0] == "parameters":
        register_state(kind, "parameters", needs_owner=needs_owner)


def holds_state(tree: PyTree, moves: Moves, *, needs_owner: bool = False) -> bool:
    """Return whether `tree` holds, at any depth, a state of a transform that exchanges `moves`.

    Args:
      tree: a state of optax transforms.
      moves: what the transform exchanges.
      needs_owner: whether to count only states that only their transform can convert.
    """

    def is_match(x: Any) -> bool:
        entry = _OWNERS.get(type(x))
        return entry is not None and entry[0] == moves and (entry[1] or not needs_owner)

    return any(map(is_match, jax.tree.leaves(tree, is_leaf=is_match)))


def counters_in(tree: PyTree) -> list[tuple[str, jax.Array]]:
    """Return the class and the counter of every state of a transform that exchanges in `tree`.

    All replicas count alike: in what a program returns, a counter has the same value everywhere.
    """
    is_one = lambda x: type(x) in _OWNERS and isinstance(getattr(x, "count", None), jax.Array)  # noqa: E731
    states = filter(is_one, jax.tree.leaves(tree, is_leaf=is_one))
    return [(type(x).__name__, x.count) for x in states]


class NoExchangeState(NamedTuple):
    """The state of `no_exchange`; not `optax.EmptyState`, which also optimizers' states hold."""


def no_exchange() -> optax.GradientTransformation:
    """Return the identity transform that takes the place of a missing parameter transform."""
    return optax.GradientTransformation(
        lambda params: NoExchangeState(), lambda updates, state, params=None: (updates, state)
    )


def check_order(owner: str, state: PyTree) -> None:
    """Raise `ValueError` for a chain in which something follows a parameter transform.

    A parameter transform returns the difference of the new and the old parameters. A transform
    after it would treat that as a step of the optimizer, and for example scale it by a rate.

    Args:
      owner: public name of the function that received the chain, for the message.
      state: state of any optax transform; chains are checked at any depth.
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
