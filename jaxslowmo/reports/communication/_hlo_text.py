"""A parser of HLO text: computations, instructions, types and the turns of loops."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ._collectives import Carried, Term, dtype_of, num_bytes, num_turns, phase_of

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_KNOWN_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_DEPTH = dict.fromkeys("({[", 1) | dict.fromkeys(")}]", -1)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]


@dataclass
class Computation:
    """A computation; instructions are kept as text and parsed when asked for."""

    name: str
    lines: dict[str, str] = field(default_factory=dict)
    root: str = ""

    def instruction(self, name: str) -> Instruction | None:
        return parse_instruction(name, self.lines[name]) if name in self.lines else None

    def type_of(self, name: str) -> str:
        return _split_type(self.lines.get(name, ""))[0]

    def only_phase(self) -> str | None:
        """Return the one phase that its instructions name; None if they name several or none."""
        scopes = filter(None, map(_OP_NAME.search, self.lines.values()))
        phases = {phase_of(match[1]) for match in scopes} - {None}
        return phases.pop() if len(phases) == 1 else None

    def select(self, opcodes: re.Pattern[str]) -> Iterator[Instruction]:
        """Yield the instructions whose text contains a match, in program order."""
        for name, text in self.lines.items():
            if opcodes.search(text):
                yield parse_instruction(name, text)


@dataclass(frozen=True)
class HloModule:
    """An HLO module: its computations by name and the number of devices it is written for."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int


def parse_module(text: str) -> HloModule:
    """Split the text of a module into computations."""
    computations: dict[str, Computation] = {}
    entry, devices = "", 1
    current: Computation | None = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            for key in ("replica_count", "num_partitions"):
                match = re.search(rf"\b{key}=(\d+)", line)
                devices *= int(match[1]) if match else 1
        elif line.startswith("}"):
            current = None
        elif current is not None:
            if match := _INSTRUCTION.match(line):
                current.lines[match[2]] = match[3]
                if match[1]:
                    current.root = match[2]
        elif match := _COMPUTATION.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = match[2] if match[1] else entry
    return HloModule(computations, entry, devices)


def _end(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; quotes are skipped."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _DEPTH.get(token[0], 0)
        if not depth:
            return token.end()
    return len(text)


def _split(text: str) -> list[str]:
    """Split a text at commas outside brackets and quotes."""
    parts, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += _DEPTH.get(token[0], 0)
        if token[0] == "," and not depth:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _split_type(text: str) -> tuple[str, str]:
    end = _end(text, 0) if text.startswith("(") else text.find(" ")
    return (text, "") if end < 0 else (text[:end], text[end:].strip())


def parse_instruction(name: str, text: str) -> Instruction:
    """Parse an instruction from the text after `name = `."""
    kind, rest = _split_type(text)
    opening = rest.find("(")
    closing = _end(rest, opening)
    operands = re.sub(r"/\*.*?\*/", "", rest[opening + 1 : closing - 1])
    attributes: dict[str, str] = {}
    for part in _split(rest[closing:]):
        key, _, value = part.partition("=")
        if key == "device_ids":  # belongs to a mesh in replica_groups, in spite of the comma
            attributes["replica_groups"] += ", " + part
        else:
            attributes[key] = value
    return Instruction(
        name,
        kind,
        rest[:opening],
        # Some printers repeat the type before the name of an operand.
        tuple(operand.split()[-1].lstrip("%") for operand in _split(operands)),
        attributes,
    )


def shapes(type_text: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of every array in a type; layouts are ignored.

    >>> shapes("(bf16[8,128]{1,0:T(8,128)S(1)}, u32[])")
    [('bfloat16', 2048), ('uint32', 4)]
    """
    arrays = []
    for element, dims in _SHAPE.findall(type_text):
        sizes = [int(d) for d in re.findall(r"\d+", dims)]
        arrays.append((dtype_of(element)[0], num_bytes(element, sizes)))
    return arrays


def trip_count(loop: Instruction, within: Computation, module: HloModule) -> int | None:
    """Return the number of iterations of a `while`, or None where the program does not say so.

    TPU code does not state it; there the form `for (i = start; i < stop; i += step)` with constant
    bounds is recognised.
    """
    if stated := _KNOWN_TURNS.search(loop.attributes.get("backend_config", "")):
        return int(stated[1])
    condition = module.computations.get(loop.attributes["condition"].lstrip("%"))
    body = module.computations.get(loop.attributes["body"].lstrip("%"))
    if condition is None or body is None:
        return None
    compare = condition.instruction(condition.root)
    if compare is None or compare.attributes.get("direction") != "LT":
        return None
    return num_turns(
        [_term(name, condition) for name in compare.operands],
        lambda i: _term(_element(loop.operands[0], i, within), within),
        lambda i: _term(_element(body.root, i, body), body),
    )


def _term(name: str | None, within: Computation, *, sums: bool = True) -> Term:
    """Return what a value is for `num_turns`; what a computation carries is a tuple."""
    instruction = _behind_copies(name, within)
    if instruction is None or not instruction.operands:
        return None
    if instruction.opcode == "constant":
        text = instruction.operands[0]
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    if instruction.opcode == "get-tuple-element":
        carrier = within.instruction(instruction.operands[0])
        is_carried = carrier is not None and carrier.opcode == "parameter"
        return Carried(int(instruction.attributes["index"])) if is_carried else None
    if instruction.opcode == "add" and sums:
        return [_term(operand, within, sums=False) for operand in instruction.operands]
    return None


def _behind_copies(name: str | None, within: Computation) -> Instruction | None:
    instruction = within.instruction(name) if name else None
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = within.instruction(instruction.operands[0])
    return instruction


def _element(tuple_name: str, index: int, within: Computation) -> str | None:
    instruction = _behind_copies(tuple_name, within)
    return (
        instruction.operands[index]
        if instruction is not None and instruction.opcode == "tuple"
        else None
    )
