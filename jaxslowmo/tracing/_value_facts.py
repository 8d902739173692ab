"""Facts about every value of a traced program: where it is computed, and whether it is zero.

A program is read in the order in which it was traced, with the programs inside it (of jit,
checkpoint, custom derivatives, loops and branches) in the place where they are called. A gradient's
place in that order tells when the backward pass has it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._jaxprs import called_program, interpret, scan_operands

GIVEN = -1  # place of what the program does not compute


class Fact(NamedTuple):
    """What is known of one value.

    Attributes:
      place: of the equation that computes it, or `GIVEN`.
      zero: whether it is zero by construction, whatever the inputs are.
    """

    place: int
    zero: bool


# Cheap operations on a finished gradient: a compiler fuses them into the equation before them or
# into what reads them, so the gradient counts as ready where their operands are.
_TRIVIAL = {
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "neg",
    "pcast",
    "pvary",
    "real",
    "reduce_precision",
    "reshape",
    "rev",
    "sharding_constraint",
    "squeeze",
    "transpose",
}
# Zero where every operand is; where any is; where the first is (the others are places or divisors).
_ZERO_OF_ALL = _TRIVIAL | {
    "add",
    "all_gather",
    "all_to_all",
    "concatenate",
    "cumsum",
    "pad",
    "ppermute",
    "psum",
    "psum2",
    "psum_invariant",
    "reduce_scatter",
    "reduce_sum",
    "slice",
    "sub",
}
_ZERO_OF_ANY = {"conv_general_dilated", "dot_general", "mul"}
_ZERO_OF_FIRST = {"div", "dynamic_slice", "gather"}


def output_facts(closed: Any) -> list[Fact]:
    """A fact for each output of a closed jaxpr."""
    reader = _Reader()
    return reader.run(closed, [Fact(GIVEN, False)] * len(closed.jaxpr.invars))


def _given(value: Any) -> Fact:
    """Of a constant; one on a device is not looked at."""
    return Fact(GIVEN, isinstance(value, np.ndarray) and not np.any(value))


class _Reader:
    """Walks through a program and counts its equations."""

    def __init__(self) -> None:
        self._place = 0

    def run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """Facts of the outputs of `program`, closed or open, called here."""
        return interpret(program, inputs, self._equation, _given)

    def _equation(self, eqn: Any, operands: list[Fact]) -> list[Fact]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(params, operands)
        if name == "while":
            return self._while(params, operands)
        if name == "cond":
            return self._cond(params["branches"], operands[1:])
        if inner := called_program(eqn):
            return self.run(inner, operands)
        self._place += 1
        if name == "optimization_barrier":
            return operands
        fact = Fact(self._place, _zero(name, [o.zero for o in operands]))
        if name in _TRIVIAL and (place := max((o.place for o in operands), default=GIVEN)) > GIVEN:
            fact = fact._replace(place=place)
        return [fact] * len(eqn.outvars)

    def _loop(
        self, body: Any, consts: list[Fact], carry: list[Fact], rest: list[Fact]
    ) -> tuple[list[Fact], list[Fact]]:
        """Facts of the last carry and of the other outputs of a loop.

        Everything that a loop yields is ready at its end. The places of its body keep apart what
        one iteration finishes first and last, and lie between those before and after the loop.
        """
        start = self._place
        while True:  # ends: only zeros of the carry can turn into others
            self._place = start + 1
            inputs = [*consts, *carry, *rest]
            inputs = [Fact(min(fact.place, start), fact.zero) for fact in inputs]
            out = self.run(body, inputs)
            zero = [a.zero and b.zero for a, b in zip(carry, out, strict=False)]
            if zero == [fact.zero for fact in carry]:
                break
            carry = [Fact(a.place, z) for a, z in zip(carry, zero, strict=True)]
        out = [Fact(max(fact.place, start + 1), fact.zero) for fact in out]
        carried = [Fact(o.place, z) for o, z in zip(out, zero, strict=False)]
        return carried, out[len(carry) :]

    def _scan(self, params: Any, operands: list[Fact]) -> list[Fact]:
        carry, ys = self._loop(params["jaxpr"], *scan_operands(params, operands))
        return [*carry, *ys]

    def _while(self, params: Any, operands: list[Fact]) -> list[Fact]:
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        carry, _ = self._loop(params["body_jaxpr"], operands[first:last], operands[last:], [])
        return carry

    def _cond(self, branches: Sequence[Any], operands: list[Fact]) -> list[Fact]:
        start = self._place
        found = [self.run(branch, operands) for branch in branches]
        self._place += 1
        return [
            Fact(max(start + 1, *(f.place for f in facts)), all(f.zero for f in facts))
            for facts in zip(*found, strict=True)
        ]


def _zero(name: str, zeros: list[bool]) -> bool:
    """Whether the result is zero, given which operands are."""
    if not zeros:
        return False
    if name == "select_n":  # the first operand selects
        return all(zeros[1:])
    if name.startswith("scatter"):  # operand, places, updates
        return name in ("scatter-add", "scatter") and zeros[0] and zeros[2]
    if name == "dynamic_update_slice":  # operand, update, places
        return zeros[0] and zeros[1]
    return (
        (name in _ZERO_OF_ALL and all(zeros))
        or (name in _ZERO_OF_ANY and any(zeros))
        or (name in _ZERO_OF_FIRST and zeros[0])
    )
