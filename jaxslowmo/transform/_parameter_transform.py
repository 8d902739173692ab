"""Parameter transforms: an optax transform with a `TransformSpec`, and functions to make one."""

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
    """An optax transform that comes last in a chain and sets the parameters themselves.

    Let y = params + updates. `update` returns the difference of the new parameters and `params`; if
    no exchange is due, the new parameters are y. Its signature is
    `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips a due exchange.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples. Use
      0 for a replica that has run out of data: its updates are dropped and averages leave it out
      (gossip passes on what it holds), so it follows the others. None weighs all replicas equally.
    * `phase`: the events of this update, a static tuple; the program then holds the collectives of
      these events only. With None the program decides (`lax.cond` on the counter in the state).

    Made as `js.ParameterTransform(init, update, spec)`; `js.parameter_transform` makes one that
    checks its arguments. Values of the spec can be passed and read by their names alone: `tx.phase`
    is `tx.spec.schedule.phase`. Without a spec, `phase`, `due` and `schedules` must be passed by
    name. The state is a NamedTuple with a field `count`: () int32, the number of updates so far.

    Attributes:
      spec: the `js.TransformSpec` that describes it.

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
        """Make a transform from its functions and its spec; None stands for a default value."""
        if spec is not None and not isinstance(spec, TransformSpec):
            raise ValueError(
                "ParameterTransform: `spec` must be a js.TransformSpec(schedule=..., "
                f"exchange=...), got {spec!r}."
            )
        spec = with_values("ParameterTransform", spec, named, ("init", "update", "spec"))
        return cls._of(init, update, spec)

    def __init__(self, *args: Any, **named: Any) -> None:
        """Do nothing: `__new__` does the work, and subclasses may have another signature."""

    @classmethod
    def _of(cls, init: Any, update: Any, spec: TransformSpec) -> "ParameterTransform":
        init = _registering(init, spec.checkpoint.state, spec.checkpoint.carry)
        if _is_past(update, spec):
            exchange = replace(spec.exchange, exchange=partial(_parameters_only, update))
            spec = replace(spec, exchange=exchange)
        # The spec in the origin has no origin, so that no object refers to itself.
        if spec.origin is None:
            spec = replace(spec, origin=Origin(init, update, spec))
        # The constructor is not called: a subclass may have another signature.
        self = tuple.__new__(cls, (init, update))
        object.__setattr__(self, "spec", spec)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return a value of the spec by its name alone."""
        # Python calls this for missing attributes only, and pickle does so before `spec` is set.
        if name in DEFAULTS:
            return value_of(self.spec, name)
        kind = type(self).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        """Return the factory, its arguments, and where the state is stored."""
        settings, stored = self.spec.settings, self.spec.layout.stored()
        text = f"a {type(self).__name__}"
        if settings is not None:
            given = {name: x for name, x in settings.arguments.items() if x is not None}
            arguments = ", ".join(f"{name}={x!r}" for name, x in given.items())
            text = f"js.{settings.factory}({arguments})"
        return f"<{text}; state: {stored}>" if stored else f"<{text}>"

    def sized(self, axis_sizes: Mapping[str, int]) -> "ParameterTransform":
        """Return the transform for axes of these sizes; see `LayoutSpec.sized`."""
        sized = self.spec.layout.sized
        return self if sized is None else self._with_changes(sized(axis_sizes))

    def with_specs(self, param_specs: PyTree, **options: bool) -> "ParameterTransform":
        """Return the transform for parameters with these layouts; see `LayoutSpec.with_specs`."""
        with_specs = self.spec.layout.with_specs
        return (
            self if with_specs is None else self._with_changes(with_specs(param_specs, **options))
        )

    def _with_changes(self, derived: "ParameterTransform") -> "ParameterTransform":
        """Return `derived`, made by the original transform, with the changes made to it since."""
        origin = cast("Origin", self.spec.origin)
        current = {"init": self.init, "update": self.update, **values_of(self.spec)}
        original = {"init": origin.init, "update": origin.update, **values_of(origin.spec)}
        # Compare by identity: functions and trees of specs have no other equality.
        changed = {name: x for name, x in current.items() if x is not original[name]}
        return derived._replace(**changed) if changed else derived

    def phases(self) -> list[Phase]:
        """Return all phases that occur, in order of first appearance."""
        schedule = self.spec.schedule
        return list(dict.fromkeys(schedule.phase(t) for t in instants(schedule.schedules)))

    def _replace(self, **changed: Any) -> "ParameterTransform":
        """Return a copy with another `init`, `update` or `spec`, or other values of the spec."""
        init, update = changed.pop("init", self.init), changed.pop("update", self.update)
        spec = changed.pop("spec", self.spec)
        if init is not self.init:  # its states may be of another class
            changed.setdefault("state", None)
        spec = with_values("`_replace`", spec, changed, (*self._fields, "spec"))
        return self._of(init, update, spec)


def _registering(
    init: Callable[[PyTree], PyTree], kind: type | None, carry: Carry
) -> Callable[[PyTree], PyTree]:
    """Return an `init` whose state class is registered: now if named, else by its first state."""
    # A custom carry means that the state cannot be moved leaf by leaf.
    needs_owner = carry is not carry_plainly
    if kind is not None:
        register_state(kind, "parameters", needs_owner=needs_owner)
        return init
    if isinstance(init, partial) and init.func is _learning and init.args[1] == needs_owner:
        return init  # wrapped already, for the transform that this one is a copy of
    return partial(_learning, init, needs_owner)


def _learning(init: Callable[[PyTree], PyTree], needs_owner: bool, params: PyTree) -> PyTree:
    """Call `init` of a transform that did not name its state class, and register the class."""
    state = init(params)
    learn_state(state, needs_owner=needs_owner)
    return state


def _is_past(update: Callable[..., Any], spec: TransformSpec) -> bool:
    """Return whether the spec's `exchange`, which the step builder calls, bypasses `update`."""
    exchange, origin = spec.exchange.exchange, spec.origin
    if isinstance(exchange, partial) and exchange.func is _parameters_only:
        return exchange.args[0] is not update
    # Neither is an unchanged `exchange` if `update` was replaced.
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
    """Exchange by `update`, for a transform without an `exchange`, which takes no other arrays."""
    if others:
        raise ValueError(
            "a ParameterTransform of your own needs an `exchange` to average model state with "
            'the parameters: give it one, or train with model_state="local".'
        )
    updates, state = update(updates, state, params, **extra)
    return updates, others, state


def phase_name(phase: Phase) -> str:
    """Return the name of a phase in reports: `"local"`, `"average"`, `"average+slow"`, ...

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

    The state is a NamedTuple of a class that no other transform uses, with a field `count`:
    () int32, the number of updates so far, which `step` increments. CONTRIBUTING.md has an example,
    "An algorithm".

    Args:
      owner: public name of the transform, for messages.
      init: `init(params) -> state`, called with parameters whose leaves are floating.
      step: `step(updates, others, state, params, *, communicate, weight, phase, **extra)`, one
        update: returns `(updates, others, state)`, as `js.ExchangeSpec.exchange` does. It receives
        updates that are zero on an idle replica, and float32 for half-precision leaves (unless
        `over` is given), and a weight that is None or () float32.
        `js.is_due` returns whether an event is due, and `js.run_if` exchanges only then.
      spec: the spec, in which `exchange` and axes are filled in. None: all values are in `named`.
      over: the groups that it exchanges over, smallest group of replicas first, each with all axes
        of the one before. The default, (), exchanges over `spec.exchange.axes` without buffers.
      inner: a transform that it wraps, which exchanges too; its axes are added to the spec.
      like_init: function with the result types of `init` that traces faster; the default is `init`.
      packs: whether it packs leaves into the buffers of `over`, and so needs to know how leaves are
        sharded.
      **named: values of the spec by their names alone, which replace those in `spec`.

    Returns:
      A `ParameterTransform`.

    Raises:
      UserWarning: once, if leaves may be sharded inside a replica and no specs say how.
      ValueError: no axes, no `phase`, `due` or `schedules`, a name that no group of the spec has;
        at trace time, from `update` and `exchange`: missing parameters, a phase or a state of
        another transform, leaves that are not floating, an unbound axis, a weight that is no real
        scalar, parameters that are equal over an axis by their types.

    Communication: that of `step`.
    """
    spec = with_values("parameter_transform", spec, named, ("spec",))
    # Without `over` it is a user's transform, which packs nothing and has only names of axes.
    is_custom = not over
    if is_custom:
        check_axis_argument(owner, "spec.exchange.axes", spec.exchange.axes)
        over, packs = [Exchange(spec.exchange.axes)], False
    largest, warn = over[-1], warn_once()
    notice = LayoutNotice(owner, largest, warn) if packs else None
    checked = CheckedStep(
        owner, init, like_init or init, step, over, spec.schedule.events, notice, warn, is_custom
    )
    inner_spec = ExchangeSpec() if inner is None else inner.spec.exchange
    local_axes = [name for group in over for name in axis_names(group.local_axis_name or ())]
    filled_in: dict[str, Any] = {
        "exchange": checked.exchange,
        # The largest group has all axes of the others.
        "axes": tuple(dict.fromkeys((*axis_names(largest.axis_name), *inner_spec.axes))),
        "local_axes": tuple(dict.fromkeys((*local_axes, *inner_spec.local_axes))),
    }
    if inner_spec.beside is not None and spec.exchange.beside is inner_spec.beside:
        # Copied with the spec of what it wraps, it reads a state of that.
        filled_in["beside"] = None
    if largest.param_specs is not None and not inner_spec.axes:
        filled_in["with_specs"] = None  # the user's specs are never replaced
    return ParameterTransform(checked.init, checked.update, replace(spec, origin=None), **filled_in)


# No two groups share a name, so that a value can be named without its group.
DEFAULTS = {f.name: f.default for kind in _GROUPS.values() for f in dataclasses.fields(kind)}


_GROUP_OF = {f.name: group for group, kind in _GROUPS.items() for f in dataclasses.fields(kind)}


def value_of(spec: TransformSpec, name: str) -> Any:
    """Return a value of the spec by its name alone, as `tx.phase` does."""
    return getattr(getattr(spec, _GROUP_OF[name]), name)


def values_of(spec: TransformSpec) -> dict[str, Any]:
    """Return the values of all groups by their names."""
    return {name: value_of(spec, name) for name in DEFAULTS}


def with_values(
    owner: str, spec: TransformSpec | None, named: Mapping[str, Any], more: Iterable[str] = ()
) -> TransformSpec:
    """Return a copy of `spec`, or a new spec, with these values; None stands for a default value.

    Args:
      owner: name of the function that received the names, for messages.
      spec: the spec to copy, or None for a new one.
      named: values of all groups by their names.
      more: names of other arguments of the function, for messages.

    Raises:
      ValueError: a name that no group has, or none for a value that has no default.
    """
    if unknown := sorted(set(named) - set(DEFAULTS)):
        raise ValueError(f"{owner} takes {[*more, *sorted(DEFAULTS)]}, got {unknown}.")
    before = DEFAULTS if spec is None else values_of(spec)
    values = before | {n: DEFAULTS[n] if x is None else x for n, x in named.items()}
    if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
        raise ValueError(
            f"{owner} must be given {', '.join(f'`{name}`' for name in missing)}: by name, or as "
            "js.TransformSpec(schedule=js.ScheduleSpec(...), exchange=js.ExchangeSpec(...))."
        )
    groups: dict[str, Any] = {
        group: kind(**{f.name: values[f.name] for f in dataclasses.fields(kind)})
        for group, kind in _GROUPS.items()
    }
    return TransformSpec(**groups, origin=None if spec is None else spec.origin)
