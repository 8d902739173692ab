"""How a parameter transform is assembled from its own arithmetic, and checked."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..._typing import AxisName, PyTree
from ..._warn import warn_once
from ...mesh import axis_names
from .._checks import CheckedStep, LayoutNotice, StateCheck
from .._exchange import Exchange, check_axis_argument
from ._spec import Step, TransformSpec, no_shards, with_values
from ._transform import ParameterTransform


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
    warn = warn_once()
    spec = with_values("parameter_transform", spec, named, ("spec",))
    # A transform of somebody's own packs nothing, and knows its axes by name alone.
    is_own = not over
    if is_own:
        check_axis_argument(owner, "spec.exchange.axes", spec.exchange.axes)
        over, packs = [Exchange(spec.exchange.axes)], False
    everyone, events = over[-1], spec.schedule.events
    checked = CheckedStep(
        owner,
        step,
        over,
        events,
        StateCheck(owner, init, like_init, everyone),
        LayoutNotice(owner, everyone, warn) if packs else None,
        warn,
        is_own,
    )
    saved, schedule, layout = spec.checkpoint, spec.schedule, spec.layout
    kind = saved.state
    if kind is not None:  # asked of states that no update has looked at
        if saved.shards is not no_shards:
            saved = replace(saved, shards=_of_own_state(owner, kind, saved.shards))
        if schedule.skipped is not None:
            skipped = _of_own_state(owner, kind, schedule.skipped)
            schedule = replace(schedule, skipped=skipped)
    if everyone.param_specs is not None and (inner is None or not inner.axes):
        layout = replace(layout, with_specs=None)  # specs that were given stay
    locals_ = [group.local_axis_name or () for group in over]
    exchanged = replace(
        spec.exchange,
        exchange=checked.exchange,
        # The largest group has all axes of the others.
        axes=_all_names([everyone.axis_name], () if inner is None else inner.axes),
        local_axes=_all_names(locals_, () if inner is None else inner.local_axes),
    )
    return ParameterTransform(
        checked.init,
        checked.update,
        TransformSpec(schedule=schedule, exchange=exchanged, checkpoint=saved, layout=layout),
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
