"""A reader of optax transforms: it proves which leaves a result depends on, from the programs.

`init` and `update` are traced for given parameters, and their equations are followed from inputs to
outputs, through calls, conditionals and loops. Nothing is run. Each value of a program gets the
leaves that it depends on, and the number of the expression that computes it: equal numbers mean
equal expressions. So a transform can also be compared to itself for other parameters, such as the
leaves of one stage, or flat buffers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ..._support.types import PyTree
from ...tracing import CALLS, Loop, interpret, loss_arguments
from ...tree import leaf_names

Kind = Literal["element-wise", "leaf-wise", "mixing"]

# The result of these primitives for an element depends on no other element.
_OF_ELEMENTS = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "pow", "reduce_precision", "rem", "reshard", "round", "rsqrt", "select_n",
    "sharding_constraint", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
}  # fmt: skip
# Each result of these primitives depends on the operand of its own position.
_SIDE_BY_SIDE = frozenset({"optimization_barrier", "pmax", "pmin", "psum"})
_OF_SHAPES = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})
_NUM_COMPARED = 4096  # elements of a constant up to which its values are compared


class Reading(NamedTuple):
    """The properties of a transform that its programs prove, for the parameters of the trace.

    Attributes:
      kind: "element-wise": the result for an element depends on the same element of gradient, state
        and parameter, and on numbers that all leaves share, and elements of all leaves of a dtype
        are treated alike. "leaf-wise": the result for a leaf depends on this leaf and on what all
        leaves share. "mixing": it depends on other leaves, or nothing could be proved.
      why: why `kind` is no stricter, a clause about the transform; "" if it is "element-wise".
      by_element: whether no result combines elements of a leaf; leaves may be treated differently.
      leaves: for each leaf a key of its results: with equal keys of two readings by one reader,
        both compute the same from this leaf and from what leaves share.
      shared: for each array of the state that belongs to no leaf a key of how it is computed; None
        for one that is computed from leaves. One tuple for the state that `init` makes; if an
        update gives the state another structure, another one for that.
    """

    kind: Kind
    why: str
    by_element: bool = False
    leaves: tuple[Any, ...] = ()
    shared: tuple[tuple[Any, ...], ...] = ()

    def equals_on_buffers(self, buffers: "Reading", leaf_of: Sequence[int]) -> bool:
        """Return whether a transform has the same results on buffers as on the leaves in them.

        Args:
          buffers: the reading for the buffers as parameters, by the same reader.
          leaf_of: the position of a leaf in each buffer.
        """
        pairs = zip(buffers.leaves, leaf_of, strict=True)
        return (
            {self.kind, buffers.kind} == {"element-wise"}
            and self.shared == buffers.shared
            and all(key == self.leaves[i] for key, i in pairs)
        )


class _Value(NamedTuple):
    """One value of a program.

    Attributes:
      number: number of the expression that computes it.
      leaves: the leaves that it depends on, as a bit set.
      reads: the shared arrays of the state that it depends on, as a bit set.
      combined: name of the first operation that combined elements; "" if each element depends on
        the same elements of leaves, or is equal to all others.
    """

    number: int
    leaves: int = 0
    reads: int = 0
    combined: str = ""


class ProgramReader:
    """A reader of programs; what it returns for several programs can be compared.

    It numbers expressions, of which equal ones have equal numbers, and holds the constants of all
    programs that it has read.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # objects whose identity is in a key

    def read(
        self,
        tx: optax.GradientTransformation,
        params: PyTree,
        *,
        structure: Any = None,
        is_like: Callable[[Any], bool] | None = None,
        extra: Iterable[str] = (),
    ) -> Reading:
        """Read a transform.

        Args:
          tx: the transform.
          params: arrays or types, for which `init` and `update` are traced.
          structure: structure of `params` with one leaf per parameter, in the place of which may
            be an empty tree, such as `optax.MaskedNode()`. The default is that of `params`.
          is_like: whether a part of the state is a tree like the parameters, whose parts belong to
            the leaves. The default is a tree of the same structure, with arrays of the shape of
            each parameter, or none, in its place.
          extra: names of the extra arguments of `update`, of "value", "grad" and "value_fn".

        Communication: none; nothing is run.
        """
        structure = jax.tree.structure(params) if structure is None else structure
        of_params = _OfParams(self, structure, params, is_like)
        try:
            return of_params.reading(optax.with_extra_args_support(tx), extra)
        except Exception as error:  # a transform is any code, and tracing it may raise anything
            what = f"{type(error).__name__}: {error}"
            return Reading("mixing", f"it can't be traced for these parameters ({what})")

    def number(self, *key: Any) -> int:
        """Return the number of the expression with this key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """Return the values of a program's outputs."""
        return interpret(program, inputs, self._equation, self._constant)

    def key(self, program: Any) -> Any:
        """Return a key of a program: programs with equal keys compute the same results."""
        jaxpr = getattr(program, "jaxpr", program)
        numbers = (self.number("argument", i) for i, _ in enumerate(jaxpr.invars))
        outputs = self.run(program, [_Value(n, combined="argument") for n in numbers])
        return _types(jaxpr.invars), _types(jaxpr.outvars), tuple(x.number for x in outputs)

    def joined(self, key: Any, operands: Iterable[_Value], var: Any, combined: str) -> _Value:
        """Return the value of a variable that is computed from operands."""
        leaves = reads = 0
        for x in operands:
            leaves, reads = leaves | x.leaves, reads | x.reads
        if not leaves and not getattr(var.aval, "shape", ()):
            combined = ""  # a single number, whatever it is computed from
        return _Value(self.number(*key), leaves, reads, combined)

    def _equation(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        called = params.get(CALLS.get(name, ""))
        if called is not None:
            return self.run(called, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name in ("scan", "while"):
            return self._loop(eqn, operands)
        if name in _SIDE_BY_SIDE and len(operands) > 1:
            singles = zip(operands, eqn.invars, eqn.outvars, strict=True)
            return [self._operation(eqn, [x], [i], [o])[0] for x, i, o in singles]
        return self._operation(eqn, operands, eqn.invars, eqn.outvars)

    def _operation(
        self, eqn: Any, operands: list[_Value], invars: Sequence[Any], outvars: Sequence[Any]
    ) -> list[_Value]:
        name = eqn.primitive.name
        combined = next((x.combined for x in operands if x.combined), "")
        if name == "broadcast_in_dim" and not combined and not invars[0].aval.shape:
            return operands[:1]  # every element of a broadcast number is that number
        if not combined and name not in _OF_ELEMENTS:
            combined = name
        # The expression of an element says nothing of shapes: leaves of other shapes have it, too.
        options = {k: x for k, x in eqn.params.items() if combined or k not in _OF_SHAPES}
        types = _types((*invars, *outvars)) if combined else ()
        key = name, tuple(x.number for x in operands), self._key(options), types
        return [self.joined((*key, i), operands, v, combined) for i, v in enumerate(outvars)]

    def _cond(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        index, *rest = operands
        by_branch = [self.run(branch, rest) for branch in eqn.params["branches"]]
        results = []
        for var, *values in zip(eqn.outvars, *by_branch, strict=True):
            # An index that depends on a leaf selects all elements by some of them.
            combined = next((x.combined for x in values if x.combined), "cond" * bool(index.leaves))
            key = "cond", index.number, tuple(x.number for x in values)
            results.append(self.joined(key, (index, *values), var, combined))
        return results

    def _loop(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        """Return the values of a loop's outputs.

        The expression of an output is that of a loop without what the output does not depend on.
        """
        loop, name, params = Loop.of(eqn), eqn.primitive.name, eqn.params
        numbers = [self.number("operand", i) for i, _ in enumerate(operands)]
        marked = [_Value(n, leaves=1 << i, combined="loop") for i, n in enumerate(numbers)]

        def join(x: _Value, *more: _Value) -> _Value:
            return x._replace(leaves=reduce(or_, (y.leaves for y in more), x.leaves))

        needed, _ = loop.settled(self.run, marked, join)
        unused = self.number("no operand")
        results = []
        for i, var in enumerate(eqn.outvars):
            is_carried = i < len(loop.carry)
            used = _bits(needed[i].leaves)
            rank = dict(zip(used, numbers, strict=False))
            renamed = [_Value(rank.get(p, unused), combined="loop") for p, _ in enumerate(operands)]
            after, until = loop.once(self.run, renamed)
            carried = {p: after[n].number for n, p in enumerate(loop.carry)}
            key = (
                (name, params.get("length"), params.get("reverse")),
                tuple((operands[p].number, carried.get(p), p in loop.scanned) for p in used),
                _types(eqn.invars[p] for p in used),
                (after[i].number, is_carried, *(x.number for x in until)),
            )
            results.append(self.joined(key, (operands[p] for p in used), var, name))
        return results

    def _key(self, x: Any) -> Any:
        """Return a hashable key of an option of an equation."""
        if hasattr(getattr(x, "jaxpr", x), "eqns"):
            return self.key(x)
        if isinstance(x, Mapping):
            return tuple((str(k), self._key(y)) for k, y in sorted(x.items()))
        if type(x) in (list, tuple):
            return type(x), tuple(map(self._key, x))
        try:
            hash(x)
        except TypeError:
            return self._identity(x)
        return type(x), x

    def _constant(self, x: Any) -> _Value:
        key = self._constant_key(x)
        return _Value(self.number("constant", key), combined="constant" if np.ndim(x) else "")

    def _constant_key(self, x: Any) -> Any:
        is_readable = x is not None and not isinstance(x, Tracer) and np.size(x) < _NUM_COMPARED
        if isinstance(x, jax.Array) and is_readable:
            is_extended = jnp.issubdtype(x.dtype, jax.dtypes.extended)
            is_readable = x.is_fully_addressable and not is_extended
        if not is_readable:
            return self._identity(object() if x is None else x)  # None: it is not in the program
        with jax.transfer_guard("allow"):
            array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()

    def _identity(self, x: Any) -> tuple[str, int]:
        self._kept.append(x)  # so that no later object gets its id
        return "object", id(x)


class _Placed(NamedTuple):
    """An array of a tree of arguments or results.

    Attributes:
      place: the place of the array, equal for the arrays of all leaves of one tree.
      leaf: position of the leaf that it belongs to; None: the array is shared.
      shape: its shape.
    """

    place: Any
    leaf: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _OfParams:
    """The parameters that a transform is traced for, and the arrays that belong to their leaves.

    Attributes:
      reader: the reader of the programs.
      structure: structure of the parameters, with one leaf for each.
      params: the parameters.
      like: whether a part of a state is a tree like the parameters; None: the default of `read`.
    """

    reader: ProgramReader
    structure: Any
    params: PyTree
    like: Callable[[Any], bool] | None

    @cached_property
    def types(self) -> dict[int, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each parameter by its position."""
        parts = map(jax.tree.leaves, self.structure.flatten_up_to(self.params))
        return {i: (x.shape, str(x.dtype)) for i, part in enumerate(parts) for x in part}

    def is_like(self, x: PyTree) -> bool:
        """Return whether a part of a state is a tree like the parameters."""
        if self.like is not None:
            return self.like(x)
        try:
            parts = self.structure.flatten_up_to(x)
        except (ValueError, TypeError):
            return False
        # The state of a chain is a tuple, as parameters may be: the tree is the one inside of it.
        if any(part is not x and self._holds_like(part) for part in parts):
            return False
        arrays = [(i, y) for i, part in enumerate(parts) for y in jax.tree.leaves(part)]
        shapes = {i: shape for i, (shape, _) in self.types.items()}
        return bool(arrays) and all(y.shape == shapes.get(i) for i, y in arrays)

    def _holds_like(self, part: PyTree) -> bool:
        nodes = jax.tree.leaves(part, is_leaf=self.is_like)
        return not jax.tree_util.all_leaves([part]) and any(map(self.is_like, nodes))

    def reading(self, tx: optax.GradientTransformationExtraArgs, extra: Iterable[str]) -> Reading:
        """Return what `init`, and `update` with the states that it makes, prove together."""

        def update(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> Any:
            given = loss_arguments(grads, value)
            return tx.update(grads, state, params, **{name: given[name] for name in extra})

        trace = jax.make_jaxpr(update, return_shape=True)
        program, state = jax.make_jaxpr(tx.init, return_shape=True)(self.params)
        values = self.reader.run(program, self._inputs(0, params=self.params))
        results = [*zip(self._placed(state=state), values, strict=True)]
        facts = [*self._facts(results, [])]
        first = [x for at, x in results if at.leaf is None]
        shared: list[tuple[Any, ...]] = []
        for number in range(2):  # a state may begin empty, and get its structure by an update
            before = state
            loss = jax.ShapeDtypeStruct((), jnp.float32)
            program, (updates, state) = trace(self.params, before, self.params, loss)
            inputs = self._inputs(number, grads=self.params, state=before, params=self.params)
            value = _Value(self.reader.number("value"))
            values = self.reader.run(program, [*inputs, value])
            results = [*zip(self._placed(updates=updates, state=state), values, strict=True)]
            later = [x for at, x in results if at.leaf is None]
            keeps = jax.tree.structure(state) == jax.tree.structure(before)
            known = self._shared(first, later if keeps else None)
            facts += self._facts(results, known)
            shared.append(tuple(None if x.leaves else x.number for x in known))
            if keeps:
                return self._reading(facts, tuple(shared))
            first = [_through(x, known)._replace(reads=0) for x in later]
        return Reading("mixing", "every update changes the structure of its state")

    def _placed(self, **trees: PyTree) -> Iterator[_Placed]:
        """Yield the arrays of a state, and of trees like the parameters, in their order."""
        for name, tree in trees.items():
            nodes, count = [tree], 0
            if name == "state":
                nodes = jax.tree.leaves(tree, is_leaf=self.is_like)
            for number, node in enumerate(nodes):
                if name == "state" and not self.is_like(node):
                    yield _Placed(count, None, node.shape)
                    count += 1
                    continue
                for leaf, part in enumerate(self.structure.flatten_up_to(node)):
                    for k, x in enumerate(jax.tree.leaves(part)):
                        yield _Placed((name, number, k), leaf, x.shape)

    def _inputs(self, number: int, **trees: PyTree) -> list[_Value]:
        """Return the values of the arguments of `init`, or of update `number`."""
        inputs = []
        for at in self._placed(**trees):
            key = self.reader.number("input", number, at.place)
            if at.leaf is None:
                combined = "a shared array" if at.shape else ""
                inputs.append(_Value(key, reads=1 << at.place, combined=combined))
            else:
                inputs.append(_Value(key, 1 << at.leaf, combined=self._odd(at)))
        return inputs

    def _odd(self, at: _Placed) -> str:
        """Return "" for an array that has one element for each of its leaf."""
        is_alike = at.leaf is None or at.shape == self.types[at.leaf][0]
        return "" if is_alike else "a state of another shape"

    def _shared(self, first: list[_Value], later: list[_Value] | None) -> list[_Value]:
        """Return the arrays of a state that belong to no leaf, as they are at any time of a run.

        Args:
          first: their values before an update.
          later: their values after it; None: only what holds before any update is returned.
        """
        numbers = [
            self.reader.number("shared", x.number, later and later[i].number)
            for i, x in enumerate(first)
        ]
        known = [_Value(n, x.leaves) for n, x in zip(numbers, first, strict=True)]
        before = None
        while later is not None and known != before:
            before, after = known, [_through(x, known) for x in later]
            known = [
                x._replace(leaves=x.leaves | y.leaves, reads=x.reads | y.reads)
                for x, y in zip(known, after, strict=True)
            ]
        return known

    def _facts(
        self, results: Iterable[tuple[_Placed, _Value]], shared: list[_Value]
    ) -> Iterator[tuple[int, _Value]]:
        """Yield the leaf of each array of results, and its value, with the shared arrays in it."""
        for at, x in results:
            if at.leaf is not None:
                x = _through(x, shared)
                read = [shared[i] for i in _bits(x.reads)]
                # A shared number may have been computed from several elements.
                through = any(y.leaves for y in read)
                combined = x.combined or self._odd(at) or "a shared array" * through
                key = "result", at.place, x.number, x.reads, *(y.number for y in read)
                yield at.leaf, x._replace(number=self.reader.number(*key), combined=combined)

    def _reading(
        self, facts: list[tuple[int, _Value]], shared: tuple[tuple[Any, ...], ...]
    ) -> Reading:
        names = leaf_names(self.structure.unflatten(range(self.structure.num_leaves)))
        keys: list[list[int]] = [[] for _ in names]
        for leaf, x in facts:
            keys[leaf].append(x.number)
            for other in _bits(x.leaves & ~(1 << leaf)):
                why = f"its result for {names[leaf]!r} is computed from {names[other]!r}, too"
                return Reading("mixing", why)
        leaves = tuple(map(tuple, keys))
        combining = next(((names[i], x.combined) for i, x in facts if x.combined), None)
        first_of = {dtype: i for i, (_, dtype) in reversed(self.types.items())}
        pairs = [(first_of[dtype], i) for i, (_, dtype) in self.types.items()]
        differing = next(((i, j) for i, j in pairs if leaves[i] != leaves[j]), None)
        why = ""
        if combining is not None:
            why = "it combines elements of {!r} ({})".format(*combining)
        elif differing is not None:
            why = "it treats {!r} and {!r} differently".format(*(names[i] for i in differing))
        elif any(None in each for each in shared):
            why = "its state has a value of all leaves"
        elif len(shared) > 1:
            why = "its first update changes the structure of its state"
        kind: Kind = "leaf-wise" if why else "element-wise"
        return Reading(kind, why, combining is None, leaves, shared)


def _through(x: _Value, shared: Sequence[_Value]) -> _Value:
    """Return a value with what it depends on through shared arrays, too."""
    read = [shared[i] for i in _bits(x.reads)]
    return x._replace(
        leaves=reduce(or_, (y.leaves for y in read), x.leaves),
        reads=reduce(or_, (y.reads for y in read), x.reads),
    )


def _types(variables: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(str(v.aval) for v in variables)


def _bits(bits: int) -> list[int]:
    """Return the members of a bit set."""
    return [i for i in range(bits.bit_length()) if bits >> i & 1]
