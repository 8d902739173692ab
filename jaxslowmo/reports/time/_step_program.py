"""The purpose of every instruction of a compiled step, read from the text of its program."""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ..._support.scopes import (
    ALL_REDUCE_GRADIENTS,
    ALL_REDUCE_ROWS,
    CLIP,
    EVERY_PHASE,
    GRADIENTS,
    LOSS_SCALE,
    METRICS,
    MODEL_STATE,
    SKIP_UNUSED,
    TIED,
)
from ..communication import COLLECTIVES, Instruction, parse_module, phase_of

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"


class Work(NamedTuple):
    """The work of an instruction."""

    compute: str = ""  # "forward", "backward" or "other"; "" if it computes nothing itself
    communication: str = ""  # what is exchanged; "" if nothing is
    ends: str = ""  # the instruction that began what this one waits for


# Scopes of the library around its exchanges, and the names of these in reports.
_SCOPES = (
    (ALL_REDUCE_GRADIENTS, GRADIENTS),
    (ALL_REDUCE_ROWS, GRADIENTS),
    (SKIP_UNUSED, "unused"),
    (MODEL_STATE, MODEL_STATE),
    (METRICS, METRICS),
    (LOSS_SCALE, LOSS_SCALE),
    (TIED, GRADIENTS),
    (CLIP, "norm"),
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COLLECTIVE = re.compile(rf"[ )](?:{'|'.join(COLLECTIVES)})(?:-start|-done)?\(")
_PRODUCT = re.compile(r"[ )](?:dot|convolution|fusion)\(")
# They last as long as the operations that they run, which have events of their own.
_LOOPS = ("while", "conditional")


class StepProgram:
    """The instructions of a compiled step by name.

    Args:
      text: `compiled.as_text()`.

    Attributes:
      name: name of the module.
    """

    def __init__(self, text: str) -> None:
        self._module = parse_module(text)
        header = re.match(r"HloModule ([^\s,]+)", text)
        self.name = header[1] if header else ""
        self._home = {
            name: computation
            for computation in self._module.computations.values()
            for name in computation.lines
        }
        self._work_by_name: dict[str, Work | None] = {}

    def work(self, name: str, seen: Collection[str] = ()) -> Work | None:
        """Return the work of an instruction; None for a name that the program does not have.

        Args:
          name: name of the instruction.
          seen: names of the instructions that were observed to run. A call whose callees ran is
            not counted in addition to them.
        """
        if name not in self._work_by_name:
            self._work_by_name[name] = self._work(name, seen)
        return self._work_by_name[name]

    def _work(self, name: str, seen: Collection[str]) -> Work | None:
        if name not in self._home:
            return None
        op = self._home[name].instruction(name)
        assert op is not None
        if op.opcode in _LOOPS:
            return Work()
        called = list(self._called_lines(op))
        base = re.sub(r"-(start|update|done)$", "", op.opcode)
        is_host = op.attributes.get("is_host_transfer") == "true"
        if base in COLLECTIVES and not is_host:
            return self._communication(op)
        if op.opcode == "call" and any(inner in seen for inner, _ in called):
            return Work()
        if base == "async" and not called and op.operands:  # an update or end names no computation
            begun = self.work(op.operands[0], seen)
            if begun is not None and begun.communication:
                return self._communication(op)
        if any(_COLLECTIVE.search(line) for _, line in called):
            # TPU spreads a collective over fusions that compute; others only wrap one.
            both = op.opcode == "fusion" and any(_PRODUCT.search(line) for _, line in called)
            work = self._communication(op)
            return work._replace(compute=_pass_of(self._scope(op))) if both else work
        return Work(compute=_pass_of(self._scope(op)))

    def _communication(self, op: Instruction) -> Work:
        ends = _begun_by(op)
        begun = self.work(ends) if ends else None
        exchange = begun.communication if begun is not None else ""
        return Work(communication=exchange or self._exchange(op), ends=ends)

    def _called_lines(self, op: Instruction) -> Iterator[tuple[str, str]]:
        for key in ("calls", "to_apply"):
            called = self._module.computations.get(op.attributes.get(key, "").strip().lstrip("%"))
            if called is not None:
                yield from called.lines.items()

    def _scope(self, op: Instruction) -> str:
        """Return the scope of an instruction, or the most common scope of what it calls."""
        if stated := _OP_NAME.search(op.attributes.get("metadata", "")):
            return stated[1]
        inner = Counter(
            match[1] for _, line in self._called_lines(op) if (match := _OP_NAME.search(line))
        )
        return inner.most_common(1)[0][0] if inner else ""

    def _exchange(self, op: Instruction) -> str:
        carried = (line for _, line in self._called_lines(op) if _COLLECTIVE.search(line))
        inner = next(filter(None, map(_OP_NAME.search, carried)), None)
        scope = inner[1] if inner else self._scope(op)
        phase = phase_of(scope)
        home = self._home[op.name]
        if phase is None and not scope and home.name != self._module.entry:
            # Compilers insert collectives without a scope; in a branch of one phase they are its.
            phase = home.only_phase()
        if phase is not None:
            return MODEL_STATE if phase == EVERY_PHASE else phase
        named = (name for part, name in _SCOPES if part in scope)
        return next(named, _pass_of(scope))


def _begun_by(op: Instruction) -> str:
    is_end = op.opcode.endswith("-done") or op.name.startswith("async-collective-done")
    return op.operands[0] if is_end and op.operands else ""


def _pass_of(scope: str) -> str:
    """Forward or backward pass: jax names the transformations that made an operation."""
    if "transpose(" in scope:
        return BACKWARD
    return FORWARD if "jvp(" in scope else OTHER
