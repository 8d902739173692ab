"""The purpose of every instruction of a compiled step, read from the text of its program."""

import re
from collections import Counter
from collections.abc import Collection
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
from ..communication import COLLECTIVES, Instruction, parse_module, phase_of, scope_of

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"


class Work(NamedTuple):
    """The work of an instruction."""

    compute: str = ""  # "forward", "backward" or "other"; "" if it computes nothing itself
    communication: str = ""  # what is exchanged; "" if nothing is
    ends: str = ""  # the instruction that began what this one waits for


# Scopes of the library around its exchanges, and the names of these in reports.
_SCOPES = {
    ALL_REDUCE_GRADIENTS: GRADIENTS,
    ALL_REDUCE_ROWS: GRADIENTS,
    SKIP_UNUSED: "unused",
    MODEL_STATE: MODEL_STATE,
    METRICS: METRICS,
    LOSS_SCALE: LOSS_SCALE,
    TIED: GRADIENTS,
    CLIP: "norm",
}
_COLLECTIVE = re.compile(rf"[ )](?:{'|'.join(COLLECTIVES)})(?:-start|-done)?\(")
_PRODUCT = re.compile(r"[ )](?:dot|convolution|fusion)\(")


class StepProgram:
    """The instructions of a compiled step by name.

    Args:
      text: `compiled.as_text()`.

    Attributes:
      name: name of the module.
    """

    def __init__(self, text: str) -> None:
        self._module = parse_module(text)
        self.name = "".join(re.findall(r"^HloModule ([^\s,]+)", self._module.header))
        computations = self._module.computations.values()
        self._home = {name: home for home in computations for name in home.lines}
        self._work_by_name: dict[str, Work] = {}

    def work(self, name: str, seen: Collection[str] = ()) -> Work | None:
        """Return the work of an instruction; None for a name that the program does not have.

        Args:
          name: name of the instruction.
          seen: names of the instructions that were observed to run. A call whose callees ran is
            not counted in addition to them.
        """
        if name not in self._home:
            return None
        if name not in self._work_by_name:
            self._work_by_name[name] = self._work(self._home[name].instruction(name), seen)
        return self._work_by_name[name]

    def _work(self, op: Instruction, seen: Collection[str]) -> Work:
        if op.opcode in ("while", "conditional"):
            return Work()  # lasts as long as the operations that it runs, which have events
        homes = (self._module.computations[name] for name in op.called)
        inner = {name: line for home in homes for name, line in home.lines.items()}
        if op.opcode == "call" and any(name in seen for name in inner):
            return Work()
        scopes = Counter(filter(None, map(scope_of, inner.values())))
        scope = scope_of(op.attributes) or "".join(name for name, _ in scopes.most_common(1))
        carried = [line for line in inner.values() if _COLLECTIVE.search(line)]
        base = re.sub(r"-(start|update|done)$", "", op.opcode)
        goes_on = base == "async" and not op.called  # an update or end names no computation
        ends = op.opcode.endswith("-done") or op.name.startswith("async-collective-done")
        begun = self.work(op.operands[0]) if (ends or goes_on) and op.operands else None
        exchange = begun.communication if begun else ""
        sends = carried or (base in COLLECTIVES and ", is_host_transfer=true" not in op.attributes)
        if not (exchange if goes_on else sends):
            return Work(compute=_pass_of(scope))
        # TPU spreads a collective over fusions that compute; others only wrap one.
        computes = op.opcode == "fusion" and any(map(_PRODUCT.search, inner.values()))
        return Work(
            compute=_pass_of(scope) if computes else "",
            communication=exchange or self._exchange(op, [*map(scope_of, carried), scope]),
            ends=op.operands[0] if ends and op.operands else "",
        )

    def _exchange(self, op: Instruction, scopes: list[str]) -> str:
        scope = next(filter(None, scopes), "")
        phase, home = phase_of(scope), self._home[op.name]
        if not scope and home.name != self._module.entry:
            # Compilers insert collectives without a scope; in a branch of one phase they are its.
            phase = home.only_phase()
        if phase is not None:
            return MODEL_STATE if phase == EVERY_PHASE else phase
        return next((name for part, name in _SCOPES.items() if part in scope), _pass_of(scope))


def _pass_of(scope: str) -> str:
    """Forward or backward pass: jax names the transformations that made an operation."""
    if "transpose(" in scope:
        return BACKWARD
    return FORWARD if "jvp(" in scope else OTHER
