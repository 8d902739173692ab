"""The buffers of all stages: packed from a tree of the whole model or of a stage, and read back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import array_from_host, restrict_spec
from ...tree import Leaf, LeafPlace, Staged, promoted_dtype
from ._ties import has_prefix

_MULTIPLE = 64  # of elements; below its square the padding would be above 1.6 %


def _pad_size(size: int) -> int:
    return size if size < _MULTIPLE**2 else -(-size // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True)
class BufferPacking:
    """A description of how the leaves of all stages are packed into flat buffers.

    The tree of one stage is the tree of the whole model in which `optax.MaskedNode()` stands for
    every leaf that this stage does not hold, so that paths and shapes are those of the model.

    Attributes:
      outer: structure of the model's parameters.
      subtrees: structure of the tree in the place of each parameter: one leaf, except in optimizer
        states that keep several arrays for each parameter, or none.
      leaves: the arrays of each such subtree.
      stages: positions of each device stage's parameters, in the order of its buffers.
      ties: positions of the copies of each tied parameter; norms and optimizers see only the first.
      axis_sizes: sizes of the axes inside a stage, in the order of the mesh.
      axis_name: the axis of the stages.
      mesh: the devices; ignored when packings are compared.
    """

    outer: Any
    subtrees: tuple[Any, ...]
    leaves: tuple[tuple[Leaf, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    ties: tuple[tuple[int, ...], ...]
    axis_sizes: tuple[tuple[str, int], ...]
    axis_name: str
    mesh: Mesh = field(compare=False)

    @cached_property
    def _hash(self) -> int:
        fields = self.outer, self.subtrees, self.leaves, self.stages, self.ties
        return hash((*fields, self.axis_sizes, self.axis_name))

    def __hash__(self) -> int:
        return self._hash  # cached, as hashing thousands of leaves takes a while

    @property
    def copies(self) -> frozenset[int]:
        """Positions of parameters that are tied to an earlier one."""
        return frozenset(i for group in self.ties for i in group[1:])

    @property
    def num_stages(self) -> int:
        """The number of device stages."""
        return len(self.stages)

    @cached_property
    def places(self) -> tuple[tuple[LeafPlace, ...], ...]:
        """The places of the arrays of each parameter's subtree; () if no stage holds it."""
        by_parameter: list[tuple[LeafPlace, ...]] = [()] * len(self.leaves)
        for stage, positions in enumerate(self.stages):
            ends: dict[str, int] = {}
            for position in positions:
                places = []
                for leaf in self.leaves[position]:
                    start = ends.get(leaf.buffer, 0)
                    ends[leaf.buffer] = start + leaf.part_size
                    places.append(LeafPlace(stage, start, leaf))
                by_parameter[position] = tuple(places)
        return tuple(by_parameter)

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes over which the leaves of each buffer are sharded, in the order of the mesh."""
        leaves = {leaf.buffer: leaf for leaves in self.leaves for leaf in leaves}
        return {n: tuple(axis for axis, _ in leaf.sizes) for n, leaf in sorted(leaves.items())}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each buffer, (stages, *sizes, elements of the fullest stage).

        Large ones are padded, so that common numbers of replicas cut them into equal blocks.
        """
        ends = dict.fromkeys(self.axes, 0)
        for place in (place for places in self.places for place in places):
            end = place.start + place.leaf.part_size
            ends[place.leaf.buffer] = max(ends[place.leaf.buffer], end)
        sizes = dict(self.axis_sizes)
        return {
            n: (self.num_stages, *(sizes[axis] for axis in self.axes[n]), _pad_size(end))
            for n, end in ends.items()
        }

    @property
    def specs(self) -> dict[str, P]:
        """The sharding of each buffer."""
        return {name: P(self.axis_name, *axes, None) for name, axes in self.axes.items()}

    def wrap_buffers(self, buffers: Mapping[str, Any]) -> Staged:
        """Return the buffers as a `Staged` tree."""
        return Staged(dict(buffers), self)

    def map(self, fn: Callable[..., Any], *trees: PyTree, stage: int | None = None) -> PyTree:
        """Return the tree of `fn(place, *leaves)`, of one stage or (None) of the whole model."""
        held = range(len(self.leaves)) if stage is None else frozenset(self.stages[stage])

        def node(position: int, *parts: PyTree) -> PyTree:
            if position not in held:
                return optax.MaskedNode()
            subtree = self.subtrees[position]
            leaves = [subtree.flatten_up_to(part) for part in parts]
            return subtree.unflatten(map(fn, self.places[position], *leaves))

        parts = [self.outer.flatten_up_to(tree) for tree in trees]
        return self.outer.unflatten(map(node, range(len(self.leaves)), *parts))

    def unpack(self, buffers: Mapping[str, Any], stage: int) -> PyTree:
        """Return the tree of one stage, read from its buffers (*sizes, elements)."""
        return self.map(lambda p: p.read(buffers[p.leaf.buffer]), stage=stage)

    def pack(self, tree: PyTree, stage: int, numpy: Any = jnp, num_lead: int = 0) -> dict[str, Any]:
        """Return the buffers of a stage, (*lead, *sizes, elements).

        Args:
          tree: the tree of this stage, or of the whole model.
          stage: index of the device stage.
          numpy: `jax.numpy`, or NumPy for arrays of the host.
          num_lead: number of dimensions that leaves have before their own, such as replicas.

        Returns:
          Buffers, each in the dtype to which all of its leaves promote.
        """
        parts = self.outer.flatten_up_to(tree)
        pieces: dict[str, list[Any]] = {name: [] for name in self.axes}
        for position in self.stages[stage]:
            values = self.subtrees[position].flatten_up_to(parts[position])
            for x, place in zip(values, self.places[position], strict=True):
                flat = place.leaf.flat(x, numpy, num_lead)
                pieces[place.leaf.buffer].append(flat)
        lead = np.shape(jax.tree.leaves(tree)[0])[:num_lead] if num_lead else ()
        return {name: self._concatenate(name, flat, numpy, lead) for name, flat in pieces.items()}

    def _concatenate(self, name: str, pieces: list[Any], numpy: Any, lead: tuple[int, ...]) -> Any:
        """Return the concatenated pieces of a buffer, padded with zeros to its size."""
        shape = *lead, *self.shapes[name][1:]
        if not pieces:
            return numpy.zeros(shape, np.dtype(name.partition("/")[0]))
        dtype = promoted_dtype(*pieces)
        if len(pieces) > 1:
            pieces = [numpy.concatenate([piece.astype(dtype) for piece in pieces], -1)]
        lack = shape[-1] - pieces[0].shape[-1]
        return (
            numpy.pad(pieces[0], [*[(0, 0)] * (len(shape) - 1), (0, lack)]) if lack else pieces[0]
        )

    def matches_params(self, x: Any) -> bool:
        """Return whether `x` has the structure of the parameters, with any trees as leaves."""
        return has_prefix(self.outer, x)

    def model_types(self, buffers: Mapping[str, Any]) -> PyTree:
        """Return the types of the tree of the whole model, from buffers or their types."""
        return self.types({name: x.dtype for name, x in buffers.items()})

    def types(self, dtypes: Mapping[str, Any], stage: int | None = None) -> PyTree:
        """Return the types of the tree of a stage or of the model, from the buffers' dtypes."""
        return self.map(
            lambda p: jax.ShapeDtypeStruct(p.leaf.shape, dtypes[p.leaf.buffer]), stage=stage
        )

    def buffer_types(
        self, dtypes: Mapping[str, Any], lead: tuple[int, ...] = ()
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of buffers (*lead, stages, ...) on the mesh, from their dtypes."""
        ones = [None] * len(lead)
        return {
            name: jax.ShapeDtypeStruct(
                (*lead, *shape),
                dtypes[name],
                sharding=NamedSharding(self.mesh, P(*ones, *self.specs[name])),
            )
            for name, shape in self.shapes.items()
        }

    def tied_copy_mask(self, name: str, numpy: Any = jnp) -> Any:
        """Return a mask of the elements that are copies of tied parameters stored elsewhere.

        The mask is a bool array that broadcasts to (stages, *sizes, elements); None without copies.
        """
        shape = self.shapes[name]
        spans = [
            (p.stage, p.start, p.start + p.leaf.part_size)
            for position in sorted(self.copies)
            for p in self.places[position]
            if p.leaf.buffer == name
        ]
        if not spans:
            return None
        ones = [1] * (len(shape) - 2)
        stage = numpy.arange(shape[0]).reshape(-1, *ones, 1)
        element = numpy.arange(shape[-1]).reshape(1, *ones, -1)
        mask = numpy.zeros((1,) * len(shape), bool)
        for at, start, end in spans:
            mask = mask | ((stage == at) & (element >= start) & (element < end))
        return mask

    def for_tree(self, tree: PyTree) -> Self:
        """Return the packing of a tree like the parameters, such as moments.

        Args:
          tree: arrays or types; in the place of a parameter it may have any tree of arrays, or
            `optax.MaskedNode()`.
        """
        subtrees: list[Any] = []
        leaves: list[tuple[Leaf, ...]] = []
        dtypes: dict[str, set[Any]] = {}
        for part, of_parameter in zip(self.outer.flatten_up_to(tree), self.leaves, strict=True):
            arrays, subtree = jax.tree.flatten(part)
            (parameter, *_) = of_parameter or (None,)
            subtrees.append(subtree)
            leaves.append(tuple(self._leaf_like(x, parameter) for x in arrays))
            if parameter is not None:
                dtypes.setdefault(parameter.buffer, set()).update(x.dtype for x in arrays)
        shapes = [[(x.shape, x.spec) for x in group] for group in leaves]
        same = shapes == [[(x.shape, x.spec) for x in group] for group in self.leaves]
        if same and tuple(subtrees) == self.subtrees and all(len(d) == 1 for d in dtypes.values()):
            return self  # updates are added to parameters, so they share a packing in any dtype
        return replace(self, subtrees=tuple(subtrees), leaves=tuple(leaves))

    def _leaf_like(self, x: Any, parameter: Leaf | None) -> Leaf:
        spec = parameter.spec if parameter is not None and parameter.shape == x.shape else P()
        return Leaf.from_array(x, spec, self.axis_sizes)

    # All stages.

    def stack(self, tree: PyTree, num_lead: int = 0, *, on_mesh: bool = False) -> Staged:
        """Return the buffers of all stages.

        Args:
          tree: the tree of the whole model, of arrays or types.
          num_lead: number of dimensions that leaves have before their own, such as replicas.
          on_mesh: whether NumPy arrays are moved to the mesh, too; else they stay on the host.
        """

        def stack_stages(numpy: Any, tree: PyTree) -> dict[str, Any]:
            packed = [self.pack(tree, s, numpy, num_lead) for s in range(self.num_stages)]
            return {name: numpy.stack([x[name] for x in packed], num_lead) for name in self.axes}

        leaves = jax.tree.leaves(tree)
        if not leaves:
            return self.wrap_buffers({})
        if any(isinstance(x, Tracer) for x in leaves):
            buffers = stack_stages(jnp, tree)
            return self.wrap_buffers(self.reshard_explicit(buffers) if on_mesh else buffers)
        if not on_mesh and all(isinstance(x, np.ndarray | np.generic) for x in leaves):
            return self.wrap_buffers(stack_stages(np, tree))
        kinds = jax.eval_shape(lambda tree: stack_stages(jnp, tree), tree)
        dtypes = {name: x.dtype for name, x in kinds.items()}
        types = self.buffer_types(dtypes, np.shape(leaves[0])[:num_lead])
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return self.wrap_buffers(types)
        shardings = {name: x.sharding for name, x in types.items()}
        if all(_is_on(self.mesh, x) for x in leaves):
            fn = _jit_on_mesh(lambda tree: stack_stages(jnp, tree), self.mesh, shardings)
            return self.wrap_buffers(fn(tree))
        on_host = jax.tree.map(np.asarray, tree)

        def part(name: str, dtype: Any, index: Any) -> np.ndarray:
            of_stages = range(self.num_stages)[index[num_lead]]
            rest = *index[:num_lead], *index[num_lead + 1 :]
            packed = (self.pack(on_host, s, np, num_lead) for s in of_stages)
            return np.stack([buffers[name][rest] for buffers in packed], num_lead).astype(dtype)

        def shard_buffer(name: str, x: Any) -> jax.Array:
            of_part = partial(part, name, x.dtype)
            return array_from_host(x.shape, x.sharding, of_part)

        return self.wrap_buffers({name: shard_buffer(name, x) for name, x in types.items()})

    def model_tree(self, buffers: Mapping[str, Any]) -> PyTree:
        """Return the tree of the whole model from buffers (*lead, stages, ...).

        Raises:
          ValueError: buffers of other shapes.
        """
        name, shape = next(iter(self.shapes.items()), ("", ()))
        num_lead = np.ndim(buffers[name]) - len(shape) if name else 0
        for name, shape in self.shapes.items():
            got = tuple(np.shape(buffers[name]))
            if num_lead < 0 or got[num_lead:] != shape:
                raise ValueError(
                    f"`buffers` must end in {list(shape)} at {name!r}, got an array of {list(got)}."
                )
        lead = (slice(None),) * num_lead

        def whole(buffers: Mapping[str, Any]) -> PyTree:
            return self.map(lambda p: p.read(buffers[p.leaf.buffer][(*lead, p.stage)]))

        arrays = list(buffers.values())
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
            return jax.eval_shape(whole, dict(buffers))
        sharding = getattr(arrays[0], "sharding", None) if arrays else None
        is_traced = any(isinstance(x, Tracer) for x in arrays)
        if is_traced or not isinstance(sharding, NamedSharding):
            return whole(buffers)
        front = [*sharding.spec, *[None] * num_lead][:num_lead]
        mesh = sharding.mesh
        shardings = self.map(lambda p: NamedSharding(mesh, P(*front, *p.leaf.spec)))
        return _jit_on_mesh(whole, mesh, shardings)(dict(buffers))

    def reshard_explicit(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """Return traced buffers, sharded over Explicit axes like buffers that are on the mesh."""
        context = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if context.empty else context
        explicit = frozenset(mesh.explicit_axes)
        if not explicit:
            return buffers
        types = self.buffer_types({name: x.dtype for name, x in buffers.items()}, ())
        specs = {name: restrict_spec(x.sharding.spec, explicit) for name, x in types.items()}

        def reshard(name: str, x: Any) -> Any:
            # First replicate the buffer on the mesh, then shard it: the gradient takes the same
            # way back. A sharded gradient cannot be divided into leaves, and without the first
            # step there is no mesh on which to make it whole.
            whole = jax.sharding.reshard(x, NamedSharding(mesh, P()))
            return jax.sharding.reshard(whole, NamedSharding(mesh, specs[name]))

        return {name: reshard(name, x) for name, x in buffers.items()}


def _jit_on_mesh(fn: Any, mesh: Any, shardings: PyTree) -> Any:
    """Return the compiled `fn` of arrays on a mesh, with results in these shardings."""
    if explicit := frozenset(mesh.explicit_axes):
        typed = jax.tree.map(
            lambda s: NamedSharding(mesh, restrict_spec(s.spec, explicit)), shardings
        )
        fn = jax.sharding.auto_axes(fn, out_sharding=typed)
    return jax.jit(fn, out_shardings=shardings)


def _is_on(mesh: Mesh, x: Any) -> bool:
    """Return whether an array is on the devices of `mesh`, or not fully in this process."""
    if not isinstance(x, jax.Array):
        return False
    return not x.is_fully_addressable or x.sharding.device_set == set(mesh.devices.flat)
