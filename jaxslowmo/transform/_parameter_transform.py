"""Parameter transforms: optax's pair of functions, what else one says, and how one is assembled."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from .._support.checks import warn_once
from .._support.types import Phase, PyTree
from ..mesh import axis_names
from ._checks import CheckedStep, LayoutNotice
from ._due import instants
from ._replica_exchange import Exchange, check_axis_argument
from ._spec import (
    _GROUPS,
    ExchangeSpec,
    Origin,
    Others,
    Step,
    TransformSpec,
    WithSpec,
    learn_state,
    register_state,
)
from ._transform_states import Carry, carry_plainly


@dataclass(frozen=True, init=False, eq=False, repr=False, match_args=False)
class ParameterTransform(WithSpec):
    """An optax transform that comes last in a chain and moves the parameters themselves.

    With y = params + updates, `update` returns the update that lands on the new parameters: y where
    nothing is due. `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips what is due.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples; 0
      for one that has run out of data: its updates are dropped and averages leave it out (gossip
      passes on what it holds), so it follows the others. None: all alike.
    * `phase=None` decides inside the program (`lax.cond` on the counter in the state); a given
      phase is static, and the program holds that phase's collectives only.

    Made as `js.ParameterTransform(init, update, spec)`; `js.parameter_transform` assembles one that
    checks what it is given. Values of the spec may be given and read by their names alone:
    `tx.phase` is `tx.spec.schedule.phase`. Without a spec `phase`, `due` and `schedules` must be
    given so. The state is a NamedTuple with a field `count`: () int32, updates so far.

    Attributes:
      spec: what it says beside optax's pair.

    Raises:
      ValueError: a `spec` that is no `js.TransformSpec`, a name that no group of it has, or no
        `phase`, `due` or `schedules`.
    """

    spec: TransformSpec

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        spec: TransformSpec | None = None,
        **named: Any,
    ) -> "ParameterTransform":
        """Make one from its functions and what it says; None stands for the default."""
        if spec is not None and not isinstance(spec, TransformSpec):
            raise ValueError(
                "ParameterTransform: `spec` must be a js.TransformSpec(schedule=..., "
                f"exchange=...), got {spec!r}."
            )
        spec = with_values("ParameterTransform", spec, named, ("init", "update", "spec"))
        return cls._of(init, update, spec)

    def __init__(self, *args: Any, **named: Any) -> None:
        """Nothing is left to do, whatever the signature of a subclass is."""

    @classmethod
    def _of(cls, init: Any, update: Any, spec: TransformSpec) -> "ParameterTransform":
        init = _registering(init, spec.checkpoint.state, spec.checkpoint.carry)
        if _is_past(update, spec):
            exchange = replace(spec.exchange, exchange=partial(_parameters_only, update))
            spec = replace(spec, exchange=exchange)
        # Without an origin itself, so that nothing refers to itself.
        if spec.origin is None:
            spec = replace(spec, origin=Origin(init, update, spec))
        # Not through the constructor: a subclass may have another signature.
        self = tuple.__new__(cls, (init, update))
        object.__setattr__(self, "spec", spec)
        return self

    def __getattr__(self, name: str) -> Any:
        """A value of the spec by its name alone."""
        # Only asked for what is nowhere else; also before there is a spec, as by pickle.
        if name in DEFAULTS:
            return value_of(self.spec, name)
        kind = type(self).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def sized(self, axis_sizes: Mapping[str, int]) -> "ParameterTransform":
        """See `LayoutSpec.sized`."""
        sized = self.spec.layout.sized
        return self if sized is None else self._changed_alike(sized(axis_sizes))

    def with_specs(self, param_specs: PyTree, **options: bool) -> "ParameterTransform":
        """See `LayoutSpec.with_specs`."""
        known = self.spec.layout.with_specs
        return self if known is None else self._changed_alike(known(param_specs, **options))

    def _changed_alike(self, made: "ParameterTransform") -> "ParameterTransform":
        """`made` by what this was at first, with what was changed since."""
        origin = cast("Origin", self.spec.origin)
        now = {"init": self.init, "update": self.update, **values_of(self.spec)}
        then = {"init": origin.init, "update": origin.update, **values_of(origin.spec)}
        # By identity: functions and trees of specs have no other.
        changed = {name: x for name, x in now.items() if x is not then[name]}
        return made._replace(**changed) if changed else made

    def phases(self) -> list[Phase]:
        """All phases that occur, in order of first appearance."""
        schedule = self.spec.schedule
        return list(dict.fromkeys(schedule.phase(t) for t in instants(schedule.schedules)))

    def _replace(self, **changed: Any) -> "ParameterTransform":
        """A copy with another `init`, `update`, `spec`, or other values of that."""
        init, update = changed.pop("init", self.init), changed.pop("update", self.update)
        spec = changed.pop("spec", self.spec)
        if init is not self.init:  # its states may be of another class
            changed.setdefault("state", None)
        spec = with_values("`_replace`", spec, changed, (*self._fields, "spec"))
        return self._of(init, update, spec)


def _registering(
    init: Callable[[PyTree], PyTree], kind: type | None, carry: Carry
) -> Callable[[PyTree], PyTree]:
    """`init`, of whose states the class is registered: now if it is known, else by the first."""
    # A carry of its own means that the state can't be moved leaf by leaf.
    needs_owner = carry is not carry_plainly
    if kind is not None:
        register_state(kind, "parameters", needs_owner=needs_owner)
        return init
    if isinstance(init, partial) and init.func is _learning and init.args[1] == needs_owner:
        return init  # of a transform that this one is a copy of
    return partial(_learning, init, needs_owner)


def _learning(init: Callable[[PyTree], PyTree], needs_owner: bool, params: PyTree) -> PyTree:
    """`init` of a transform that did not name the class of its states."""
    state = init(params)
    learn_state(state, needs_owner=needs_owner)
    return state


def _is_past(update: Callable[..., Any], spec: TransformSpec) -> bool:
    """Whether with the spec's `exchange` the step builder would go past `update`."""
    exchange, origin = spec.exchange.exchange, spec.origin
    if isinstance(exchange, partial) and exchange.func is _parameters_only:
        return exchange.args[0] is not update
    # An `exchange` that was made together with another one.
    if origin is not None and exchange is origin.spec.exchange.exchange:
        return update is not origin.update
    return exchange is None


def _parameters_only(
    update: Callable[..., tuple[PyTree, PyTree]],
    updates: PyTree,
    others: Others,
    state: PyTree,
    params: PyTree,
    **extra: Any,
) -> tuple[PyTree, Others, PyTree]:
    """`exchange` of a transform that knows nothing of other arrays, from its `update`."""
    if others:
        raise ValueError(
            "a ParameterTransform of your own needs an `exchange` to average model state with "
            'the parameters: give it one, or train with model_state="local".'
        )
    updates, state = update(updates, state, params, **extra)
    return updates, others, state


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


def parameter_transform(
    owner: str,
    init: Callable[[PyTree], PyTree],
    step: Step,
    spec: TransformSpec | None = None,
    *,
    over: Sequence[Exchange] = (),
    inner: ParameterTransform | None = None,
    like_init: Callable[[PyTree], PyTree] | None = None,
    packs: bool = True,
    **named: Any,
) -> ParameterTransform:
    """Assemble a `ParameterTransform` whose updates are checked, as those of this package are.

    The state is a NamedTuple of a class of its own, with a field `count`: () int32, the updates so
    far, which `step` counts. CONTRIBUTING.md has an example, "An algorithm".

    Args:
      owner: its public name, for messages.
      init: makes the state of parameters, whose leaves are floating.
      step: `step(updates, others, state, params, *, communicate, weight, phase, **extra)`, one
        update: returns `(updates, others, state)`, as `js.ExchangeSpec.exchange` does. It is given
        updates that are zero on an idle replica, those of half-precision leaves as float32 (unless
        `over` is given), and a weight that is None or () float32.
        `js.is_due` tells whether an event is due, and `js.run_if` exchanges only then.
      spec: what it says besides; its `exchange` is filled in. None: all is told by name.
      over: what it exchanges over, smallest group of replicas first, each with all axes of the one
        before; () for `spec.exchange.axes` as they are, without buffers. Its axes are filled in.
      inner: a transform inside of it, which exchanges too, over axes that are filled in.
      like_init: as `init`, of which only types matter, where that is sooner traced.
      packs: whether it packs leaves into the buffers of `over`, and wants to know how leaves are
        sharded.
      **named: values of the spec by their names alone, which go before those in it.

    Returns:
      A `ParameterTransform`.

    Raises:
      UserWarning: once, where leaves may be sharded inside a replica and no specs say how.
      ValueError: no axes, no `phase`, `due` or `schedules`, a name that no group of the spec has;
        at trace time, from `update` and `exchange`: missing parameters, a phase or a state of
        something else, leaves that are not floating, an unbound axis, a weight that is no real
        scalar, parameters that are equal over an axis by their types.

    Communication: that of `step`.
    """
    spec = with_values("parameter_transform", spec, named, ("spec",))
    # A transform of somebody's own packs nothing, and knows its axes by name alone.
    is_own = not over
    if is_own:
        check_axis_argument(owner, "spec.exchange.axes", spec.exchange.axes)
        over, packs = [Exchange(spec.exchange.axes)], False
    everyone, warn = over[-1], warn_once()
    notice = LayoutNotice(owner, everyone, warn) if packs else None
    checked = CheckedStep(
        owner, init, like_init or init, step, over, spec.schedule.events, notice, warn, is_own
    )
    held = ExchangeSpec() if inner is None else inner.spec.exchange
    local_axes = [name for group in over for name in axis_names(group.local_axis_name or ())]
    filled_in: dict[str, Any] = {
        "exchange": checked.exchange,
        # The largest group has all axes of the others.
        "axes": tuple(dict.fromkeys((*axis_names(everyone.axis_name), *held.axes))),
        "local_axes": tuple(dict.fromkeys((*local_axes, *held.local_axes))),
    }
    if spec.checkpoint.state is not None:  # asked of states that no update has looked at
        for name in ("shards", "skipped"):
            if (ask := value_of(spec, name)) is not DEFAULTS[name]:
                filled_in[name] = _of_own_state(owner, spec.checkpoint.state, ask)
    if everyone.param_specs is not None and not held.axes:
        filled_in["with_specs"] = None  # specs that were given stay
    return ParameterTransform(checked.init, checked.update, replace(spec, origin=None), **filled_in)


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


# Names differ between groups, so that each value is known by its name alone.
DEFAULTS = {f.name: f.default for kind in _GROUPS.values() for f in dataclasses.fields(kind)}


_GROUP_OF = {f.name: group for group, kind in _GROUPS.items() for f in dataclasses.fields(kind)}


def value_of(spec: TransformSpec, name: str) -> Any:
    """A value by its name alone, as `tx.phase` reads it."""
    return getattr(getattr(spec, _GROUP_OF[name]), name)


def values_of(spec: TransformSpec) -> dict[str, Any]:
    """The values of all groups by their names."""
    return {name: value_of(spec, name) for name in DEFAULTS}


def with_values(
    taker: str, spec: TransformSpec | None, named: Mapping[str, Any], besides: Iterable[str] = ()
) -> TransformSpec:
    """`spec`, or where there is none a new one, with these values; None stands for the default.

    Args:
      taker: what was given the names, for messages.
      spec: to be changed.
      named: values of all groups by their names.
      besides: what else the taker takes.

    Raises:
      ValueError: a name that no group has, or none for a value that has no default.
    """
    if unknown := sorted(set(named) - set(DEFAULTS)):
        raise ValueError(f"{taker} takes {[*besides, *sorted(DEFAULTS)]}, got {unknown}.")
    before = DEFAULTS if spec is None else values_of(spec)
    values = before | {n: DEFAULTS[n] if x is None else x for n, x in named.items()}
    if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
        raise ValueError(
            f"{taker} must be given {', '.join(f'`{name}`' for name in missing)}: by name, or as "
            "js.TransformSpec(schedule=js.ScheduleSpec(...), exchange=js.ExchangeSpec(...))."
        )
    groups: dict[str, Any] = {
        group: kind(**{f.name: values[f.name] for f in dataclasses.fields(kind)})
        for group, kind in _GROUPS.items()
    }
    return TransformSpec(**groups, origin=None if spec is None else spec.origin)
