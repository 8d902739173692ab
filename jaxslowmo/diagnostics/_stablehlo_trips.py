"""How often a StableHLO `while` runs, where the program says so (as those of `lax.scan` do)."""

from typing import Any

import numpy as np


def trip_count(loop: Any) -> int | None:
    """Number of iterations of `for (i = start; i < stop; i += step)` with constant bounds.

    Args:
      loop: a `stablehlo.while` operation.

    Returns:
      The number of iterations, or None if the loop does not have this form.
    """
    condition, body = (next(iter(region.blocks)) for region in loop.regions)
    compare = _producer(_terminator(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    index = _argument_number(compare.operands[0], condition)
    if index is None:
        return None
    start = _constant(loop.operands[index])
    stop = _bound(compare.operands[1], condition, body, loop)
    step = _step(_terminator(body).operands[index], index, body)
    if start is None or stop is None or step is None or step < 1:
        return None
    return max(0, -(-(stop - start) // step))


def _bound(value: Any, condition: Any, body: Any, loop: Any) -> int | None:
    """A constant, or a carried value that starts as one and that the body hands on."""
    carried = _argument_number(value, condition)
    if carried is None:
        return _constant(value)
    if _argument_number(_terminator(body).operands[carried], body) != carried:
        return None
    return _constant(loop.operands[carried])


def _step(value: Any, index: int, body: Any) -> int | None:
    add = _producer(value)
    if add is None or add.name != "stablehlo.add":
        return None
    for counter, step in ((0, 1), (1, 0)):
        if _argument_number(add.operands[counter], body) == index:
            return _constant(add.operands[step])
    return None


def _terminator(block: Any) -> Any:
    return list(block.operations)[-1].operation


def _producer(value: Any) -> Any | None:
    owner = value.owner
    return getattr(owner, "operation", owner) if hasattr(owner, "name") else None


def _constant(value: Any) -> int | None:
    op = _producer(value)
    if op is None or op.name != "stablehlo.constant":
        return None
    array = np.asarray(op.attributes["value"])
    return int(array.ravel()[0]) if array.size == 1 else None


def _argument_number(value: Any, block: Any) -> int | None:
    for number, argument in enumerate(block.arguments):
        if argument == value:
            return number
    return None
