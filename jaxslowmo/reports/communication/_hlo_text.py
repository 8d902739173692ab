"""A parser of HLO text: computations, instructions, types and the trip counts of loops."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..._support.scopes import PHASE

_COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)$")
# A type may be a tuple, whose brackets may be nested; no element of it looks like an opcode.
_INSTRUCTION = re.compile(r"(\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?=,|$)(.*)")
_CALLED = re.compile(r", (?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|[^,]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_ELEMENT = re.compile(r"([a-z]+?)(\d+)(e\w+)?")
_KINDS = {"bf": "bfloat", "c": "complex", "f": "float", "s": "int", "u": "uint"}
_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Transformations wrap scope names, as in "transpose(jvp(phase:slow))", hence the brackets.
_PHASE = re.compile(rf"{PHASE}([^/()]+)")


def parse_phase(scope: str) -> str | None:
    """Return the innermost phase that a scope path names, if any.

    >>> parse_phase("jit(f)/cond/branch_1_fun/phase:slow/phase:average/psum")
    'average'
    """
    phases = _PHASE.findall(scope)
    return phases[-1] if phases else None


def parse_scope(text: str) -> str:
    """Return the scope path in the text of an instruction; "" without one."""
    match = _OP_NAME.search(text)
    return match[1] if match else ""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name = type opcode(inside), attributes`."""

    name: str
    type: str
    opcode: str
    inside: str
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @cached_property
    def callees(self) -> list[str]:
        """The names of the computations that it calls, in the order of the text."""
        return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(self.attributes)))


@dataclass
class Computation:
    """A computation; instructions are kept as text and parsed when asked for."""

    name: str
    lines: dict[str, str] = field(default_factory=dict)
    root: str = ""

    def instruction(self, name: str) -> Instruction:
        """Parse one instruction."""
        match = _INSTRUCTION.match(self.lines[name])
        assert match is not None, self.lines[name]
        return Instruction(name, *match.groups())

    def select(self, pattern: re.Pattern[str]) -> Iterator[Instruction]:
        """Return the instructions in whose text a pattern is found, in program order."""
        return (self.instruction(name) for name, text in self.lines.items() if pattern.search(text))

    def skip_copies(self, name: str) -> Instruction:
        """Return the instruction that computes a value, without copies of it."""
        instruction = self.instruction(name)
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instruction(instruction.operands[0])
        return instruction

    def only_phase(self) -> str | None:
        """Return the one phase that its instructions name; None if they name several or none."""
        phases = {parse_phase(parse_scope(text)) for text in self.lines.values()} - {None}
        return phases.pop() if len(phases) == 1 else None


@dataclass(frozen=True)
class HloModule:
    """An HLO module: its first line, its computations by name and the name of the first to run."""

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def num_devices(self) -> int:
        """The number of devices that the module is written for."""
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.header)
        return math.prod(map(int, counts))


def parse_module(text: str) -> HloModule:
    """Split the text of a module into computations."""
    computations: dict[str, Computation] = {}
    entry = ""
    current = Computation("")
    for line in text.splitlines():
        if match := _LINE.match(line):
            current.lines[match[2]] = match[3]
            current.root = match[2] if match[1] else current.root
        elif match := _COMPUTATION.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = match[2] if match[1] else entry
    return HloModule(text.partition("\n")[0], computations, entry)


def shapes(type_text: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of every array in a type; layouts are ignored.

    Dtypes have their names in jax. Types narrower than a byte are packed.

    >>> shapes("(bf16[8,128]{1,0:T(8,128)S(1)}, u32[], f8e4m3fn[2])")
    [('bfloat16', 2048), ('uint32', 4), ('float8_e4m3fn', 2)]
    """
    arrays = []
    for element, dims in _SHAPE.findall(type_text):
        name, bits = {"pred": ("bool", 8)}.get(element, (element, 0))
        if match := _ELEMENT.fullmatch(element):
            kind, width, layout = match.groups()
            name = _KINDS.get(kind, kind) + width + (f"_{layout}" if layout else "")
            bits = int(width)
        size = math.prod(int(d) for d in re.findall(r"\d+", dims))
        arrays.append((name, (size * bits + 7) // 8))
    return arrays


class _CarryIndex(NamedTuple):
    """The index of a value that a loop carries from iteration to iteration."""

    index: int


def trip_count(loop: Instruction, within: Computation, module: HloModule) -> int | None:
    """Return the number of iterations of a `while`, or None where the program does not say so.

    Only CPU and GPU code state it. Elsewhere `for (i = start; i < stop; i += step)` is recognised,
    whose `stop` is a constant, or a carried value that does not change.
    """
    if stated := _KNOWN_TRIP_COUNT.search(loop.attributes):
        return int(stated[1])
    condition, body = (module.computations[name] for name in loop.callees)
    compare = condition.instruction(condition.root)
    if ", direction=LT" not in compare.attributes:
        return None
    counter, stop = (_value(name, condition) for name in compare.operands)
    starts, ends = within.skip_copies(loop.operands[0]), body.skip_copies(body.root)
    if not isinstance(counter, _CarryIndex) or {starts.opcode, ends.opcode} != {"tuple"}:
        return None
    if isinstance(stop, _CarryIndex):
        stays = _value(ends.operands[stop.index], body) == stop
        stop = _value(starts.operands[stop.index], within) if stays else None
    start = _value(starts.operands[counter.index], within)
    total = body.skip_copies(ends.operands[counter.index])
    terms = [_value(name, body) for name in total.operands] if total.opcode == "add" else []
    step = sum(term for term in terms if isinstance(term, int)) if counter in terms else 0
    if not isinstance(start, int) or not isinstance(stop, int) or step <= 0:
        return None
    return max(0, -(-(stop - start) // step))


def _value(name: str, within: Computation) -> int | _CarryIndex | None:
    """Return a constant integer, or the index of a carried value; None for other values."""
    op = within.skip_copies(name)
    if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.inside):
        return int(op.inside)
    if op.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", op.attributes)
        if index and within.instruction(op.operands[0]).opcode == "parameter":
            return _CarryIndex(int(index[1]))
    return None
