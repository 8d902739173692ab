"""What the class of a state says of its transform: what it exchanges, and what exchanges must move.

Transforms of this library register their classes. Optimizers of optax are known by theirs; others
say it by `js.spec.remembers_parameters`.

Most optimizers read the parameters that they receive and store only gradients. Some store
parameters: COCOB computes every new value from the initial one, schedule-free training from a
sequence of points. An exchange changes the parameters by d. Such an optimizer does not know of the
change and undoes it in its next step.

An optimizer without weight decay does not depend on the origin: with d added to all parameters that
it stores, its next step is the same step from the new point. So an exchange is handled as a shift
of one replica's origin. Copies that *stand for the replica's parameters* are shifted by d, too, and
the rest of the state (momentum, bets, a point to return to) keeps its meaning. The shifts of an
average sum to zero, so the mean of the copies over the replicas does not change, and nothing needs
to be communicated.

Other copies are *reference points*, such as the initial parameters of DoG, whose learning rate is
the distance from them. They are the same on all replicas and are not shifted.
"""

import contextlib
import functools
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax

from .._support.checks import Settings
from .._support.types import PyTree, tracks_types, varying_axes
from ..mesh import match_varying, vary_over
from ..tree import add, cast, promoted_dtype, updates_to


class TypedTransform(optax.GradientTransformationExtraArgs):
    """An optax transform whose state keeps its types of varying axes from update to update.

    Values have such types in a `jax.shard_map` with its default check, `check_vma=True`: in loops
    of users, not in a training step. A state that is made there varies over the axes that all
    parameters vary over, and each update returns it typed as it was, so that it can be carried by a
    loop or leave the `shard_map` as it came in. Results of means stay typed as equal. Elsewhere
    both functions are called as they are.

    Attributes:
      settings: the factory of this package that made it, and its arguments; None for other ones.
    """

    settings: Settings | None = None

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
            (place, before), (where, late) = members[first], members[moves.index(False, first)]
            raise ValueError(
                f"{owner}: `tx` is a chain in which a parameter transform must come last, and "
                f"after {place}, {type(before).__name__}, stands {where}, {type(late).__name__}."
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


class Known(NamedTuple):
    """The properties of an optimizer that the class of its state identifies.

    Attributes:
      name: its public name.
      moves: fields of the state that stand for the replica's parameters and move with them.
      stays: fields that are reference points.
      between: what an exchange meets between two updates of one that updates in some calls only.
      with_tables: what goes wrong where it updates dense parameters, and rows of tables without it.
      around_scale: what goes wrong with a loss scale inside of it.
      instead: what to do instead.
      takes_extra: whether its `update` takes extra arguments, as optax requires.
    """

    name: str
    moves: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    between: str = ""
    with_tables: str = ""
    around_scale: str = ""
    instead: str = ""
    takes_extra: bool = True


_COLLECTS = "rows would move in calls that only collect"
_ACCUMULATE = "use `accumulate` of js.make_train_step or step.collect"
_OPTAX = {
    # p = init_particles + bet.
    "contrib.COCOBState": Known("optax.contrib.cocob", moves=("init_particles",)),
    # p <- (1 - momentum) (x0 - s / sigma) + momentum p.
    "contrib.MadgradState": Known("optax.contrib.madgrad", moves=("x0",)),
    # z is the sequence that takes the steps; p is between it and its average.
    "contrib.ScheduleFreeState": Known("optax.contrib.schedule_free", moves=("z",)),
    # The rate depends on distances from the initial point, or on correlations with them.
    "contrib.DoGState": Known("optax.contrib.dog", stays=("init_params",)),
    "contrib.DoWGState": Known("optax.contrib.dowg", stays=("init_params",)),
    "contrib.ProdigyState": Known("optax.contrib.prodigy", stays=("params0",)),
    # p = x0 - s Delta; each update computes Delta from p, which includes the exchange.
    "contrib.MechanicState": Known("optax.contrib.mechanize", stays=("x0",)),
    # The point of the last gradient; a secant must include the exchange up to the next point.
    "ScaleByLBFGSState": Known("optax.lbfgs", stays=("params",)),
    # The parameters return to the cache after a step that ascends.
    "contrib.SAMState": Known(
        "optax.contrib.sam",
        moves=("cache",),
        between="parameters are where SAM has pushed them, so replicas keep different "
        "displacements",
        with_tables="rows would move in its adversarial calls, too",
        instead="pass the optimizer inside of it alone",
        takes_extra=False,
    ),
    "MultiStepsState": Known(
        "optax.MultiSteps",
        between="gradients at the parameters of before are being collected",
        with_tables=_COLLECTS,
        around_scale="whose sum of gradients stays NaN after an overflow",
        instead=_ACCUMULATE,
    ),
    "ApplyIfFiniteState": Known(
        "optax.apply_if_finite",
        with_tables="rows would move in updates that it drops",
        around_scale="which keeps every overflow from it, so that the scale never falls",
        instead="use js.dynamic_loss_scale, which all stages, replicas and tables follow",
    ),
    "ApplyEvery": Known("optax.apply_every", with_tables=_COLLECTS, instead=_ACCUMULATE),
    "experimental.aggregating.AccumulateAvgUpdatesState": Known(
        "optax.experimental.aggregating.accumulate_avg_updates",
        with_tables=_COLLECTS,
        instead=_ACCUMULATE,
    ),
    "ConditionallyMaskState": Known(
        "optax.conditionally_mask",
        with_tables="rows would move in updates that it drops",
        instead="leave these calls out, or freeze dense parameters alone by a learning rate of 0",
    ),
}


def _known_classes() -> dict[type, Known]:
    """Return the table by class, of the classes and fields that the installed optax has."""
    known = {}
    for path, row in _OPTAX.items():
        with contextlib.suppress(AttributeError):
            kind = attrgetter(path)(optax)
            if {*row.moves, *row.stays} <= {*kind._fields}:
                known[kind] = row
    return known


_KNOWN = _known_classes()


def known_states(state: PyTree) -> Iterator[tuple[Any, Known]]:
    """Yield each state in `state` of a known class, at any depth, and what is known of it."""
    is_known = lambda x: type(x) in _KNOWN  # noqa: E731
    for x in filter(is_known, jax.tree.leaves(state, is_leaf=is_known)):
        yield x, _KNOWN[type(x)]
        yield from known_states(tuple(x))


def takes_extra(state: PyTree) -> bool:
    """Return whether the optimizer with this state takes extra arguments."""
    return all(known.takes_extra for _, known in known_states(state))


def alternatives_to(state: PyTree) -> str:
    """Return what to use instead of an optimizer with this state that mixes leaves, as sentences.

    These transforms of this package know of stages.
    """
    others = [
        f"Instead of {known.name} {known.instead}. "
        for _, known in known_states(state)
        if known.instead
    ]
    return (
        "".join(dict.fromkeys(others))
        + "For a norm or a check of all gradients use js.clip_by_global_norm(...) and "
        "js.dynamic_loss_scale(...), joined with the optimizer by js.chain, which know of stages."
    )


def remembers_parameters(
    kind: type, *, moves: tuple[str, ...] = (), stays: tuple[str, ...] = ()
) -> None:
    """Register the fields of an optimizer's state that are copies of the parameters.

    Call it for your own optimizers; those of optax are known. `js.make_train_step(sync=...)` and
    `js.chain` then add to the fields in `moves` what an exchange adds to the parameters. Other
    copies stay behind: the optimizer undoes exchanges, and nothing warns of it.

    Args:
      kind: the state class, a NamedTuple, at any depth of the optimizer's state.
      moves: names of fields from which the optimizer computes new parameters: trees like the
        parameters, in any floating dtype.
      stays: names of fields that are only reference points, such as the initial parameters from
        which a distance is measured. An exchange does not change them.

    Raises:
      ValueError: `kind` is no NamedTuple or has no such fields, or a field is in both.

    Example:
      class MyState(NamedTuple):
          start: Any
          sum: Any

      js.spec.remembers_parameters(MyState, moves=("start",))

    Communication: none.
    """
    fields = getattr(kind, "_fields", None)
    if fields is None:
        raise ValueError(f"remembers_parameters: `kind` must be a NamedTuple, got {kind!r}.")
    wrong = [name for name in (*moves, *stays) if name not in fields]
    if wrong or set(moves) & set(stays):
        raise ValueError(
            "remembers_parameters: `moves` and `stays` must name fields of "
            f"{kind.__name__}, {list(fields)}, each once; got moves={moves!r}, stays={stays!r}."
        )
    _KNOWN[kind] = Known(kind.__name__, tuple(moves), tuple(stays))


def moving_states(state: PyTree) -> list[str]:
    """Return the class names of all states in `state`, at any depth, with copies that must move.

    What an outer optimizer remembers is the anchor, which no exchange changes but its own.
    """

    def ends(x: Any) -> bool:
        return _moves(x) or is_state_of(x, "parameters")

    states = [x for x in jax.tree.leaves(state, is_leaf=ends) if _moves(x)]
    return sorted(type(x).__name__ for x in states)


def move_copies(state: PyTree, old: PyTree, new: PyTree) -> PyTree:
    """Return an optimizer's state whose copies of parameters follow a change by an exchange.

    Args:
      state: the optimizer's state, which other transforms may wrap.
      old: the parameters before the exchange, as their dtypes round them.
      new: the parameters after it.

    Returns:
      The state with `new - old` added to the copies that move; `state` itself if it has no such
      copies.

    Raises:
      ValueError: a copy that is no tree like the parameters.

    Communication: none.
    """
    if not moving_states(state):
        return state

    def finite(d: jax.Array) -> jax.Array:
        # A shift that is not finite would destroy the copies: leave them unchanged.
        return jnp.where(jnp.isfinite(d), d, jnp.zeros_like(d))

    return shift_copies(state, jax.tree.map(finite, updates_to(old, new)))


def shift_copies(state: PyTree, shift: PyTree) -> PyTree:
    """Return `state` with `shift`, a tree like the parameters, added to the copies that move."""

    def shift_state(x: Any) -> Any:
        if not _moves(x):
            return x
        fields, kind = x._asdict(), type(x)
        copies = {
            n: _add_shift(f"{kind.__name__}.{n}", fields.pop(n), shift) for n in _KNOWN[kind].moves
        }
        # Other fields may hold inner states with copies that move.
        return x._replace(**copies, **{n: shift_copies(y, shift) for n, y in fields.items()})

    return jax.tree.map(shift_state, state, is_leaf=_moves)


def _moves(x: Any) -> bool:
    return bool(getattr(_KNOWN.get(type(x)), "moves", ()))


def _add_shift(name: str, copies: PyTree, shift: PyTree) -> PyTree:
    """Return `copies` plus `shift`; `copies` may be masked, as by `optax.masked`."""

    def one(copy: Any, d: Any) -> Any:
        if isinstance(copy, optax.MaskedNode):
            return copy
        if getattr(d, "shape", None) != copy.shape:
            raise ValueError
        wide = promoted_dtype(copy.dtype, d.dtype)
        return cast(add(cast(copy, wide), cast(d, wide)), copy.dtype)

    if not jax.tree.leaves(copies):  # `optax.contrib.sam(opaque_mode=True)` stores none
        return copies
    try:
        return jax.tree.map(one, copies, shift, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    except ValueError:
        raise ValueError(
            f"{name}, a copy of the parameters in the optimizer's state, must move with them, and "
            "is no tree like them: leave out what brings it there, such as optax.flatten."
        ) from None
