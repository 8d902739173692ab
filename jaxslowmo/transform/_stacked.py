"""Replicas as the stacked arrays of a mesh, on whose devices a function of one replica runs.

A training step holds the arrays of all replicas: what each has for itself is stacked, (replicas,
*s), and what all have together is one array (*s), which may be split over them. An exchange is
written for one replica and runs under `jax.vmap` over the stacked arrays, so values of all replicas
together, and what an optimizer makes of them, are plain arrays there, sharded by the compiler.
Where replicas send, `StackedReplicas.run` leaves `vmap`: each device runs a function on its own
blocks, with all axes of the mesh mapped.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree, axis_names
from ..mesh import AnyMesh, has_device_per_position, map_replicas, restrict_spec


class Arrays(NamedTuple):
    """A tree, and where its leaves lie.

    Attributes:
      tree: the tree, as one replica sees it; of a result its types.
      specs: the layout of each leaf over the axes inside a replica; None: the compiler knows it.
      cuts: None: each replica has a tree of its own. Else all replicas have it together, and this
        is the dimension along which each leaf is cut over them, or None for a whole leaf.
      over: the axes of the replicas over which it is cut.
    """

    tree: PyTree
    specs: Sequence[P] | None
    cuts: Sequence[int | None] | None = None
    over: tuple[str, ...] = ()

    def as_types(self) -> "Arrays":
        """Return the same with the types of the leaves."""
        tree = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), self.tree
        )
        return self._replace(tree=tree)

    def spec(self, leaf: int, replicas: tuple[str, ...]) -> P:
        """Return the layout of a leaf of the array that all replicas hold."""
        assert self.specs is not None, "a step knows the layouts of its arrays"
        spec = self.specs[leaf]
        if self.cuts is None:
            return P(replicas, *spec)
        return cut_spec(spec, self.cuts[leaf], self.over)


def cut_spec(spec: P, cut: int | None, over: tuple[str, ...]) -> P:
    """Return the layout of a leaf of this layout that is cut over replicas along a dimension."""
    if cut is None:
        return spec
    entries = [*spec, *[None] * (cut + 1 - len(spec))]
    names = *axis_names(entries[cut] or ()), *over
    entries[cut] = names
    return P(*entries)


@dataclass(frozen=True)
class StackedReplicas:
    """The replicas of a step, whose arrays an exchange sees under `jax.vmap`.

    Attributes:
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      number: this replica's number, () int32, under `vmap`; None outside. It differs between
        replicas for certain, so that `vmap` asks for a rule even where no other value does.
    """

    mesh: AnyMesh | AbstractMesh
    axis_name: AxisName
    number: jax.Array | None = None

    @property
    def count(self) -> int:
        """The number of replicas."""
        return math.prod(self.mesh.shape[name] for name in axis_names(self.axis_name))

    def run(
        self, fn: Callable[..., Any], arguments: Sequence[Arrays], results: Sequence[Arrays]
    ) -> list[PyTree]:
        """Return the trees of `fn(*trees)`, called on each device with its blocks of the arrays.

        All axes of the mesh are mapped inside of `fn`. A result that all replicas have together
        must be equal on those over which it is not cut.

        Communication: that of `fn`.
        """
        trees = [x.tree for x in arguments]
        # What `vmap` keeps must not hold traced values.
        arguments, results = ([x.as_types() for x in parts] for parts in (arguments, results))
        types = [x.tree for x in results]

        @custom_vmap
        def call(number: jax.Array, *trees: PyTree) -> list[PyTree]:
            del number, trees  # `vmap` always replaces it, and reads the types alone
            return [self._zeros(part, x) for part, x in zip(results, types, strict=True)]

        def rule(size: int, batched: Any, number: jax.Array, *trees: PyTree) -> Any:
            del number

            def broadcast(x: jax.Array, is_batched: bool) -> jax.Array:
                return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

            given = [
                x if part.cuts is not None else jax.tree.map(broadcast, x, where)
                for part, x, where in zip(arguments, trees, batched[1:], strict=True)
            ]
            out = self._on_devices(fn, arguments, results)(*given)
            owns = [
                jax.tree.map(lambda _, own=part.cuts is None: own, x)
                for part, x in zip(results, types, strict=True)
            ]
            return out, owns

        call.def_vmap(rule)
        return call(self.number, *trees)

    def _zeros(self, part: Arrays, types: PyTree) -> PyTree:
        """Return zeros of these types, which name the Explicit axes of the results' layouts."""
        leaves, treedef = jax.tree.flatten(types)
        mesh, zeros = self.mesh, []
        for i, x in enumerate(leaves):
            spec = part.spec(i, ()) if part.cuts is not None else P(*part.spec(i, ())[1:])
            zero = jnp.zeros(x.shape, x.dtype)
            if has_device_per_position(mesh) and (
                spec := restrict_spec(spec, _explicit_axes(mesh))
            ):
                zero = jax.sharding.reshard(zero, NamedSharding(mesh, spec))
            zeros.append(zero)
        return treedef.unflatten(zeros)

    def unreplicate(self, stacked: PyTree, specs: Sequence[P]) -> PyTree:
        """Return the tree of one replica, of stacked trees that are equal on all of them.

        Communication: none.
        """
        own = Arrays(stacked, specs)
        alike = Arrays(stacked, specs, [None] * len(specs))
        return self._on_devices(lambda tree: [tree], [own], [alike])(stacked)[0]

    def _on_devices(
        self, fn: Callable[..., Any], arguments: Sequence[Arrays], results: Sequence[Arrays]
    ) -> Callable[..., list[PyTree]]:
        mesh = self.mesh
        if not has_device_per_position(mesh):
            return self._on_virtual_replicas(fn, arguments, results)
        replicas = axis_names(self.axis_name)

        def specs(parts: Sequence[Arrays]) -> list[PyTree]:
            found = []
            for part in parts:
                structure = jax.tree.structure(part.tree)
                of_leaves = [part.spec(i, replicas) for i in range(structure.num_leaves)]
                found.append(structure.unflatten(of_leaves))
            return found

        def body(*trees: PyTree) -> list[PyTree]:
            own = [_each(lambda x: x[0], x, part) for x, part in zip(trees, arguments, strict=True)]
            out = fn(*own)
            return [_each(lambda x: x[None], x, part) for x, part in zip(out, results, strict=True)]

        ins, outs = specs(arguments), specs(results)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=tuple(ins), out_specs=outs, check_vma=False
        )
        if not (explicit := _explicit_axes(mesh)):
            return mapped

        def reshard(tree: PyTree, specs: PyTree) -> PyTree:
            def place(x: jax.Array, spec: P) -> jax.Array:
                # With a mesh in it: the caller's context may have none.
                where = NamedSharding(mesh, restrict_spec(spec, explicit))
                return jax.sharding.reshard(x, where)

            return jax.tree.map(place, tree, specs)

        def reshard_and_call(*trees: PyTree) -> list[PyTree]:
            out = mapped(*map(reshard, trees, ins))
            return [reshard(x, spec) for x, spec in zip(out, outs, strict=True)]

        return reshard_and_call

    def _on_virtual_replicas(
        self, fn: Callable[..., Any], arguments: Sequence[Arrays], results: Sequence[Arrays]
    ) -> Callable[..., list[PyTree]]:
        """Return the function for virtual replicas, each of which takes its own blocks."""
        replicas = axis_names(self.axis_name)
        sizes = [self.mesh.shape[name] for name in replicas]

        def body(*trees: PyTree) -> list[PyTree]:
            return fn(*(_blocks(x, part) for x, part in zip(trees, arguments, strict=True)))

        def join_blocks(x: jax.Array, part: Arrays, leaf: int) -> jax.Array:
            """Return the one array of which each replica has a block, or the whole."""
            assert part.cuts is not None
            cut, shape = part.cuts[leaf], x.shape[1:]
            x = x.reshape(*sizes, *shape)
            over = part.over if cut is not None else ()
            kept = [i for i, name in enumerate(replicas) if name in over]
            x = x[tuple(slice(None) if i in kept else 0 for i in range(len(sizes)))]
            if cut is None:
                return x
            order = [[replicas[i] for i in kept].index(name) for name in over]
            x = jnp.transpose(x, [*order, *range(len(kept), x.ndim)])
            blocks = x.reshape(-1, *shape)
            whole = jnp.moveaxis(blocks, 0, cut)
            return whole.reshape(*shape[:cut], -1, *shape[cut + 1 :])

        def call(*trees: PyTree) -> list[PyTree]:
            roles = tuple("stacked" if part.cuts is None else "shared" for part in arguments)
            mapped = map_replicas(body, mesh=self.mesh, axis_name=self.axis_name, in_roles=roles)
            out = mapped(*trees)
            return [
                x
                if part.cuts is None
                else jax.tree.unflatten(
                    jax.tree.structure(x),
                    [join_blocks(leaf, part, i) for i, leaf in enumerate(jax.tree.leaves(x))],
                )
                for x, part in zip(out, results, strict=True)
            ]

        return call


def unreplicate_number(
    stacked: jax.Array, *, mesh: AnyMesh | AbstractMesh, axis_name: AxisName
) -> jax.Array:
    """Return a number that is equal on all replicas, of (replicas,) stacked ones.

    Communication: none.
    """
    return StackedReplicas(mesh, axis_name).unreplicate(stacked, [P()])


def vmap_replicas(
    fn: Callable[[StackedReplicas, PyTree, PyTree], tuple[PyTree, PyTree]],
    own: PyTree,
    shared: PyTree,
    *,
    mesh: AnyMesh | AbstractMesh,
    axis_name: AxisName,
) -> tuple[PyTree, PyTree]:
    """Return `fn(replicas, own, shared)`, called for one replica under `jax.vmap`.

    Args:
      fn: function of the replicas, of what one replica has for itself and of what all have
        together, which returns both.
      own: what each replica has for itself, stacked.
      shared: what all replicas have together.
      mesh: the mesh of the arrays.
      axis_name: the axis of the replicas, or several.

    Communication: that of the verbs of replicas in `fn`.
    """
    replicas = axis_names(axis_name)
    numbers = jnp.arange(StackedReplicas(mesh, axis_name).count, dtype=jnp.int32)
    context: Any = nullcontext()
    if has_device_per_position(mesh) and (explicit := _explicit_axes(mesh)):
        # Types name Explicit axes, of which `vmap` reads the context's mesh, and a user may set
        # none. All its arguments must be split alike.
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        if spec := restrict_spec(P(replicas), explicit):
            numbers = jax.sharding.reshard(numbers, NamedSharding(mesh, spec))

    def each(number: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
        return fn(StackedReplicas(mesh, axis_name, number), own, shared)

    spmd = replicas if has_device_per_position(mesh) else None
    with context:
        return jax.vmap(each, out_axes=(0, None), spmd_axis_name=spmd)(numbers, own)


def _explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind == AxisType.Explicit)


def _each(fn: Callable[[jax.Array], jax.Array], tree: PyTree, part: Arrays) -> PyTree:
    return jax.tree.map(fn, tree) if part.cuts is None else tree


def _blocks(tree: PyTree, part: Arrays) -> PyTree:
    """Return this replica's blocks of whole leaves, inside of the mapped axes."""
    if part.cuts is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        [
            x if cut is None else own_block(x, cut, part.over)
            for x, cut in zip(leaves, part.cuts, strict=True)
        ]
    )


def own_block(x: jax.Array, dimension: int, over: AxisName) -> jax.Array:
    """Return this replica's block of a whole leaf, inside of the mapped axes."""
    size = x.shape[dimension] // lax.axis_size(over)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * size, size, dimension)
