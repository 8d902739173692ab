"""Over which axes a traced program communicates."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

# A conditional inside of others is met once per level.
_known: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_NOT_SENDING = {"axis_index", "pvary", "pcast"}  # name an axis, and send nothing


def collective_axes(jaxpr: Any, counts: Callable[[Any], bool] | None = None) -> frozenset[str]:
    """Names of the axes of all collectives in a jaxpr, those inside of it included.

    Args:
      jaxpr: of a traced program.
      counts: which equations are looked at, and into; None: all.

    Communication: none.
    """
    if counts is None and jaxpr in _known:
        return _known[jaxpr]
    found: set[str] = set()
    for equation in jaxpr.eqns:
        own: set[str] = set()
        for part in _parts(equation.params):
            own |= collective_axes(part, counts)
        # A nested shard_map binds axes of its own.
        own -= set(equation.params.get("manual_axes", ()))
        if equation.primitive.name not in _NOT_SENDING:
            for key in ("axes", "axis_name"):
                own |= _names(equation.params.get(key, ()))
        if own and (counts is None or counts(equation)):
            found |= own
    result = frozenset(found)
    if counts is None:
        _known[jaxpr] = result
    return result


def axes_sent_over(update: Callable[..., Any], *args: Any) -> frozenset[str]:
    """Names of the axes over which an update of these arguments communicates.

    None where it needs what comes with an update only, such as `value`.

    Communication: none; it is only traced.
    """
    try:
        return collective_axes(jax.make_jaxpr(update)(*args).jaxpr)
    except TypeError:
        return frozenset()


def _parts(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation holds."""
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            held = getattr(item, "jaxpr", item)
            if hasattr(held, "eqns"):
                yield held


def _names(axes: Any) -> set[str]:
    """Those that are names; positions, of arrays' own axes, are ints."""
    return {a for a in (axes if isinstance(axes, list | tuple) else (axes,)) if isinstance(a, str)}
