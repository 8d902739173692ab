"""Split the backward pass of a stage into two operations that may run at different times.

A stage is traced to two flat programs, its forward and its backward pass. Each operation is a part
of one of them: the equations that compute its results from what it is given.
"""

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from .._support.checks import checks_flags
from .._support.types import PyTree
from ..tracing import Atom, InlinedProgram, has_side_effects, run, scan_operands, trace_inline
from ..tree import type_text


def type_of(x: Any) -> Any:
    """Return the type under which jax traces an array, a number or a `ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.make_jaxpr(lambda y: y)(x).in_avals[0]
    return jax.typeof(x)


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the `ShapeDtypeStruct` of a type."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def size_in_bytes(v: Atom) -> int:
    """Return the size of an array in bytes."""
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize  # type: ignore[attr-defined]


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """Return `atoms` without the literals."""
    return (v for v in atoms if not isinstance(v, Literal))


def used_by(equations: Iterable[JaxprEqn], outputs: Iterable[Atom]) -> set[Var]:
    """Return the variables that are operands of some equation, or outputs."""
    return {v for atoms in (*(e.invars for e in equations), outputs) for v in variables(atoms)}


Origin = typing.Literal["weights", "microbatch", "x", "dy", "stash"]
"""The class of an input of a program: the argument that it is part of."""

# Changes of layout or dtype of one array need no arithmetic, so the smaller of the two forms is
# stored.
_LAYOUTS = {"broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose"}
_TYPES = {"convert_element_type"}
_NOTES = {"name", "sharding_constraint", "stop_gradient"}
_FREE = _LAYOUTS | _TYPES | _NOTES
# Cheap primitives, of which masks, positions and one-hot vectors of a microbatch are made.
_PIECES = {"concatenate", "dynamic_slice", "iota", "pad", "rev", "slice", "split"}
_ARITHMETIC = {"abs", "add", "clamp", "div", "exp", "log", "mul", "neg", "rem", "sign", "sub"}
_COMPARISONS = {"argmax", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "select_n"}
_BITS = {"and", "not", "or", "shift_left", "shift_right_logical", "xor"}
_SUMS = {"cumsum", "reduce_and", "reduce_max", "reduce_or", "reduce_sum"}
_LIGHT = _FREE | _PIECES | _ARITHMETIC | _COMPARISONS | _BITS | _SUMS


class Subprogram(NamedTuple):
    """A part of a program: its equations, in order, and the values it needs of other parts."""

    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]


@dataclass(frozen=True)
class FlatProgram:
    """A flat program, with the origin of each of its inputs."""

    flat: InlinedProgram
    origins: Mapping[Var, Origin]  # the origin of every input

    @cached_property
    def _producers(self) -> dict[Var, int]:
        """The position of the equation that computes each value."""
        equations = enumerate(self.flat.equations)
        return {v: i for i, equation in equations for v in equation.outvars}

    @cached_property
    def _dependencies(self) -> dict[Var, frozenset[str]]:
        """The origins of each value, and `"heavy"` if it takes more than light work."""
        depends: dict[Var, frozenset[str]] = {v: frozenset() for v in self.flat.constants}
        depends.update({v: frozenset({origin}) for v, origin in self.origins.items()})
        for equation in self.flat.equations:
            heavy = set() if equation.primitive.name in _LIGHT else {"heavy"}
            of_all = frozenset(heavy).union(*(depends[v] for v in variables(equation.invars)))
            depends.update(dict.fromkeys(equation.outvars, of_all))
        return depends

    def is_cheap(self, v: Var) -> bool:
        """Return whether each part computes `v` itself, instead of receiving it from another part.

        A function of weights alone (a cast, a transpose) is as large as they are, a light function
        of the microbatch alone can be computed from it at any time, and another form of a smaller
        array is no work.
        """
        maker = self._producers.get(v)
        if maker is None:
            return False
        if self._dependencies[v] <= {"weights", "heavy"} or self._dependencies[v] <= {"microbatch"}:
            return True
        equation = self.flat.equations[maker]
        sources = list(variables(equation.invars))
        free = equation.primitive.name in _FREE and len(sources) == 1
        return free and size_in_bytes(sources[0]) <= size_in_bytes(v)

    def origin_of(self, v: Atom) -> Origin:
        """Return the origin of a value: weights or microbatch if these alone determine it."""
        depends = frozenset[str]() if not isinstance(v, Var) else self._dependencies[v]
        if depends <= {"weights", "heavy"}:
            return "weights"
        return "microbatch" if depends <= {"microbatch"} else "stash"

    def extract(
        self,
        targets: Iterable[Atom],
        elsewhere: Callable[[Var], bool] = lambda v: False,
        *,
        with_effects: bool = False,
    ) -> Subprogram:
        """Return the part that computes `targets`, from values that are computed `elsewhere`.

        Args:
          targets: values of the program.
          elsewhere: function that returns whether another part computes a value; this part then
            receives the value, unless it is cheap.
          with_effects: whether the part has all equations with side effects, too.
        """
        equations = self.flat.equations
        mine = {i for i, e in enumerate(equations) if with_effects and has_side_effects(e)}
        inputs: dict[Var, None] = {}
        seen: set[Var] = set()
        waiting = [v for i in mine for v in variables(equations[i].invars)]
        waiting += list(variables(targets))[::-1]
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            if elsewhere(v) and not self.is_cheap(v):
                inputs[v] = None
            elif (maker := self._producers.get(v)) is not None:
                mine.add(maker)
                waiting.extend(variables(equations[maker].invars))
        return Subprogram(tuple(equations[i] for i in sorted(mine)), tuple(inputs))


# Loops.


@dataclass(frozen=True)
class _Loop:
    """A scan: its body with all calls inlined, and which of its results need weights alone."""

    equation: JaxprEqn
    body: FlatProgram

    @classmethod
    def from_equation(cls, equation: JaxprEqn, program: FlatProgram) -> "_Loop":
        """Return the loop of a scan of `program`."""
        closed = equation.params["jaxpr"]
        flat = trace_inline(jaxpr_as_fun(closed), [v.aval for v in closed.jaxpr.invars])
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

    def run_split(self, operands: Sequence[Any]) -> list[Any]:
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
        equations, _ = self.body.extract(outputs)
        used = used_by(equations, outputs)
        fixed_names, carry, stacked_names = scan_operands(params, flat.inputs)
        fixed_operands, _, stacked = scan_operands(params, operands)
        fixed = dict(zip(fixed_names, fixed_operands, strict=True)) | flat.constants
        xs = {v: x for v, x in zip(stacked_names, stacked, strict=True) if v in used}

        def iterate(carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            inputs = dict(zip((*carry[: len(start)], *xs), (*carried, *slices), strict=True))
            values = run(equations, outputs, inputs | fixed)
            return values[: len(start)], values[len(start) :]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        last, columns = lax.scan(iterate, [*start], [*xs.values()], **options)
        return [*last, *columns]


def split_weight_loops(program: FlatProgram) -> FlatProgram:
    """Return `program` with each loop divided in two of whose results some need weights alone."""
    flat, loops = program.flat, {}
    for equation in flat.equations:
        if equation.primitive.name == "scan" and not equation.effects:
            loop = _Loop.from_equation(equation, program)
            if any(loop.of_weights) and not all(loop.of_weights):
                loops[id(equation)] = loop
    if not loops:
        return program

    def run_loop(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
        loop = loops.get(id(equation))
        return loop.run_split(operands) if loop else None

    def outputs(*args: Any) -> list[Any]:
        values = dict(zip(flat.inputs, args, strict=True)) | flat.constants
        return run(flat.equations, flat.outputs, values, run_loop)

    new_flat = trace_inline(outputs, [v.aval for v in flat.inputs])
    pairs = zip(new_flat.inputs, flat.inputs, strict=True)
    return FlatProgram(new_flat, {new: program.origins[old] for new, old in pairs})


# The traced passes.


@dataclass(frozen=True)
class Argument:
    """The structure and types of an argument with which a stage was traced."""

    name: str
    tree: Any  # the structure of the argument
    types: tuple[Any, ...]
    chosen: tuple[bool, ...]  # leaves that have cotangents

    @classmethod
    def from_value(cls, name: str, value: PyTree) -> "Argument":
        """Return the argument `name` for arrays or types; floating leaves have cotangents."""
        leaves, tree = jax.tree.flatten(value)
        types = tuple(map(type_of, leaves))
        return cls(name, tree, types, tuple(map(is_differentiable, types)))

    @property
    def num_chosen(self) -> int:
        """The number of leaves that have cotangents."""
        return sum(self.chosen)

    def flatten(self, value: PyTree) -> list[Any]:
        """Return the leaves of `value`; raise `ValueError` unless it is like the traced one."""
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            raise ValueError(f"`{self.name}` must be the tree {self.tree}, as traced, got {tree}.")
        return list(map(self._checked_leaf, range(len(leaves)), leaves))

    def cotangents(self, value: PyTree) -> list[Any]:
        """Return cotangents of the chosen leaves from a tree, in which None stands for zeros."""
        leaves = enumerate(zip(self.tree.flatten_up_to(value), self.types, strict=True))
        return [
            self._checked_leaf(i, jnp.zeros(kind.shape, kind.dtype) if x is None else x)
            for i, (x, kind) in leaves
            if self.chosen[i]
        ]

    def select(self, leaves: Sequence[Any]) -> list[Any]:
        """Return those of all `leaves` that are chosen."""
        return [leaf for leaf, chosen in zip(leaves, self.chosen, strict=True) if chosen]

    def merge(self, leaves: Sequence[Any], chosen: Sequence[Any]) -> PyTree:
        """Return the tree of `leaves`, with the chosen ones replaced by `chosen`."""
        instead = iter(chosen)
        pairs = zip(leaves, self.chosen, strict=True)
        return self.tree.unflatten([next(instead) if take else leaf for leaf, take in pairs])

    def gradients(self, values: Sequence[Any]) -> PyTree:
        """Return the tree of cotangents: `values` for the chosen leaves, None for the others."""
        return self.merge([None] * len(self.chosen), values)

    def _checked_leaf(self, i: int, x: Any) -> Any:
        """Return leaf `i` with its traced type; raise `ValueError` if it has another type."""
        aval = self.types[i]
        x = jnp.asarray(x, aval.dtype) if isinstance(x, int | float | complex) else x
        if (jnp.shape(x), jnp.result_type(x)) != (aval.shape, aval.dtype):
            raise ValueError(
                f"`{self.name}`: leaf {i} must be {aval.dtype}{list(aval.shape)}, as traced, got "
                f"{type_text(x)}."
            )
        return x


def is_differentiable(x: Any) -> bool:
    """Return whether an array or type has cotangents: floating and complex ones do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclass(frozen=True)
class Forward:
    """The traced forward pass, with the residuals that `jax.vjp` keeps as outputs."""

    program: FlatProgram
    weights: tuple[Var, ...]
    x: tuple[Var, ...]
    microbatch: tuple[Var, ...]
    y: tuple[Atom, ...]
    residuals: tuple[Atom, ...]
    pull_back: Any  # tree structure of the function that `jax.vjp` returns
    result: Argument  # the stage's y


def trace_forward(
    fn: Callable[..., PyTree], weights: Argument, x: Argument, microbatch: Argument, *, loss: bool
) -> Forward:
    """Trace `fn` and its residuals; with `loss`, only the first leaf of y has a cotangent."""
    traced_y: dict[str, Any] = {}

    def outputs(*flat: Any) -> list[Any]:
        w, into, data = _split_leaves(flat, weights, x)

        def differentiable_fn(of_w: list[Any], of_x: list[Any]) -> tuple[list[Any], list[Any]]:
            y = fn(weights.merge(w, of_w), x.merge(into, of_x), microbatch.tree.unflatten(data))
            leaves, traced_y["tree"] = jax.tree.flatten(y)
            leaves = list(map(jnp.asarray, leaves))
            if loss:
                _check_loss(y)
            traced_y["seeded"] = [
                is_differentiable(y) and not (loss and i) for i, y in enumerate(leaves)
            ]
            sides = list(zip(leaves, traced_y["seeded"], strict=True))
            return [y for y, seeded in sides if seeded], [y for y, seeded in sides if not seeded]

        seeded, pull_back, others = jax.vjp(
            differentiable_fn, weights.select(w), x.select(into), has_aux=True
        )
        residuals, traced_y["pull_back"] = jax.tree.flatten(pull_back)
        in_order = {True: iter(seeded), False: iter(others)}
        return [*(next(in_order[s]) for s in traced_y["seeded"]), *residuals]

    flat = trace_inline(outputs, [*weights.types, *x.types, *microbatch.types])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "microbatch")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types) + len(x.types)], "x")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types)], "weights")
    program = split_weight_loops(FlatProgram(flat, origins))
    of_weights, of_x, of_microbatch = _split_leaves(program.flat.inputs, weights, x)
    count = len(traced_y["seeded"])
    y, residuals = program.flat.outputs[:count], program.flat.outputs[count:]
    types = tuple(v.aval for v in y)
    result = Argument("y", traced_y["tree"], types, tuple(traced_y["seeded"]))
    return Forward(
        program, *(of_weights, of_x, of_microbatch), *(y, residuals, traced_y["pull_back"], result)
    )


def trace_backward(forward: Forward, *, remat: bool) -> tuple[FlatProgram, tuple[Var, ...]]:
    """Trace the backward pass, and choose the stash that it needs of the forward pass.

    With `remat` the stash is x. Otherwise it is the residuals, except those that can be computed
    cheaply from weights, microbatch or a smaller array, which is then stashed instead.

    Returns:
      The program, whose inputs are weights, microbatch, stash and cotangents of y, and whose
      outputs are the cotangents of x and then the gradients of the weights; and the stash, as
      variables of the forward pass.
    """
    at_hand = {*forward.weights, *forward.microbatch}
    if remat:
        stash = forward.x
        again = forward.program.extract(forward.residuals).equations
    else:
        again, stash = forward.program.extract(forward.residuals, lambda v: v not in at_hand)
    inputs_before_dy = (*forward.weights, *forward.microbatch, *stash)

    def outputs(*flat: Any) -> list[Any]:
        values = dict(zip(inputs_before_dy, flat, strict=False)) | forward.program.flat.constants
        residuals = run(again, forward.residuals, values)
        pull_back = jax.tree.unflatten(forward.pull_back, residuals)
        dweights, dx = pull_back(list(flat[len(inputs_before_dy) :]))
        return [*dx, *dweights]

    seeds = forward.result.select(forward.result.types)
    flat = trace_inline(outputs, [*(v.aval for v in inputs_before_dy), *seeds])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "dy")
    pairs = zip(flat.inputs, inputs_before_dy, strict=False)
    origins |= {v: forward.program.origins.get(source, "stash") for v, source in pairs}
    return FlatProgram(flat, origins), stash


def _split_leaves(flat: Sequence[Any], *first: Argument) -> list[tuple[Any, ...]]:
    """Return `flat` divided into the leaves of the `first` arguments, and the remaining ones."""
    parts, start = [], 0
    for argument in first:
        parts.append(tuple(flat[start : start + len(argument.types)]))
        start += len(argument.types)
    return [*parts, tuple(flat[start:])]


def _check_loss(y: PyTree) -> None:
    loss: Any = y[0] if isinstance(y, tuple) and y else y
    if (
        jax.tree.structure(loss).num_leaves != 1
        or jnp.shape(loss) != ()
        or not is_differentiable(loss)
    ):
        raise ValueError(
            "`loss=True` needs a stage that returns a loss, a floating scalar, or (loss, metrics), "
            f"got {jax.tree.map(jax.typeof, y)}."
        )


# Operations.


@dataclass(frozen=True)
class StagePart:
    """One operation of a stage, on flat values: equations with their inputs and outputs."""

    program: FlatProgram
    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    @classmethod
    def from_outputs(
        cls, program: FlatProgram, inputs: tuple[Var, ...], outputs: tuple[Atom, ...]
    ) -> "StagePart":
        """Return the part that computes `outputs`, with all side effects of the program."""
        equations = program.extract(outputs, with_effects=True).equations
        return cls(program, equations, inputs, outputs)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        inputs = dict(zip(self.inputs, values, strict=True)) | self.program.flat.constants
        return run(self.equations, self.outputs, inputs)


@dataclass(frozen=True)
class StageProgram:
    """A stage's forward pass and parts of its backward pass, as functions; made by `split_stage`.

    F is `forward`, B `backward_input`, W `backward_weight`, BW `backward`. An equation of the
    backward pass is in B or in W; it is in both only if it changes just the layout or dtype of an
    array, or depends on weights or microbatch alone. All four can be traced under jit, scan, switch
    and shard_map, and take arrays of the types that `split_stage` got.

    Attributes:
      y: type of the stage's result, a tree of `jax.ShapeDtypeStruct`.
      stash: types of the arrays that F stores for the backward pass. They contain no leaf of
        weights or microbatch, and nothing that is cheap to compute from one of these alone.
      kept: types of the arrays that B stores for W in addition to the stash.

    Communication: only that of the stage's function.
    """

    y: PyTree
    stash: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    _weights: Argument = field(repr=False)
    _x: Argument = field(repr=False)
    _microbatch: Argument = field(repr=False)
    _y: Argument = field(repr=False)
    _loss: bool = field(repr=False)
    _forward: StagePart = field(repr=False)
    _backward: StagePart = field(repr=False)
    _backward_input: StagePart = field(repr=False)
    _backward_weight: StagePart = field(repr=False)

    def forward(
        self, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Run F: return the stage's result, and the stash."""
        args = (
            self._weights.flatten(weights),
            self._x.flatten(x),
            self._microbatch.flatten(microbatch),
        )
        values = self._forward([leaf for leaves in args for leaf in leaves])
        count = self._y.tree.num_leaves
        return self._y.tree.unflatten(values[:count]), tuple(values[count:])

    def backward(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run BW: return the cotangent of x and the gradient of the weights.

        In `dy`, a tree like y, None stands for zeros; for a loss stage it is the loss' cotangent.
        The results have None for leaves without cotangents, such as integers.
        """
        inputs = self._inputs(weights, microbatch, stash)
        values = self._backward([*inputs, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), self._weights.gradients(values[count:])

    def backward_input(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Run B: return the cotangent of x (None for leaves that have none), and `kept` for W.

        In `dy`, a tree like y, None stands for zeros; for a loss stage it is the loss' cotangent.
        """
        inputs = self._inputs(weights, microbatch, stash)
        values = self._backward_input([*inputs, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), tuple(values[count:])

    def backward_weight(
        self,
        weights: PyTree,
        microbatch: PyTree,
        stash: Sequence[jax.Array],
        kept: Sequence[jax.Array],
    ) -> PyTree:
        """Run W: return the gradient of the weights (None for leaves that have none)."""
        inputs = self._inputs(weights, microbatch, stash)
        return self._weights.gradients(self._backward_weight([*inputs, *kept]))

    def _inputs(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array]
    ) -> list[jax.Array]:
        return [*self._weights.flatten(weights), *self._microbatch.flatten(microbatch), *stash]

    def _cotangents(self, dy: PyTree) -> list[jax.Array]:
        if not self._loss:
            return self._y.cotangents(dy)
        of_loss = dy[0] if isinstance(dy, tuple) else dy
        rest = [None] * (self._y.tree.num_leaves - 1)
        return self._y.cotangents(self._y.tree.unflatten([of_loss, *rest]))


@checks_flags("split_stage")
def split_stage(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
    microbatch: PyTree,
    *,
    loss: bool = False,
    remat: bool = False,
) -> StageProgram:
    """Split a stage's backward pass in two: B, the gradient of its input, and W, all the rest.

    The equations of the traced backward pass are divided: B computes the cotangent of `x`, and W
    everything that B has not computed, so that B and W together do the work of the whole. Calls,
    also checkpointed ones, are inlined. A `scan`, a `cond`, a `while_loop` or a kernel belongs to B
    as a whole if the cotangent of `x` needs any of its results. Zero-bubble schedules (Qi et al.
    2024, section 2) need this split.

    Args:
      fn: the function of the stage, `fn(weights, x, microbatch) -> y`, of trees. Leaves of integers
        and booleans have no cotangents.
      weights: a tree of arrays, or of types such as `jax.ShapeDtypeStruct`. A `shard_map` around
        the operations must have `check_vma=False`.
      x: the result of the previous stage, arrays or types.
      microbatch: the data that the stage reads (tokens, labels, masks), arrays or types. It is
        passed to every operation, is not in the stash, and gets no cotangent.
      loss: whether the stage returns a loss, or (loss, metrics); `dy` is then the cotangent of the
        loss.
      remat: whether the stash is only `x`; B then computes the rest again and keeps what W needs.

    Returns:
      The operations of the stage, and the types of the arrays that they exchange.

    Raises:
      ValueError: `loss=True` for a stage that returns no floating scalar or (scalar, metrics).
    """
    of_weights, of_x = Argument.from_value("weights", weights), Argument.from_value("x", x)
    of_data = Argument.from_value("microbatch", microbatch)
    front = trace_forward(fn, of_weights, of_x, of_data, loss=loss)
    back, stash = trace_backward(front, remat=remat)
    result, (inputs, outputs) = front.result, (back.flat.inputs, back.flat.outputs)
    dx, dweights = outputs[: of_x.num_chosen], outputs[of_x.num_chosen :]
    before_dy = len(inputs) - result.num_chosen
    of_input = StagePart.from_outputs(back, inputs, dx)
    done = {*inputs[before_dy:], *(v for e in of_input.equations for v in e.outvars)}
    equations, kept = back.extract(dweights, done.__contains__)
    return StageProgram(
        y=jax.tree.map(struct_of, result.tree.unflatten(result.types)),
        stash=tuple(struct_of(v.aval) for v in stash),
        kept=tuple(struct_of(v.aval) for v in kept),
        _weights=of_weights,
        _x=of_x,
        _microbatch=of_data,
        _y=result,
        _loss=loss,
        _forward=StagePart.from_outputs(
            front.program, front.program.flat.inputs, (*front.y, *stash)
        ),
        _backward=StagePart.from_outputs(back, inputs, outputs),
        _backward_input=replace(of_input, outputs=(*dx, *kept)),
        _backward_weight=StagePart(back, equations, (*inputs[:before_dy], *kept), dweights),
    )
