"""Parameter transforms: optax's pair of functions, and what else one says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import optax

from ..._typing import Phase, PyTree
from .._placement import Carry, carry_plainly
from .._registry import learn_state, register_state
from .._schedule import instants
from ._spec import DEFAULTS, Origin, Others, TransformSpec, value_of, with_values


@dataclass(frozen=True, init=False, eq=False, repr=False, match_args=False)
class ParameterTransform(optax.GradientTransformationExtraArgs):
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
            exchange = replace(spec.exchange, exchange=_ParametersOnly(update))
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
        now = {name: value_of(self.spec, name) for name in DEFAULTS}
        then = {name: value_of(origin.spec, name) for name in DEFAULTS}
        now |= {"init": self.init, "update": self.update}
        then |= {"init": origin.init, "update": origin.update}
        # By identity: functions and trees of specs have no other.
        changed = {name: x for name, x in now.items() if x is not then[name]}
        return made._replace(**changed) if changed else made

    def phases(self) -> list[Phase]:
        """All phases that occur, in order of first appearance."""
        schedule = self.spec.schedule
        return list(dict.fromkeys(schedule.phase(t) for t in instants(schedule.schedules)))

    # Tuples are copied from their items alone, without what they have beside these.

    def __copy__(self) -> "ParameterTransform":
        return self._replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterTransform":
        return self._replace()  # functions, which are shared by copies of any depth

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
    if isinstance(init, _LearningInit) and init.needs_owner == needs_owner:
        return init  # of a transform that this one is a copy of
    return _LearningInit(init, needs_owner)


@dataclass(frozen=True, eq=False)
class _LearningInit:
    """`init` of a transform that did not name the class of its states."""

    init: Callable[[PyTree], PyTree]
    needs_owner: bool

    def __call__(self, params: PyTree) -> PyTree:
        state = self.init(params)
        learn_state(state, needs_owner=self.needs_owner)
        return state


def _is_past(update: Callable[..., Any], spec: TransformSpec) -> bool:
    """Whether with the spec's `exchange` the step builder would go past `update`."""
    exchange, origin = spec.exchange.exchange, spec.origin
    if exchange is None or isinstance(exchange, _ParametersOnly):
        return exchange is None or exchange.update is not update
    # An `exchange` that was made together with another one.
    if origin is None or exchange is not origin.spec.exchange.exchange:
        return False
    return update is not origin.update


@dataclass(frozen=True, eq=False)
class _ParametersOnly:
    """`exchange` of a transform that knows nothing of other arrays."""

    update: Callable[..., tuple[PyTree, PyTree]]

    def __call__(
        self, updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, Others, PyTree]:
        if others:
            raise ValueError(
                "a ParameterTransform of your own needs an `exchange` to average model state with "
                'the parameters: give it one, or train with model_state="local".'
            )
        updates, state = self.update(updates, state, params, **extra)
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
