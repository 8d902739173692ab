"""Separate what a loop computes of weights alone, such as a cast of each layer's weights.

A loop over layers is one equation with many results. Those that depend on weights alone would be
stashed for each microbatch, with the size of all weights. As a loop of their own they are computed
again where they are needed, as is any other function of weights alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from ...tracing import flattened, run, scan_operands, scan_options
from ._flat import FlatProgram, Origin, used_by


@dataclass(frozen=True)
class _Loop:
    """A scan: its body with all calls inlined, and which of its results need weights alone."""

    equation: JaxprEqn
    body: FlatProgram

    @classmethod
    def of(cls, equation: JaxprEqn, program: FlatProgram) -> "_Loop":
        """Return the loop of a scan of `program`."""
        closed = equation.params["jaxpr"]
        flat = flattened(jaxpr_as_fun(closed), [v.aval for v in closed.jaxpr.invars])
        pairs = zip(flat.inputs, equation.invars, strict=True)
        origins: dict[Var, Origin] = {v: program.origin_of(operand) for v, operand in pairs}
        origins |= dict.fromkeys(scan_operands(equation.params, flat.inputs)[1], "stash")
        return cls(equation, FlatProgram(flat, origins))

    @property
    def of_weights(self) -> list[bool]:
        """For each result, whether it is stacked over the iterations and needs weights alone."""
        num_carry = len(scan_operands(self.equation.params, self.body.flat.inputs)[1])
        outputs = enumerate(self.body.flat.outputs)
        return [i >= num_carry and self.body.origin_of(v) == "weights" for i, v in outputs]

    def in_two(self, operands: Sequence[Any]) -> list[Any]:
        """Return all results, computed by one loop for those of weights and one for the rest."""
        of_weights = self.of_weights
        _, start, _ = scan_operands(self.equation.params, operands)
        results = {
            True: iter(self._scan([], of_weights, operands)),
            False: iter(self._scan(start, [not x for x in of_weights], operands)),
        }
        return [next(results[x]) for x in of_weights]

    def _scan(
        self, start: Sequence[Any], chosen: Sequence[bool], operands: Sequence[Any]
    ) -> list[Any]:
        """Return the chosen results, computed by a loop that carries `start`, all or nothing."""
        params, flat = self.equation.params, self.body.flat
        outputs = [v for v, is_mine in zip(flat.outputs, chosen, strict=True) if is_mine]
        equations, _ = self.body.cut(outputs)
        used = used_by(equations, outputs)
        fixed_names, carry, stacked_names = scan_operands(params, flat.inputs)
        fixed_operands, _, stacked = scan_operands(params, operands)
        fixed = dict(zip(fixed_names, fixed_operands, strict=True)) | flat.constants
        xs = {v: x for v, x in zip(stacked_names, stacked, strict=True) if v in used}

        def iterate(carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            inputs = dict(zip((*carry[: len(start)], *xs), (*carried, *slices), strict=True))
            values = run(equations, outputs, inputs | fixed)
            return values[: len(start)], values[len(start) :]

        last, columns = lax.scan(iterate, [*start], [*xs.values()], **scan_options(params))
        return [*last, *columns]


def weights_first(program: FlatProgram) -> FlatProgram:
    """Return `program` with each loop divided in two of whose results some need weights alone."""
    flat, loops = program.flat, {}
    for equation in flat.equations:
        if equation.primitive.name == "scan" and not equation.effects:
            loop = _Loop.of(equation, program)
            if any(loop.of_weights) and not all(loop.of_weights):
                loops[id(equation)] = loop
    if not loops:
        return program

    def instead(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
        loop = loops.get(id(equation))
        return loop.in_two(operands) if loop else None

    def outputs(*args: Any) -> list[Any]:
        values = dict(zip(flat.inputs, args, strict=True)) | flat.constants
        return run(flat.equations, flat.outputs, values, instead)

    divided = flattened(outputs, [v.aval for v in flat.inputs])
    pairs = zip(divided.inputs, flat.inputs, strict=True)
    return FlatProgram(divided, {new: program.origins[old] for new, old in pairs})
