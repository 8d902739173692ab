"""Split loops of a program in two: a loop for some of their results, and one for the rest.

`lax.scan` is one equation with many results. In the backward pass of a scan over layers, the
previous stage waits for the carried cotangent, but not for the layers' stacked gradients. As one
equation the whole loop would belong to B.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from ...tracing import flattened, run, scan_operands, scan_options
from ._flat import FlatProgram, Origin, is_loop, used_by, variables


@dataclass(frozen=True)
class _Loop:
    """A scan: its body with all calls inlined, and the origin of each input of the body."""

    equation: JaxprEqn
    body: FlatProgram

    @classmethod
    def of(cls, equation: JaxprEqn, origin_of: Callable[[Any], Origin]) -> "_Loop":
        """Return the loop of a scan, whose operands have the origins `origin_of(operand)`."""
        closed = equation.params["jaxpr"]
        flat = flattened(jaxpr_as_fun(closed), [v.aval for v in closed.jaxpr.invars])
        pairs = zip(flat.inputs, equation.invars, strict=True)
        origins: dict[Var, Origin] = {inner: origin_of(operand) for inner, operand in pairs}
        origins |= dict.fromkeys(scan_operands(equation.params, flat.inputs)[1], "stash")
        return cls(equation, FlatProgram(flat, origins))

    @property
    def carried(self) -> list[Var]:
        """The inputs of the body that the previous iteration computes."""
        return scan_operands(self.equation.params, self.body.flat.inputs)[1]

    def closed(self, first: Sequence[bool]) -> tuple[bool, ...]:
        """Return `first` (per result, whether it is in the first loop) with carries it needs."""
        chosen = list(first)
        while True:
            targets = [
                v for v, is_first in zip(self.body.flat.outputs, chosen, strict=True) if is_first
            ]
            needed = self.body.needed_inputs(targets)
            more = [i for i, v in enumerate(self.carried) if v in needed and not chosen[i]]
            if not more:
                return tuple(chosen)
            for i in more:
                chosen[i] = True

    def operands_of(self, first: Sequence[bool]) -> list[Any]:
        """Return the operands of the equation that the first loop needs."""
        outputs = self.body.flat.outputs
        needed = self.body.needed_inputs(v for v, f in zip(outputs, first, strict=True) if f)
        kept_carry = {v for v, f in zip(self.carried, first, strict=False) if f}
        pairs = zip(self.body.flat.inputs, self.equation.invars, strict=True)
        return [operand for inner, operand in pairs if inner in needed or inner in kept_carry]

    def in_two(self, first: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
        """Return all results, computed by one loop for the first results and one for the rest."""
        body, outputs = self.body, self.body.flat.outputs
        mine = [v for v, is_first in zip(outputs, first, strict=True) if is_first]
        early = body.cut(mine).equations
        done = {v for equation in early for v in equation.outvars}
        done |= {v for v, is_first in zip(self.carried, first, strict=False) if is_first}
        rest = [v for v, is_first in zip(outputs, first, strict=True) if not is_first]
        late, handed = body.cut(rest, done.__contains__)

        first_results, passed = self._scan(early, first, operands, {}, handed)
        others = [not is_first for is_first in first]
        rest_results, _ = self._scan(late, others, operands, passed, ())
        results = {True: iter(first_results), False: iter(rest_results)}
        return [next(results[is_first]) for is_first in first]

    def _scan(
        self,
        equations: Sequence[JaxprEqn],
        chosen: Sequence[bool],
        operands: Sequence[Any],
        passed: Mapping[Var, Any],
        handed: Sequence[Var],
    ) -> tuple[list[Any], dict[Var, Any]]:
        """Run a scan over some of the equations of the body.

        Args:
          equations: equations of the body.
          chosen: per result of the whole scan, whether this one computes it.
          operands: operands of the whole scan.
          passed: values that the other loop has computed in each iteration, stacked.
          handed: values of the body that the other loop needs of each iteration.

        Returns:
          The chosen results, and the stacked values of `handed`.
        """
        params, flat = self.equation.params, self.body.flat
        fixed_names, carry, stacked_names = scan_operands(params, flat.inputs)
        fixed_operands, start, stacked = scan_operands(params, operands)
        outputs = [v for v, is_mine in zip(flat.outputs, chosen, strict=True) if is_mine]
        used = used_by(equations, (*outputs, *handed))
        fixed = dict(zip(fixed_names, fixed_operands, strict=True)) | flat.constants
        carried_in = {v: x for v, x, mine in zip(carry, start, chosen, strict=False) if mine}
        every = zip(stacked_names, stacked, strict=True)
        xs = {v: x for v, x in every if v in used} | dict(passed)
        count = len(carried_in)

        def iterate(carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            inputs = dict(zip((*carried_in, *xs), (*carried, *slices), strict=True)) | fixed
            values = run(equations, [*outputs, *handed], inputs)
            return values[:count], values[count:]

        init = [*carried_in.values()]
        last, columns = lax.scan(iterate, init, [*xs.values()], **scan_options(params))
        results = [*last, *columns]
        return results[: len(outputs)], dict(zip(handed, results[len(outputs) :], strict=True))


Plans = dict[int, tuple[_Loop, tuple[bool, ...]]]
"""Maps the id of an equation to its loop, and to which of its results are in the first loop."""


def needed_first(program: FlatProgram, targets: Sequence[Any]) -> FlatProgram:
    """Return `program` with loops split in two if only some results are needed for `targets`."""
    needed = set(variables(targets))
    plans: Plans = {}
    for equation in reversed(program.flat.equations):
        first = tuple(v in needed for v in equation.outvars)
        if not any(first):
            continue
        operands: Sequence[Any] = equation.invars
        if is_loop(equation) and not all(first):
            loop = _Loop.of(equation, program.origin_of)
            first = loop.closed(first)
            if not all(first):
                plans[id(equation)] = loop, first
                operands = loop.operands_of(first)
        needed.update(variables(operands))
    return _in_two(program, plans)


def weights_first(program: FlatProgram) -> FlatProgram:
    """Return `program` with loops split in two if only some results depend on weights alone.

    For example, a loop that casts its layers' weights has the casts among its results.
    """
    plans: Plans = {}
    for equation in filter(is_loop, program.flat.equations):
        loop = _Loop.of(equation, program.origin_of)
        outputs = enumerate(loop.body.flat.outputs)
        first = tuple(
            i >= len(loop.carried) and loop.body.origin_of(v) == "weights" for i, v in outputs
        )
        if any(first) and not all(first):
            plans[id(equation)] = loop, first
    return _in_two(program, plans)


def _in_two(program: FlatProgram, plans: Plans) -> FlatProgram:
    if not plans:
        return program
    flat = program.flat

    def instead(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
        plan = plans.get(id(equation))
        return plan[0].in_two(plan[1], operands) if plan else None

    def outputs(*args: Any) -> list[Any]:
        values = dict(zip(flat.inputs, args, strict=True)) | flat.constants
        return run(flat.equations, flat.outputs, values, instead)

    divided = flattened(outputs, [v.aval for v in flat.inputs])
    pairs = zip(divided.inputs, flat.inputs, strict=True)
    return FlatProgram(divided, {new: program.origins[old] for new, old in pairs})
