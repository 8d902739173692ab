"""Run an optax transform on each stage's leaves, with the paths and shapes of the model."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import only_over
from ...tracing import has_side_effects
from ...transform import instead_of, takes_extra
from ...tree import Staged, leaf_names, promoted
from ._buffer_packing import BufferPacking
from ._ties import Change, for_each_copy, in_each, seen_once
from ._transform_reader import ProgramReader, Reading

Buffers = dict[str, Any]
Branch = Callable[[int, list[Buffers], list[Any]], tuple[list[Buffers], list[Any]]]
"""A function (stage, its buffers, values that all stages share) -> (buffers, shared values)."""


class StagePacking(BufferPacking):
    """A packing that runs optax transforms on each stage's own leaves.

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
          ValueError: `tx` mixes leaves, or its program does not prove that it doesn't.
        """
        reading = self._read(tx, params, argument)
        if reading.on_buffers:
            return self._on_mesh(tx.init(params))  # type: ignore[arg-type]
        kinds = {name: x.dtype for name, x in params.items()}
        stages = range(self.num_stages)
        every = [jax.eval_shape(self._seen(tx.init, s), self.types(kinds, s)) for s in stages]
        form, keeps = _form(self, every), reading.by_element

        def branch(stage: int, staged: list[Buffers], _: list[Any]) -> Any:
            tree = self.tree(staged[0], stage, keeps)
            return form.packed(self._seen(tx.init, stage)(tree), stage, keeps)

        return form.state(*_per_stage(self, branch, [params.buffers], []))

    def update(
        self,
        tx: optax.GradientTransformationExtraArgs,
        updates: Staged,
        state: PyTree,
        params: Staged | None,
        extra: Mapping[str, Any],
    ) -> tuple[Staged, PyTree]:
        """Return updates and the new state, from `tx.update` on each stage's own leaves."""
        reading = self._read(tx, updates if params is None else params)
        if reading.on_buffers:
            return tx.update(updates, state, params, **extra)  # type: ignore[return-value]
        before, staged, shared = _Form.of(self, state)
        keeps = reading.by_element
        names = ["updates"] + ["params"] * (params is not None)
        names += [name for name, x in extra.items() if isinstance(x, Staged)]
        trees = {"updates": updates, "params": params, **extra}
        arrays = [name for name, x in extra.items() if _is_array(x)]
        rest = {name: x for name, x in extra.items() if name not in (*names, *arrays)}

        def updated(stage: int, staged: list[Buffers], shared: list[Any]) -> Any:
            local = dict(zip(names, (self.tree(x, stage, keeps) for x in staged), strict=False))
            old = before.unpacked(staged[len(names) :], shared[len(arrays) :], stage, keeps)
            args = local.pop("updates"), old, local.pop("params", None)
            kwargs = {**local, **dict(zip(arrays, shared, strict=False))}
            return self._seen(tx.update, stage)(*args, **kwargs, **rest)

        operands = [*(trees[name].buffers for name in names), *staged]
        equal = [*(extra[name] for name in arrays), *shared]
        form = before
        if reading.reshapes:  # such as that of a transform whose state begins empty
            local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), operands)
            every = [
                jax.eval_shape(partial(updated, s), local, equal)[1] for s in range(self.num_stages)
            ]
            form = _form(self, every)

        def branch(stage: int, staged: list[Buffers], shared: list[Any]) -> Any:
            new_updates, after = updated(stage, staged, shared)
            buffers, equal = form.packed(after, stage, keeps)
            return [self.buffers(new_updates, stage, keeps), *buffers], equal

        results, equal = _per_stage(self, branch, operands, equal)
        return self.staged(results[0]), form.state(results[1:], equal)

    def _read(
        self, tx: optax.GradientTransformationExtraArgs, tree: Staged, argument: str = "optimizer"
    ) -> "StageReading":
        """Read a transform; raise `ValueError` unless its result for a leaf depends on it alone."""
        dtypes = tuple((name, np.dtype(x.dtype)) for name, x in sorted(tree.items()))
        reading = read_on_stages(self, tx, dtypes)
        if reading.refusal:
            raise ValueError(
                f"`{argument}` must not hold a transform whose result for a leaf, or whose state, "
                "depends on leaves of other stages, since each stage of a pipeline updates its own "
                f"leaves, and its program does not prove that none does: {reading.refusal}"
            )
        return reading

    def _seen(self, fn: Callable[..., PyTree], stage: int) -> Callable[..., PyTree]:
        """Return `fn`, of a transform, that sees each tied parameter of a stage once."""
        if not self.ties:
            return fn

        def changed(tree: PyTree, change: Change) -> PyTree:
            held = self.stages[stage]
            return in_each(self.outer, tree, lambda parts: change(parts, self.ties, held))

        def seeing(*args: Any, **kwargs: Any) -> PyTree:
            args, kwargs = changed((args, kwargs), seen_once)
            return changed(fn(*args, **kwargs), for_each_copy)

        return seeing

    def _on_mesh(self, state: PyTree) -> PyTree:
        """Return the state with buffers split over the stages; fresh zeros would be replicated."""
        if not jax.sharding.get_abstract_mesh().empty:
            return state  # the caller has mapped axes, and places the state
        automatic = frozenset(self.mesh.abstract_mesh.auto_axes)
        if self.axis_name not in automatic:
            return state  # zeros like parameters have their type, which holds the sharding

        def place(x: Any) -> Any:
            if not isinstance(x, Staged):
                return x
            specs = x.packing.specs
            shardings = {n: NamedSharding(self.mesh, only_over(specs[n], automatic)) for n in x}
            return x.packing.staged(
                {n: lax.with_sharding_constraint(y, shardings[n]) for n, y in x.items()}
            )

        return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, Staged))

    def tree(self, buffers: Buffers, stage: int, keeps_parts: bool) -> PyTree:
        """Return the tree of a stage, laid out over the axes that the compiler handles.

        Args:
          buffers: the buffers of the stage, (*sizes, elements).
          stage: index of the device stage.
          keeps_parts: whether leaves stay sharded; False makes them whole. It must be False if `tx`
            combines elements of a leaf: for sharded leaves the compiler may then emit permutes
            among the devices of all stages, and devices in this branch wait forever for devices in
            another one (jax 0.10.2 on CPU hangs with Muon).
        """
        return self._laid_out(self.unpack(buffers, stage), stage, keeps_parts)

    def buffers(self, tree: PyTree, stage: int, keeps_parts: bool) -> Buffers:
        """Return the buffers of a stage from its tree; undo `StagePacking.tree`."""
        if not keeps_parts:
            tree = self._laid_out(tree, stage, keeps_parts)
        buffers = self.pack(self._laid_out(tree, stage, keeps_parts=True), stage)
        explicit = frozenset(jax.sharding.get_abstract_mesh().explicit_axes)
        if not explicit:
            return buffers
        # Types include the sharding over Explicit axes, and all branches must return equal types.
        specs = {name: only_over(P(*axes, None), explicit) for name, axes in self.axes.items()}
        return {name: jax.sharding.reshard(x, specs[name]) for name, x in buffers.items()}

    def _laid_out(self, tree: PyTree, stage: int, keeps_parts: bool) -> PyTree:
        """Return the tree with every leaf sharded like its buffer, or whole.

        Without the constraint the compiler may split buffers in other ways, and permute their
        parts.
        """
        automatic = frozenset(jax.sharding.get_abstract_mesh().auto_axes)
        if not automatic:
            return tree
        over = automatic if keeps_parts else frozenset[str]()
        return self.map(
            lambda p, x: lax.with_sharding_constraint(x, only_over(p.leaf.spec, over)),
            tree,
            stage=stage,
        )


class _Form(NamedTuple):
    """The structure of a transform's state: which parts are staged, and which are shared.

    Attributes:
      structure: the structure of the state, with one leaf for each node.
      nodes: the packing of each node; None for a node that is equal on all stages.
    """

    structure: Any
    nodes: tuple[StagePacking | None, ...]

    @classmethod
    def of(cls, packing: StagePacking, state: PyTree) -> tuple["_Form", list[Buffers], list[Any]]:
        """Return the form of a state, its buffers, and its values that are equal on all stages."""
        nodes, structure = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, Staged))
        packings = [x.packing if isinstance(x, Staged) else None for x in nodes]
        staged = [x.buffers for x in nodes if isinstance(x, Staged)]
        return (
            cls(structure, tuple(packings)),
            staged,
            [x for x in nodes if not isinstance(x, Staged)],
        )

    def packed(
        self, state: PyTree, stage: int, keeps_parts: bool
    ) -> tuple[list[Buffers], list[Any]]:
        """Return the buffers of one stage's state, and its values that are equal on all stages."""
        pairs = list(zip(self.nodes, self.structure.flatten_up_to(state), strict=True))
        staged = [p.buffers(x, stage, keeps_parts) for p, x in pairs if p is not None]
        return staged, [jnp.asarray(x) for p, x in pairs if p is None]

    def unpacked(
        self, staged: Sequence[Buffers], shared: Sequence[Any], stage: int, keeps_parts: bool
    ) -> PyTree:
        """Return the state of one stage."""
        buffers, values = iter(staged), iter(shared)
        return self.structure.unflatten(
            [
                next(values) if p is None else p.tree(next(buffers), stage, keeps_parts)
                for p in self.nodes
            ]
        )

    def state(self, staged: Sequence[Buffers], shared: Sequence[Any]) -> PyTree:
        """Return the state of all stages."""
        buffers, values = iter(staged), iter(shared)
        return self.structure.unflatten(
            [next(values) if p is None else p.staged(next(buffers)) for p in self.nodes]
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _form(packing: StagePacking, states: Sequence[PyTree]) -> _Form:
    """Return the form of the states of all stages, from one state of types for each."""
    flat = [jax.tree.flatten(state, is_leaf=packing.mirrors) for state in states]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ValueError(
            "`optimizer` must keep states of one structure for all stages, got "
            f"{', '.join(str(other) for _, other in flat)}."
        )
    nodes = zip(*(of_stage for of_stage, _ in flat), strict=True)
    packings = (packing.like(each) if packing.mirrors(each[0]) else None for each in nodes)
    return _Form(structure, tuple(packings))


def _per_stage(
    packing: BufferPacking, branch: Branch, staged: list[Buffers], shared: list[Any]
) -> tuple[list[Buffers], list[Any]]:
    """Run `branch` of each stage on its devices.

    Args:
      packing: the packing of the parameters, with the axis of the stages and the mesh.
      branch: the program of one stage.
      staged: buffers (stages, ...).
      shared: values that are equal on all stages; the shared results of `branch` must be so, too.
    """
    axis = packing.axis_name

    def device(staged: list[Buffers], shared: list[Any]) -> Any:
        local = jax.tree.map(lambda x: x[0], staged)
        branches = _branches([partial(branch, s) for s in range(packing.num_stages)], local, shared)
        results, equal = branches(lax.axis_index(axis), local, shared)
        return jax.tree.map(lambda x: x[None], results), equal

    if packing.num_stages == 1:
        results, equal = branch(0, jax.tree.map(lambda x: x[0], staged), shared)
        return jax.tree.map(lambda x: x[None], results), equal
    context = jax.sharding.get_abstract_mesh()
    # `check_vma=False`: shared results are equal on all stages because their inputs are equal, but
    # types cannot prove it.
    mapped = jax.shard_map(
        device,
        mesh=packing.mesh if context.empty else context,
        axis_names={axis},
        in_specs=(P(axis), P()),
        out_specs=(P(axis), P()),
        check_vma=False,
    )
    if context.empty:  # outside of jit, `shard_map` can only map all axes of a mesh
        mapped = jax.jit(mapped)
    return mapped(staged, shared)


def _branches(branches: Sequence[Callable[..., Any]], *operands: PyTree) -> Callable[..., Any]:
    """Return a function (number of a branch, *operands) that runs this branch.

    Branches that compute the same, such as those of stages with equal layers, become one branch,
    which is compiled once. Each result has the dtype to which those of all branches promote.
    """
    programs: dict[Any, Any] = {}
    reader = ProgramReader()
    numbers, kinds = [], []
    structure: Any = None
    for branch in branches:
        closed, results = jax.make_jaxpr(branch, return_shape=True)(*operands)
        leaves, structure = jax.tree.flatten(results)
        kinds.append([x.dtype for x in leaves])
        prints = any(map(has_side_effects, closed.jaxpr.eqns))
        key = len(programs) if prints else reader.key(closed)
        numbers.append(programs.setdefault(key, (len(programs), closed))[0])
    # `jnp.result_type` refuses PRNG keys, so equal dtypes are kept without it.
    widest = [x[0] if len(set(x)) == 1 else promoted(*x) for x in zip(*kinds, strict=True)]

    def run(closed: Any, *operands: PyTree) -> PyTree:
        results = map(jnp.asarray, jaxpr_as_fun(closed)(*jax.tree.leaves(operands)))
        pairs = zip(results, widest, strict=True)
        return structure.unflatten([x if x.dtype == t else x.astype(t) for x, t in pairs])

    every = [partial(run, closed) for _, closed in programs.values()]
    if len(every) == 1:
        return lambda index, *operands: every[0](*operands)
    return lambda index, *operands: lax.switch(jnp.asarray(numbers)[index], every, *operands)


# Reading.


_EXTRA = ("value", "grad", "value_fn")  # the extra arguments that a training step passes


class StageReading(NamedTuple):
    """The result of reading a transform for a model in stages.

    Attributes:
      refusal: why its result for a leaf may depend on leaves of other stages, and what to use
        instead; "" if it was proved not to.
      on_buffers: whether its results on the buffers of all stages are those on the leaves.
      by_element: whether it combines no elements of a leaf, so that leaves may stay sharded.
      reshapes: whether an update gives the state another structure.
    """

    refusal: str
    on_buffers: bool = False
    by_element: bool = False
    reshapes: bool = False


@functools.lru_cache(maxsize=64)
def read_on_stages(
    packing: BufferPacking,
    tx: optax.GradientTransformationExtraArgs,
    dtypes: tuple[tuple[str, Any], ...],
) -> StageReading:
    """Read a transform for a model in stages.

    Args:
      packing: the packing of the parameters.
      tx: the transform.
      dtypes: name and dtype of each buffer.

    Communication: none; nothing is run.
    """
    reader = ProgramReader()
    types = {n: jax.ShapeDtypeStruct(packing.shapes[n], dtype) for n, dtype in dtypes}
    model = packing.model_types(types)
    state = jax.eval_shape(tx.init, model)
    read = functools.partial(reader.read, tx, extra=_EXTRA if takes_extra(state) else ())
    reading = read(model)
    buffer_of = [leaf.buffer for group in packing.leaves for leaf in group]
    leaf_of = [buffer_of.index(name) for name in types]
    if reading.equals_on_buffers(read(packing.staged(types)), leaf_of):
        return StageReading("", on_buffers=True)

    def read_held(tree: PyTree, held: Collection[int]) -> Reading:
        parts = seen_once(packing.outer.flatten_up_to(tree), packing.ties, held)
        tree = packing.outer.unflatten(parts)
        return read(tree, structure=packing.outer, is_like=packing.mirrors)

    whole = read_held(model, range(len(packing.leaves)))
    every = [
        read_held(packing.types(dict(dtypes), stage), held)
        for stage, held in enumerate(packing.stages)
    ]
    if packing.num_stages > 1 and (why := _why_not(packing, whole, every)):
        return StageReading(f"{why}. {instead_of(state)}")
    return StageReading("", False, whole.by_element, reshapes=len(whole.shared) > 1)


def _why_not(packing: BufferPacking, whole: Reading, every: list[Reading]) -> str:
    """Return why results for a stage may not be those for the whole model; "" if they are."""
    for reading in (whole, *every):
        if reading.kind == "mixing":
            return reading.why
    names = leaf_names(packing.outer.unflatten(range(len(packing.leaves))))
    for reading in every:
        for name, alone, among_all in zip(names, reading.leaves, whole.leaves, strict=True):
            if alone and alone != among_all:
                return f"it treats {name!r} differently where it sees other leaves, too"
    for key, *others in zip(*([*chain(*each.shared)] for each in (whole, *every)), strict=True):
        if key is None or {key} != {*others}:
            return (
                "it keeps a number that is computed from leaves, so that stages would differ in it"
            )
    return ""
