"""The protocol of parameter transforms, and how one is made from its own arithmetic."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import optax

from .._typing import AxisName, Phase, PyTree
from .._warn import warn_once
from ..mesh import axis_names, match_varying
from ..tree import check_floating
from ._checks import (
    LayoutNotice,
    StateCheck,
    check_update_arguments,
    check_varying,
    check_weight,
    require_bound,
    unless_idle,
    warn_if_alone,
)
from ._due import Communicate
from ._exchange import Exchange
from ._placement import Carry, LikeOn, Shares, as_it_is, carry_plainly
from ._registry import learn_state, register_state
from ._schedule import Every, instants

Others = list[jax.Array]
"""Floating arrays that are no parameters and travel with them, such as batch statistics."""

Step = Callable[..., tuple[PyTree, Others, PyTree]]
"""`step(updates, others, state, params, ...)`: see `TransformSpec.exchange`."""


def _only_parameters(state: PyTree, y: PyTree) -> tuple[PyTree, jax.Array | None]:
    del state
    return y, None


def _unchanged(state: PyTree) -> PyTree:
    return state


def _own_parameters(state: PyTree) -> list[tuple[Any, PyTree | None]]:
    del state
    return [(1.0, None)]


def _no_shards(state: PyTree) -> list[Any]:
    del state
    return []


_UNKNOWN: Any = None  # until there is a transform, which is what they are made from


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformSpec:
    """What a parameter transform tells, beside optax's pair, to other transforms and to the step.

    Attributes:
      phase: `phase(t, skipped=0)` on the host: the events of update t = 1, 2, ... as a hashable
        tuple of names; `()` exchanges nothing. `skipped`: in how many updates before t its exchange
        was skipped (`communicate=False`); gossip does not rotate in those. Slow steps with an exact
        average do not count: gossip does not rotate in them anyway.
      due: `due(t)`: whether update t exchanges anything, for an int or an array.
      schedules: when it exchanges by itself, then what else its phases repeat with.
      state: class of its state, which no other transform uses. None: that of the first state that
        is made, if it is a NamedTuple of its own.
      axes: names of all mapped axes over which it exchanges.
      local_axes: names of those inside a replica, whose devices share an exchange.
      skipped: `skipped(state)`: see `phase`, from the state of one replica; None where phases do
        not ask for it.
      exchange: `exchange(updates, others, state, params, ...)`, `update` that also takes a list of
        other floating arrays, such as batch statistics, and returns `(updates, others, state)`. In
        an update that averages the parameters, these are averaged too, over the same axes and with
        the same weights; in others they stay as they are. `js.make_train_step` calls it.
      numerator: `numerator(state, y) -> (x, w)`: the weighted parameters and their weight, whose
        sums over replicas give the exact mean; w is None where it is always 1.
      reset: `reset(state)`: the state after all replicas were set to one mean.
      permit: `permit(state, y, others, axes) -> (allowed, state)`: asked by who wraps it before an
        exchange of its own over `axes`, which takes place if all allow it; None allows all.
      anchor: `anchor(state, params)`: the anchor as a tree, under the axis; None without one.
      sized: `sized(axis_sizes)`: the same transform for axes of known sizes, by name. That fixes
        what depends on them: the graph that `js.sgp` chooses by itself.
      with_specs: `with_specs(param_specs)`: the same transform for parameters of which the layout
        over automatic axes is known; specs that it was made with stay, and so does the layout of
        its state. Where it says `shards_whole_leaves`, `of_state=True` gives the state that layout
        too, before there is one.
      shards_whole_leaves: whether it keeps shards of leaves and was given no specs, so that it
        gathers leaves that are sharded over Auto axes inside a replica (types tell of others).
      shard_specs: `PartitionSpec` per leaf (or prefix of the tree) by which it cuts what it keeps
        in shards, if it was given any. It is part of the layout of its state.
      wants_learning_rate: whether each update must be told the optimizer's rate, `learning_rate=`.
      shards: `shards(state)`: the leaves of which each replica keeps another part.
      carry: `carry(state, params, old, new)` on the host, for checkpoints: the state of all
        replicas, NumPy arrays stacked on placement `old`, as it is on `new` once all parameters are
        the consensus; where the number of replicas is the same, in another layout only. Given
        shapes and dtypes of one copy of the parameters.
      like_on: `like_on(state, params, at)` likewise: of the types of a state those that it has on
        placement `at`, where shards are others in number and shape.
      shares: `shares(state)` likewise: pairs of weights (replicas,) and stacked parameters, None
        for the replicas' own, whose weighted mean is the consensus.
    """

    phase: Callable[..., Phase]
    due: Callable[[Any], Any]
    schedules: tuple[Every, ...]
    state: type | None = None
    axes: tuple[str, ...] = ()
    local_axes: tuple[str, ...] = ()
    skipped: Callable[[PyTree], Any] | None = None
    exchange: Step = _UNKNOWN
    numerator: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]] = _only_parameters
    reset: Callable[[PyTree], PyTree] = _unchanged
    permit: Callable[[PyTree, PyTree, Others, Sequence[str]], tuple[Any, PyTree]] | None = None
    anchor: Callable[[PyTree, PyTree], PyTree] | None = None
    sized: Callable[[Mapping[str, int]], "ParameterTransform"] = _UNKNOWN
    with_specs: Callable[..., "ParameterTransform"] = _UNKNOWN
    shards_whole_leaves: bool = False
    shard_specs: PyTree | None = None
    wants_learning_rate: bool = False
    shards: Callable[[PyTree], list[Any]] = _no_shards
    carry: Carry = carry_plainly
    like_on: LikeOn = as_it_is
    shares: Shares = _own_parameters


class ParameterTransform(optax.GradientTransformationExtraArgs, TransformSpec):
    """An optax transform that comes last in a chain and moves the parameters themselves.

    With y = params + updates, `update` returns the update that lands on the new parameters: y where
    nothing is due. `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips what is due.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples; 0
      for one that has run out of data: its updates are dropped and averages leave it out (gossip
      passes on what it holds), so it follows the others. None: all alike.
    * `phase=None` decides inside the program (`lax.cond` on the counter in the state); a given
      phase is static, and the program holds that phase's collectives only.

    Beside optax's pair it has the attributes of `js.TransformSpec`, given by name where one is
    made: `phase`, `due` and `schedules` must be. The state is a NamedTuple with a field `count`: ()
    int32, updates so far.
    """

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        **told: Any,
    ) -> "ParameterTransform":
        """Make one from its functions, and from what it tells; None stands for the default."""
        told = {name: value for name, value in told.items() if value is not None}
        init = _registering(init, told.get("state"), told.get("carry", carry_plainly))
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        # What depends on nothing is the transform itself.
        told.setdefault("exchange", _parameters_only(update))
        told.setdefault("sized", lambda axis_sizes: self)
        told.setdefault("with_specs", lambda param_specs: self)
        TransformSpec.__init__(self, **told)
        return self

    def __init__(self, *args: Any, **told: Any) -> None:
        """Nothing is left to do, whatever the signature of a subclass is."""

    def phases(self) -> list[Phase]:
        """All phases that occur, in order of first appearance."""
        return list(dict.fromkeys(self.phase(t) for t in instants(self.schedules)))

    # Tuples are copied from their items alone, without what they have beside these.

    def __copy__(self) -> "ParameterTransform":
        return self._replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterTransform":
        return self._replace()  # functions, which are shared by copies of any depth

    def _replace(self, **changed: Any) -> "ParameterTransform":
        """A copy with another `init`, `update`, or something else to tell."""
        told = {field.name for field in dataclasses.fields(TransformSpec)}
        unknown = sorted(set(changed) - set(self._fields) - told)
        if unknown:
            raise ValueError(f"`_replace` takes {[*self._fields, *sorted(told)]}, got {unknown}.")
        init, update = (changed.get(name, getattr(self, name)) for name in self._fields)
        # States of another `init` may be of another class.
        state = changed.get("state", None if "init" in changed else self.state)
        if not changed.keys().isdisjoint({"init", "state", "carry"}):
            init = _registering(init, state, changed.get("carry", self.carry))
        # Not through the constructor: a subclass may have another signature.
        new = tuple.__new__(type(self), (init, update))
        new.__dict__.update(self.__dict__, state=state)
        if "update" in changed:  # the step builder shall not go past it
            new.__dict__["exchange"] = _parameters_only(changed["update"])
        if changed:  # what is derived from it has the same functions
            sized, with_specs = self.sized, self.with_specs
            new.__dict__["sized"] = lambda axis_sizes: sized(axis_sizes)._replace(**changed)
            new.__dict__["with_specs"] = lambda specs, **told: with_specs(specs, **told)._replace(
                **changed
            )
        new.__dict__.update({name: value for name, value in changed.items() if name in told})
        return new


def _registering(
    init: Callable[[PyTree], PyTree], kind: type | None, carry: Carry
) -> Callable[[PyTree], PyTree]:
    """`init`, of whose states the class is registered: now if it is known, else by the first."""
    # A carry of its own means that the state can't be moved leaf by leaf.
    needs_owner = carry is not carry_plainly
    if kind is not None:
        register_state(kind, "parameters", needs_owner=needs_owner)
        return init

    def learning_init(params: PyTree) -> PyTree:
        state = init(params)
        learn_state(state, needs_owner=needs_owner)
        return state

    return learning_init


def _parameters_only(update: Callable[..., tuple[PyTree, PyTree]]) -> Step:
    """`exchange` of a transform that knows nothing of other arrays."""

    def exchange(
        updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, Others, PyTree]:
        if others:
            raise ValueError(
                "a ParameterTransform of your own needs an `exchange` to average model state with "
                'the parameters: give it one, or train with model_state="local".'
            )
        updates, state = update(updates, state, params, **extra)
        return updates, others, state

    return exchange


_outer_axes: contextvars.ContextVar[frozenset[str] | None] = contextvars.ContextVar(
    "outer_axes", default=None
)


@contextlib.contextmanager
def inside(axes: Iterable[str]) -> Iterator[None]:
    """Around the exchange of a transform inside another one over `axes`.

    What that one has checked and warned about is not for the inner one to say again.
    """
    token = _outer_axes.set((_outer_axes.get() or frozenset()) | frozenset(axes))
    try:
        yield
    finally:
        _outer_axes.reset(token)


def parameter_transform(
    owner: str,
    over: Sequence[Exchange],
    *,
    init: Callable[[PyTree], PyTree],
    step: Step,
    events: tuple[str, ...] | None,
    inner: ParameterTransform | None = None,
    like_init: Callable[[PyTree], PyTree] | None = None,
    packs: bool = True,
    **told: Any,
) -> ParameterTransform:
    """Assemble a `ParameterTransform` whose updates are checked.

    Args:
      owner: its public name, for messages.
      over: what it exchanges over, smallest group of replicas first, each with all axes of the one
        before.
      init: makes the state.
      step: `step(updates, others, state, params, *, communicate, weight, phase, **extra)`, as
        `TransformSpec.exchange`; given updates that are zero on an idle replica, and a weight that
        is None or () float32.
      events: names that a phase may hold; None leaves that to a transform inside.
      inner: a transform inside of it, which exchanges too.
      like_init: as `init`, of which only types matter, where that is sooner traced.
      packs: whether it packs leaves into buffers, which wants to know how they are sharded.
      **told: what else it tells; see `TransformSpec`.

    Raises:
      UserWarning: once, where leaves may be sharded inside a replica and no specs say how.
      ValueError: at trace time, from `update` and `exchange`: missing parameters, a phase or a
        state of something else, leaves that are not floating, an unbound axis, a weight that is no
        real scalar, parameters that are equal over an axis by their types.

    Communication: that of `step`.
    """
    warn = warn_once()
    everyone = over[-1]
    notice = LayoutNotice(owner, everyone, warn) if packs else None
    check_state = StateCheck(owner, init, like_init, everyone)

    def exchange(
        updates: PyTree,
        others: Others,
        state: PyTree,
        params: PyTree | None,
        *,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Others, PyTree]:
        # Cheap checks first, and none that needs the axis before it is known to be bound.
        check_update_arguments(owner, params, phase, events)
        check_floating(owner, params)
        outer = _outer_axes.get()
        for group in over:
            require_bound(owner, group)
            if not set(axis_names(group.axis_name)) <= (outer or frozenset()):  # which has warned
                warn_if_alone(owner, group, warn)
        if notice is not None:
            notice.at_update()
        share = check_weight(owner, weight)
        # The one around it has looked at the whole state, and at updates of idle replicas.
        if outer is None:
            check_state(state, params)
            updates = unless_idle(updates, share)
        check_varying(owner, params, updates, everyone.axis_name)
        now = {"communicate": communicate, "weight": share, "phase": phase}
        updates, others, after = step(updates, others, state, params, **now, **extra)
        # The types stay as they were, so that an update can be the body of a loop.
        return updates, others, match_varying(after, state)

    def noticing_init(params: PyTree) -> PyTree:
        if notice is not None:
            notice.at_init()
        return check_state.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        updates, _, state = exchange(updates, [], state, params, **extra)
        return updates, state

    for name in ("shards", "skipped"):  # asked of states that no update has looked at
        if told.get(name) is not None and told.get("state") is not None:
            told[name] = _of_own_state(owner, told["state"], told[name])
    if everyone.param_specs is not None and (inner is None or not inner.axes):
        told.pop("with_specs", None)  # specs that were given stay
    return ParameterTransform(
        noticing_init,
        update,
        exchange=exchange,
        # The largest group has all axes of the others.
        axes=_all_names([everyone.axis_name], () if inner is None else inner.axes),
        local_axes=_all_names(
            [group.local_axis_name or () for group in over],
            () if inner is None else inner.local_axes,
        ),
        **told,
    )


def _of_own_state(owner: str, kind: type, ask: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
    """`ask` for states of this class; for others it raises `ValueError`."""

    def asked(state: PyTree) -> Any:
        if not isinstance(state, kind):
            raise ValueError(
                f"{owner}: `state` must be what this transform's `init` makes, {kind.__name__}, "
                f"got {type(state).__name__}: was it made by another transform?"
            )
        return ask(state)

    return asked


def _all_names(axes: Iterable[AxisName], inner: tuple[str, ...]) -> tuple[str, ...]:
    own = [name for axis_name in axes for name in axis_names(axis_name)]
    return tuple(dict.fromkeys((*own, *inner)))


def phase_name(phase: Phase) -> str:
    """Name of a phase in reports: `"local"`, `"average"`, `"slow"`, `"average+slow"`, ...

    Args:
      phase: events, as `transform.phase(t)` returns them.

    Returns:
      The events joined by "+"; "local" for none.

    Example:
      >>> phase_name(()), phase_name(("average", "slow"))
      ('local', 'average+slow')

    Communication: none.
    """
    return "+".join(phase) or "local"
