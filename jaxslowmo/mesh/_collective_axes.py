"""Over which axes a traced program communicates."""

from collections.abc import Iterator
from typing import Any

_NOT_SENDING = {"axis_index", "pvary", "pcast"}  # name an axis, and send nothing


def collective_axes(jaxpr: Any) -> frozenset[str]:
    """Names of the axes of all collectives in a jaxpr, those inside of it included.

    Communication: none.
    """
    found: set[str] = set()
    for equation in jaxpr.eqns:
        inside: set[str] = set()
        for part in _parts(equation.params):
            inside |= collective_axes(part)
        # A nested shard_map binds axes of its own.
        found |= inside - set(equation.params.get("manual_axes", ()))
        if equation.primitive.name not in _NOT_SENDING:
            for key in ("axes", "axis_name"):
                found |= _names(equation.params.get(key, ()))
    return frozenset(found)


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
