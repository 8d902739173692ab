"""A parameter transform from its own arithmetic: what all of them check and keep is here."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._typing import AxisName, Phase, PyTree
from .._warn import warn_once
from ..mesh import axis_names, match_varying
from ..tree import check_floating
from ._checks import (
    StateCheck,
    check_axes,
    check_update_arguments,
    check_varying,
    check_weight,
    unless_idle,
)
from ._due import Communicate
from ._protocol import Exchange, Others, ParameterTransform

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
    groups: tuple[AxisName, ...],
    *,
    init: Callable[[PyTree], PyTree],
    exchange: Exchange,
    events: tuple[str, ...] | None,
    local_axis_name: AxisName | None = None,
    inner_axes: tuple[str, ...] = (),
    like_init: Callable[[PyTree], PyTree] | None = None,
    **told: Any,
) -> ParameterTransform:
    """Assemble a `ParameterTransform` whose updates are checked.

    Args:
      owner: its public name, for messages.
      groups: over which axes it exchanges, smallest group first, each with all axes of the one
        before.
      init: makes the state.
      exchange: `exchange(updates, others, state, params, *, communicate, weight, phase, **extra)`,
        as `ParameterTransform.exchange`; given updates that are zero on an idle replica, and a
        weight that is None or () float32.
      events: names that a phase may hold; None leaves that to a transform inside.
      local_axis_name: axis of the devices inside a replica, if any.
      inner_axes: over which a transform inside of it exchanges.
      like_init: as `init`, of which only types matter, where that is sooner traced.
      **told: what else the protocol has; see `ParameterTransform`.

    Raises:
      ValueError: at trace time, from `update` and `exchange`: missing parameters, a phase or a
        state of something else, leaves that are not floating, an unbound axis, a weight that is no
        real scalar, parameters that are equal over an axis by their types.

    Communication: that of `exchange`.
    """
    warn = warn_once()
    check_state = StateCheck(owner, like_init or init)
    everyone = groups[-1]
    own_axes = axis_names(everyone)
    local_axes = () if local_axis_name is None else axis_names(local_axis_name)

    def checked(
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
        check_update_arguments(owner, params, phase, events)
        check_floating(owner, params)
        outer = _outer_axes.get()
        for axes in groups:
            check_axes(owner, axes, local_axis_name, warn, outer or frozenset())
        share = check_weight(owner, weight)
        if outer is None:
            check_state(state, params, (*own_axes, *local_axes))
            updates = unless_idle(updates, share)
        check_varying(owner, params, updates, everyone)
        updates, others, after = exchange(
            updates,
            others,
            state,
            params,
            communicate=communicate,
            weight=share,
            phase=phase,
            **extra,
        )
        # The types stay as they were, so that an update can be the body of a loop.
        return updates, others, match_varying(after, state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        updates, _, state = checked(updates, [], state, params, **extra)
        return updates, state

    return ParameterTransform(
        init,
        update_fn,
        exchange=checked,
        axes=tuple(dict.fromkeys((*own_axes, *inner_axes))),
        **told,
    )
