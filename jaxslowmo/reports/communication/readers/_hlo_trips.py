"""How often a compiled loop runs: stated by the compiler, or read off its counter."""

import re

from ._hlo_text import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def trip_count(loop: Instruction, within: Computation, module: HloModule) -> int | None:
    """Number of iterations of a `while`, or None where the program does not tell.

    TPU code does not state it; there the form `for (i = start; i < stop; i += step)` with constant
    bounds is recognised.
    """
    if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(known[1])
    condition = module.computations.get(loop.attributes["condition"].lstrip("%"))
    body = module.computations.get(loop.attributes["body"].lstrip("%"))
    if condition is None or body is None:
        return None
    compare = condition.instruction(condition.root)
    if compare is None or compare.attributes.get("direction") != "LT":
        return None
    index = _tuple_index(compare.operands[0], condition)
    stop = _bound(compare.operands[1], condition, body, loop, within)
    if index is None or stop is None:
        return None
    start = _constant(_element(loop.operands[0], index, within), within)
    step = _step(_element(body.root, index, body), index, body)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(stop - start) // step))


def _bound(
    name: str, condition: Computation, body: Computation, loop: Instruction, within: Computation
) -> int | None:
    """A constant, or a carried value that starts as one and that the body hands on."""
    carried = _tuple_index(name, condition)
    if carried is None:
        return _constant(name, condition)
    handed_on = _element(body.root, carried, body)
    if handed_on is None or _tuple_index(handed_on, body) != carried:
        return None
    return _constant(_element(loop.operands[0], carried, within), within)


def _step(name: str | None, index: int, body: Computation) -> int | None:
    add = _behind_copies(name, body)
    if add is None or add.opcode != "add":
        return None
    for counter, step in (add.operands, add.operands[::-1]):
        if _tuple_index(counter, body) == index:
            return _constant(step, body)
    return None


def _behind_copies(name: str | None, within: Computation) -> Instruction | None:
    found = within.instruction(name) if name else None
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = within.instruction(found.operands[0])
    return found


def _element(tuple_name: str, index: int, within: Computation) -> str | None:
    made = _behind_copies(tuple_name, within)
    return made.operands[index] if made is not None and made.opcode == "tuple" else None


def _tuple_index(name: str, within: Computation) -> int | None:
    """The element of the carried tuple that a value is."""
    found = _behind_copies(name, within)
    if found is None or found.opcode != "get-tuple-element":
        return None
    carrier = within.instruction(found.operands[0])
    if carrier is None or carrier.opcode != "parameter":
        return None
    return int(found.attributes["index"])


def _constant(name: str | None, within: Computation) -> int | None:
    found = _behind_copies(name, within)
    if found is None or found.opcode != "constant" or not found.operands:
        return None
    text = found.operands[0]
    return int(text) if re.fullmatch(r"-?\d+", text) else None
