"""Run an optax transform on the leaves of each stage: a part of its program for the model.

A program that treats all elements alike runs on the buffers. `ElementReader` finds this out: it
follows a program from its inputs to its outputs and runs nothing. Each value gets the number of the
expression that computes one of its elements: equal numbers mean equal expressions, also between
programs for leaves of other shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import restrict_spec
from ...tracing import CALLS, constants_in, equations_in, interpret, loss_arguments
from ...transform import alternatives_to, takes_extra
from ...tree import Staged, leaf_names, promoted_dtype, type_text
from ._buffer_packing import BufferPacking
from ._ties import TiedMap, drop_tied_copies, restore_tied_copies

# The result of these primitives for an element depends on no other element.
_OF_ELEMENTS = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "cos", "cosh", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}  # fmt: skip
# The result of these primitives is the operand, perhaps elsewhere.
_SAME = {"copy", "reshard", "sharding_constraint", "stop_gradient"}
# Each result of these primitives depends on the operand of its own position.
_SIDE_BY_SIDE = {"optimization_barrier", "pmax", "pmin", "psum"}
_OF_SHAPES = {"shape", "sharding", "broadcast_dimensions", "out_sharding"}


class Element(NamedTuple):
    """What a program says of a value.

    Attributes:
      number: the number of the expression that computes an element of it.
      leaf: position of the parameter of whose leaves it is computed; None if of none.
      combines: whether its elements are computed from others than those at their own place in
        leaves of one parameter.
    """

    number: int
    leaf: int | None
    combines: bool


class ElementReader:
    """A reader of programs, all of whose numbers can be compared."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._held: list[Any] = []  # objects whose `id` is part of an expression

    def input(self, place: Any, *, leaf: int | None, combines: bool) -> Element:
        """Return the value of an input; those at an equal place of two programs are equal."""
        return Element(self._number("input", place), leaf, combines)

    def read(self, program: Any, inputs: Sequence[Element]) -> list[Element]:
        """Return the values of the outputs of a program, an open or closed jaxpr."""
        return interpret(program, inputs, self._equation, self._constant)

    def _number(self, *expression: Any) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def _equation(self, eqn: Any, operands: list[Element]) -> list[Element]:
        name, params = eqn.primitive.name, eqn.params
        called = params.get(CALLS.get(name, ""))
        if called is not None:
            return self.read(called, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name in _SAME:
            return operands
        if name in _SIDE_BY_SIDE and len(operands) > 1:
            each = zip(operands, eqn.invars, eqn.outvars, strict=True)
            return [self._operation(eqn, [x], [i], [o])[0] for x, i, o in each]
        return self._operation(eqn, operands, eqn.invars, eqn.outvars)

    def _operation(
        self, eqn: Any, operands: list[Element], invars: Sequence[Any], outvars: Sequence[Any]
    ) -> list[Element]:
        name = eqn.primitive.name
        combines = any(x.combines for x in operands) or len(_leaves(operands)) > 1
        if name == "broadcast_in_dim" and not combines and not invars[0].aval.shape:
            return operands[:1]  # every element of a broadcast number is that number
        combines |= name not in _OF_ELEMENTS
        # The expression of an element says nothing of shapes: leaves of other shapes have it, too.
        options = {k: x for k, x in eqn.params.items() if combines or k not in _OF_SHAPES}
        types = [str(v.aval) for v in (*invars, *outvars)] if combines else ()
        key = name, *(x.number for x in operands), str(options), *types
        return [self._result((*key, i), operands, v, combines) for i, v in enumerate(outvars)]

    def _cond(self, eqn: Any, operands: list[Element]) -> list[Element]:
        index, *rest = operands
        branches = [self.read(branch, rest) for branch in eqn.params["branches"]]
        results = []
        for var, *each in zip(eqn.outvars, *branches, strict=True):
            # An index of leaves selects all elements by some of them.
            combines = index.leaf is not None or any(x.combines for x in each)
            key = "cond", index.number, *(x.number for x in each)
            results.append(self._result(key, [index, *each], var, combines))
        return results

    def _result(self, key: Any, operands: list[Element], var: Any, combines: bool) -> Element:
        leaves = _leaves(operands)
        is_number = not getattr(var.aval, "shape", ())
        # A number that leaves have no part in is one for all elements, whatever it is made of.
        combines = len(leaves) > 1 or (combines and (bool(leaves) or not is_number))
        return Element(self._number(*key), min(leaves, default=None), combines)

    def _constant(self, x: Any) -> Element:
        x = object() if x is None else x  # it is not in the program
        self._held.append(x)
        key: Any = id(x)
        if isinstance(x, np.ndarray | np.generic) and np.ndim(x) == 0:
            key = str(x.dtype), x.tobytes()
        return Element(self._number("constant", key), None, bool(np.ndim(x)))


def _leaves(values: Sequence[Element]) -> set[int]:
    return {x.leaf for x in values if x.leaf is not None}


Buffers = dict[str, Any]


class StagePacking(BufferPacking):
    """A packing that runs optax transforms on each stage's own leaves.

    A transform is traced for the model's own trees, so it sees their paths, shapes and all of their
    leaves. Each stage computes the part of this program that gives the results for its leaves. A
    transform that treats all elements alike runs on the buffers as they are.

    Communication: none, except what the compiler exchanges over axes inside a stage.
    """

    def init(
        self, tx: optax.GradientTransformationExtraArgs, params: Staged, argument: str = "optimizer"
    ) -> PyTree:
        """Return the initial state of `tx`, made from each stage's own leaves.

        Args:
          tx: a transform whose result for a leaf depends on this leaf alone.
          params: the parameters.
          argument: the public argument that `tx` was, for the message.

        Returns:
          The state that `tx` has without stages, with a `Staged` tree in the place of each tree
          like the parameters. Leaves that are equal on all stages, such as counters, are unchanged.

        Raises:
          ValueError: a result of `tx` for a leaf is computed from leaves of other stages.
        """
        value = jnp.zeros((), jnp.float32)

        def update(params: Staged, state: PyTree, value: jax.Array) -> PyTree:
            extra = loss_arguments(params, value) if takes_extra(state) else {}
            return self.update(tx, params, state, params, extra, argument)

        try:
            state = self._run_on_stages(argument, tx.init, params)
            if self.num_stages > 1:
                jax.eval_shape(update, params, state, value)  # refuses now what it would combine
        except _OtherStagesError:
            raise
        except Exception as error:  # a transform is any code, and tracing it may raise anything
            if self.num_stages == 1:
                raise
            why = f"it can't be traced for them ({type(error).__name__}: {error})"
            raise _OtherStagesError(argument, why, alternatives_to(())) from error
        return state

    def update(
        self,
        tx: optax.GradientTransformationExtraArgs,
        updates: Staged,
        state: PyTree,
        params: Staged | None,
        extra: Mapping[str, Any],
        argument: str = "optimizer",
    ) -> tuple[Staged, PyTree]:
        """Return updates and the new state, from `tx.update` on each stage's own leaves."""
        arrays = {name: x for name, x in extra.items() if _holds_arrays(x)}
        others = {name: x for name, x in extra.items() if name not in arrays}

        def call_update(updates: PyTree, state: PyTree, params: PyTree, arrays: Any) -> Any:
            return tx.update(updates, state, params, **arrays, **others)

        return self._run_on_stages(argument, call_update, updates, state, params, arrays)

    def _run_on_stages(self, argument: str, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Return `fn(*args)`, of which each stage computes what belongs to its own leaves."""
        context = jax.sharding.get_abstract_mesh()
        inside = self.mesh.abstract_mesh if context.empty else context
        if self.num_stages > 1:
            inside = inside.update_axis_types({self.axis_name: AxisType.Manual})
        with jax.sharding.use_abstract_mesh(inside):  # a part of types, as it will be below
            program = _ModelProgram.trace(self, argument, fn, args)
        by_element, on_buffers = program.read(fn, args)
        if on_buffers:
            return self._shard_over_stages(fn(*args))
        nodes = jax.tree.leaves(args, is_leaf=_has_buffers)
        staged = [x.buffers for x in nodes if _has_buffers(x)]
        shared = [x for x in nodes if not _has_buffers(x)]
        numbers = range(self.num_stages)

        def device(staged: list[Buffers], shared: list[Any]) -> Any:
            local = jax.tree.map(lambda x: x[0], staged)
            branches = [partial(program.run, program.part(i), i, by_element) for i in numbers]
            stage = lax.axis_index(self.axis_name) if self.num_stages > 1 else 0
            results, equal = _switch(branches, local, shared)(stage, local, shared)
            return jax.tree.map(lambda x: x[None], results), equal

        mapped: Any = device
        if self.num_stages > 1:
            # `check_vma=False`: shared results are equal on all stages because their inputs are,
            # but types cannot prove it.
            mapped = jax.shard_map(
                device,
                mesh=self.mesh if context.empty else context,
                axis_names={self.axis_name},
                in_specs=(P(self.axis_name), P()),
                out_specs=(P(self.axis_name), P()),
                check_vma=False,
            )
            if context.empty:  # outside of jit, `shard_map` can only map all axes of a mesh
                mapped = jax.jit(mapped)
        results, equal = map(iter, mapped(staged, shared))
        return program.structure.unflatten(
            next(equal) if packing is None else packing.wrap_buffers(next(results))
            for packing in program.after
        )

    def _shard_over_stages(self, tree: PyTree) -> PyTree:
        """Return a tree with buffers split over the stages; fresh zeros would be replicated."""
        if not jax.sharding.get_abstract_mesh().empty:
            return tree  # the caller has mapped axes, and places the state
        automatic = frozenset(self.mesh.abstract_mesh.auto_axes)

        def place(x: Any) -> Any:
            if not _has_buffers(x):
                return x
            if self.axis_name not in automatic:  # jax 0.12 makes zeros like parameters replicated
                return x.packing.wrap_buffers(x.packing.reshard_explicit(x.buffers))
            specs = x.packing.specs
            shardings = {n: NamedSharding(self.mesh, restrict_spec(specs[n], automatic)) for n in x}
            return x.packing.wrap_buffers(
                {n: lax.with_sharding_constraint(y, shardings[n]) for n, y in x.items()}
            )

        return jax.tree.map(place, tree, is_leaf=_has_buffers)

    def stage_tree(self, buffers: Buffers, stage: int, keeps_parts: bool) -> PyTree:
        """Return the tree of a stage, laid out over the axes that the compiler handles.

        Args:
          buffers: the buffers of the stage, (*sizes, elements).
          stage: index of the device stage.
          keeps_parts: whether leaves stay sharded; False makes them whole. It must be False if `tx`
            combines elements of a leaf: for sharded leaves the compiler may then emit permutes
            among the devices of all stages, and devices in this branch wait forever for devices in
            another one (jax 0.10.2 on CPU hangs with Muon).
        """
        return self._constrain_sharding(self.unpack(buffers, stage), stage, keeps_parts)

    def stage_buffers(self, tree: PyTree, stage: int, keeps_parts: bool) -> Buffers:
        """Return the buffers of a stage from its tree; undo `StagePacking.stage_tree`."""
        if not keeps_parts:
            tree = self._constrain_sharding(tree, stage, keeps_parts)
        buffers = self.pack(self._constrain_sharding(tree, stage, keeps_parts=True), stage)
        explicit = frozenset(jax.sharding.get_abstract_mesh().explicit_axes)
        if not explicit:
            return buffers
        # Types include the sharding over Explicit axes, and all branches must return equal types.
        specs = {name: restrict_spec(P(*axes, None), explicit) for name, axes in self.axes.items()}
        return {name: jax.sharding.reshard(x, specs[name]) for name, x in buffers.items()}

    def types_here(self, buffers: Mapping[str, Any]) -> PyTree:
        """Return the types of the model's tree, with the Explicit axes of this point of a trace."""
        types, context = self.model_types(buffers), jax.sharding.get_abstract_mesh()
        if not (explicit := frozenset(context.explicit_axes)):
            return types

        def leaf_type(place: Any, x: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(context, restrict_spec(place.leaf.spec, explicit))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self.map(leaf_type, types)

    def _constrain_sharding(self, tree: PyTree, stage: int, keeps_parts: bool) -> PyTree:
        """Return the tree with every leaf sharded like its buffer, or whole.

        Without the constraint the compiler may split buffers in other ways, and permute their
        parts.
        """
        automatic = frozenset(jax.sharding.get_abstract_mesh().auto_axes)
        if not automatic:
            return tree
        over = automatic if keeps_parts else frozenset[str]()
        return self.map(
            lambda p, x: lax.with_sharding_constraint(x, restrict_spec(p.leaf.spec, over)),
            tree,
            stage=stage,
        )


class _Place(NamedTuple):
    """The place of an array among the nodes of arguments or results.

    Attributes:
      node: number of the node.
      position: that of the leaf which the array belongs to; None for one that all leaves share.
      index: number of the array among those of this leaf in this node.
    """

    node: int
    position: int | None = None
    index: int = 0


class _Part(NamedTuple):
    """The part of a program that one stage runs, and the places of its inputs."""

    run: Callable[..., Sequence[Any]]
    inputs: list[_Place]


class _ModelProgram(NamedTuple):
    """The program of a function of trees of the whole model, of which each stage runs a part.

    Its arguments and results are nodes: trees like the parameters, and arrays that all leaves
    share.

    Attributes:
      packing: the packing of the parameters.
      argument: the public argument that the function's transform was.
      closed: the program.
      before: for each node of the arguments its packing; None for an array that all leaves share.
      inputs: the place of each input of the program.
      after: for each node of the results its packing, or None.
      shared: the types of the results that all leaves share.
      outputs: the place of each output.
      structure: the structure of the results, with one leaf for each node.
      instead: what to use instead of a transform that is refused.
    """

    packing: StagePacking
    argument: str
    closed: ClosedJaxpr
    before: tuple[StagePacking | None, ...]
    inputs: tuple[_Place, ...]
    after: tuple[StagePacking | None, ...]
    shared: list[str]
    outputs: tuple[_Place, ...]
    structure: Any
    instead: str

    @classmethod
    def trace(
        cls, packing: StagePacking, argument: str, fn: Callable[..., PyTree], args: PyTree
    ) -> "_ModelProgram":
        """Trace `fn(*args)`, with the model's own trees in the place of `Staged` ones."""
        nodes, of_args = jax.tree.flatten(args, is_leaf=_has_buffers)
        before = tuple(x.packing if _has_buffers(x) else None for x in nodes)
        trees = [x.packing.types_here(x.buffers) if _has_buffers(x) else _type(x) for x in nodes]
        every, is_like = range(len(packing.leaves)), packing.matches_params

        def map_copies(change: TiedMap, tree: PyTree) -> PyTree:
            parts = packing.outer.flatten_up_to(tree)
            return packing.outer.unflatten(change(parts, packing.ties, every))

        def model_fn(*trees: PyTree) -> PyTree:
            pairs = zip(before, trees, strict=True)
            seen = [x if p is None else map_copies(drop_tied_copies, x) for p, x in pairs]
            results = fn(*of_args.unflatten(seen))
            one = lambda x: map_copies(restore_tied_copies, x) if is_like(x) else x  # noqa: E731
            return jax.tree.map(one, results, is_leaf=is_like)

        # Transforms ask whether values have types of mapped axes, as that of the stages will be.
        bound = [(packing.axis_name, packing.num_stages)] if packing.num_stages > 1 else None
        closed, results = jax.make_jaxpr(model_fn, axis_env=bound, return_shape=True)(*trees)
        nodes_after, structure = jax.tree.flatten(results, is_leaf=is_like)
        after = tuple(packing.for_tree(x) if is_like(x) else None for x in nodes_after)
        return cls(
            packing=packing,
            argument=argument,
            closed=closed,
            before=before,
            inputs=tuple(_places(packing.outer, before, trees)),
            after=after,
            shared=[type_text(x) for x in nodes_after if not is_like(x)],
            outputs=tuple(_places(packing.outer, after, nodes_after)),
            structure=structure,
            instead=alternatives_to(args),
        )

    def read(self, fn: Callable[..., PyTree], args: PyTree) -> tuple[bool, bool]:
        """Return whether no elements of a leaf are combined, and whether buffers may be leaves.

        They may if all elements of all leaves in a buffer are treated alike, and if `fn(*args)`
        treats those of the buffer in the same way.
        """
        reader, nodes = ElementReader(), jax.tree.leaves(args, is_leaf=_has_buffers)

        def values(places: Iterable[_Place], program: Any) -> list[Element]:
            inputs = []
            for at in places:
                packing, leaf = self.before[at.node], at.position
                is_other = jnp.ndim(nodes[at.node]) > 0 if leaf is None else packing != self.packing
                inputs.append(reader.input((at.node, at.index), leaf=leaf, combines=is_other))
            return reader.read(program, inputs)

        def numbers(places: Iterable[_Place], buffer_of: Sequence[str], values: Any) -> set[Any]:
            """Return the numbers of each node's buffers, and of what all leaves share."""
            return {
                (at.node, None if at.position is None else buffer_of[at.position], x.number)
                for at, x in zip(places, values, strict=True)
            }

        results = values(self.inputs, self.closed)
        first = {i: group[0] for group in self.packing.ties for i in group}
        for at, x in zip(self.outputs, results, strict=True):
            # The result for a leaf may be another one of the same shape.
            own = None if at.position is None else first.get(at.position, at.position)
            if at.position is not None and (x.combines or x.leaf not in (None, own)):
                return False, False
        try:
            program, result = jax.make_jaxpr(fn, return_shape=True)(*args)
        except Exception:  # it may not know what to do with buffers
            return True, False
        result = jax.tree.leaves(result, is_leaf=_has_buffers)
        after = [x.packing if _has_buffers(x) else None for x in result]
        shared = [x for x in result if not _has_buffers(x)]
        if after != list(self.after) or list(map(type_text, shared)) != self.shared:
            return True, False
        before, results_of_buffers = ([*_places_of_buffers(x)] for x in (nodes, result))
        of_model = numbers(self.outputs, [leaf.buffer for leaf, *_ in self.packing.leaves], results)
        names = sorted(self.packing.axes)
        return True, of_model == numbers(results_of_buffers, names, values(before, program))

    def part(self, stage: int) -> _Part:
        """Return the part of the program that gives the results for a stage's leaves.

        Raises:
          ValueError: it takes leaves of other stages.
        """
        held = frozenset(self.packing.stages[stage])
        # A stage that holds a copy of a tied parameter has it in the place of the first one.
        near = held.union(group[0] for group in self.packing.ties if held.intersection(group))
        wanted = [at.position is None or at.position in held for at in self.outputs]
        part, used = dce_jaxpr(self._drop_other_callbacks(near), wanted)
        inputs = [at for at, is_used in zip(self.inputs, used, strict=True) if is_used]
        if beyond := {x.position for x in inputs if x.position is not None} - near:
            raise _OtherStagesError(self.argument, self._refusal_reason(min(beyond)), self.instead)
        return _Part(jaxpr_as_fun(ClosedJaxpr(part, self.closed.consts)), inputs)

    def _drop_other_callbacks(self, leaves: frozenset[int]) -> Any:
        """Return the program, of whose prints and callbacks only those of these leaves are left."""
        jaxpr, eqns = self.closed.jaxpr, []
        pairs = zip(jaxpr.invars, self.inputs, strict=True)
        needs = {v: frozenset(() if at.position is None else (at.position,)) for v, at in pairs}
        for eqn in jaxpr.eqns:
            operands = [v for v in eqn.invars if isinstance(v, Var)]
            of_eqn = frozenset[Any]().union(*(needs.get(v, ()) for v in operands))
            needs |= dict.fromkeys(eqn.outvars, of_eqn)
            if eqn.outvars or of_eqn <= leaves:
                eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def _refusal_reason(self, other: int) -> str:
        """Return why a leaf is used on a stage that does not hold it."""
        names = leaf_names(self.packing.outer.unflatten(range(len(self.packing.leaves))))
        for i, at in enumerate(self.outputs):
            wanted = [j == i for j, _ in enumerate(self.outputs)]
            _, used = dce_jaxpr(self.closed.jaxpr, wanted)
            needs = {x.position for x, is_used in zip(self.inputs, used, strict=True) if is_used}
            if other not in needs or other == at.position:
                continue
            if at.position is None:
                return f"it keeps a number that is computed from leaves, such as {names[other]!r}"
            return f"its result for {names[at.position]!r} is computed from {names[other]!r}, too"
        return f"it prints {names[other]!r}, or calls the host with it"

    def run(
        self, part: _Part, stage: int, keeps_parts: bool, staged: list[Buffers], shared: list[Any]
    ) -> tuple[list[Buffers], list[Any]]:
        """Return the buffers of a stage's results, and the results that all leaves share.

        Args:
          part: the part of the program for this stage.
          stage: index of the device stage.
          keeps_parts: see `StagePacking.stage_tree`.
          staged: the buffers of this stage for each tree of the arguments.
          shared: the arrays that all leaves share.
        """
        outer, held = self.packing.outer, frozenset(self.packing.stages[stage])
        buffers, arrays = iter(staged), iter(shared)
        nodes: list[Any] = []
        for packing in self.before:
            if packing is None:
                nodes.append(next(arrays))
            else:
                parts = outer.flatten_up_to(packing.stage_tree(next(buffers), stage, keeps_parts))
                parts = drop_tied_copies(parts, self.packing.ties, held)
                nodes.append([jax.tree.leaves(x) for x in parts])

        def array(at: _Place) -> Any:
            node = nodes[at.node]
            return node if at.position is None else node[at.position][at.index]

        results = iter(part.run(*map(array, part.inputs)))
        new, equal = [], []
        for packing in self.after:
            if packing is None:
                equal.append(jnp.asarray(next(results)))
            else:
                tree = packing.map(lambda _: next(results), stage=stage)
                new.append(packing.stage_buffers(tree, stage, keeps_parts))
        return new, equal


def _has_buffers(x: Any) -> bool:
    return isinstance(x, Staged)


def _type(x: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _holds_arrays(x: PyTree) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=_has_buffers)
    return all(isinstance(y, jax.Array | np.ndarray | np.generic | Staged) for y in leaves)


def _places(
    outer: Any, packings: Sequence[StagePacking | None], nodes: Sequence[Any]
) -> Iterator[_Place]:
    """Yield the place of each array of these nodes, which are trees of the model."""
    for number, (packing, node) in enumerate(zip(packings, nodes, strict=True)):
        if packing is None:
            yield _Place(number)
            continue
        for position, part in enumerate(outer.flatten_up_to(node)):
            yield from (_Place(number, position, i) for i, _ in enumerate(jax.tree.leaves(part)))


def _places_of_buffers(nodes: Sequence[Any]) -> Iterator[_Place]:
    """Yield the place of each array of these nodes, each buffer as if it were a leaf."""
    for number, node in enumerate(nodes):
        if _has_buffers(node):
            yield from (_Place(number, i) for i, _ in enumerate(node))
        else:
            yield _Place(number)


class _OtherStagesError(ValueError):
    """A transform is refused, since it combines leaves of several stages."""

    def __init__(self, argument: str, why: str, instead: str) -> None:
        super().__init__(
            f"`{argument}` must not hold a transform whose update of a leaf depends on leaves of "
            f"other stages: {why}. {instead}"
        )


def _switch(branches: Sequence[Callable[..., Any]], *operands: PyTree) -> Callable[..., Any]:
    """Return a function (number of a branch, *operands) that runs this branch.

    Branches of the same program, such as those of stages with equal layers, become one branch,
    which is compiled once. Each result has the dtype to which those of all branches promote.
    """
    programs: dict[Any, Any] = {}
    numbers, kinds = [], []
    structure: Any = None
    for branch in branches:
        closed, results = jax.make_jaxpr(branch, return_shape=True)(*operands)
        leaves, structure = jax.tree.flatten(results)
        kinds.append([x.dtype for x in leaves])
        # The text of a program shows neither.
        callbacks = (eqn.params.get("callback") for eqn in equations_in(closed))
        key = str(closed.jaxpr), *map(id, (*constants_in(closed), *callbacks))
        numbers.append(programs.setdefault(key, (len(programs), closed))[0])
    # `jnp.result_type` refuses PRNG keys, so equal dtypes are kept without it.
    widest = [x[0] if len(set(x)) == 1 else promoted_dtype(*x) for x in zip(*kinds, strict=True)]

    def run(closed: Any, *operands: PyTree) -> PyTree:
        results = map(jnp.asarray, jaxpr_as_fun(closed)(*jax.tree.leaves(operands)))
        pairs = zip(results, widest, strict=True)
        return structure.unflatten([x if x.dtype == t else x.astype(t) for x, t in pairs])

    every = [partial(run, closed) for _, closed in programs.values()]
    if len(every) == 1:
        return lambda index, *operands: every[0](*operands)
    return lambda index, *operands: lax.switch(jnp.asarray(numbers)[index], every, *operands)
