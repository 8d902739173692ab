"""The states of an exchange between the replicas of a step, and where their arrays lie."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, axis_names, leaf_specs, placement
from ..tree import leaf_names, matching_suffix
from ._parameter_transform import ParameterTransform
from ._replica_group import ReplicaGroup
from ._stacked import StackedReplicas, cut_spec


def replica_types(stacked: PyTree) -> PyTree:
    """Return the types of one replica's part of stacked arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def first_states(
    sync: ParameterTransform,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Return the first local and shared state of a transform, for parameters equal on all replicas.

    Args:
      sync: the transform.
      stacked_params: the parameters, leaves (replicas, *s).
      mesh: the mesh on which they lie.
      axis_name: the axis of the replicas, or several.
      param_specs: layout of the parameters inside a replica; None: they are whole there.

    Returns:
      What each replica has for itself, stacked, and what all have together, whose trees like the
      parameters are cut over the replicas. Leaves like the parameters are laid out as these are
      inside a replica.

    Communication: none.
    """
    params = replica_types(stacked_params)
    algorithm = sync.bound(dict(mesh.shape), params).algorithm
    replicas = StackedReplicas(mesh, axis_name)

    def make(stacked: PyTree) -> tuple[PyTree, PyTree]:
        shared = algorithm.shared(replicas.unreplicate(stacked, leaf_specs(param_specs, params)))
        # Each leaf has a buffer of its own, so that the whole state can be donated.
        return jax.tree.map(jnp.copy, (jax.vmap(algorithm.local)(stacked), shared))

    if algorithm.is_sharded is not False and algorithm.groups:
        types = jax.eval_shape(make, stacked_params)[1]
        placement: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
        share = share_of_whole_leaves(sync, types, params, param_specs=param_specs, **placement)
        count = math.prod(mesh.shape[name] for name in algorithm.groups[-1].axes)
        sync.note_whole_leaves(share, count)
    group = algorithm.groups[-1] if algorithm.groups else ReplicaGroup(axis_name)
    local, shared = jax.eval_shape(make, stacked_params)
    where = shardings(replica_types(local), shared, params, group, mesh, axis_name, param_specs)
    return jax.jit(make, out_shardings=where)(stacked_params)


def share_of_whole_leaves(
    sync: ParameterTransform,
    shared: PyTree,
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None = None,
) -> float:
    """Return the share of a replica's bytes of shared state that all replicas have whole.

    Args:
      sync: the transform, sized for the mesh.
      shared: its shared state in a step, arrays or types.
      params: types of one copy of the parameters.
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      param_specs: layout of the parameters inside a replica.
    """
    group = (
        sync.bound(dict(mesh.shape), params)
        .algorithm.groups[-1]
        .with_layout(StackedReplicas(mesh, axis_name), param_specs)
    )
    shapes = [x.shape for x in jax.tree.leaves(params)]
    cuts = zip(shapes, group.dimensions(params), strict=True)
    known = dict(zip(leaf_names(params), cuts, strict=True))
    whole = total = 0.0
    for name, x in zip(leaf_names(shared), jax.tree.leaves(shared), strict=True):
        shape, cut = known.get(matching_suffix(name, known), (None, None))
        size = x.size * x.dtype.itemsize
        is_cut = shape == x.shape and cut is not None
        total += size / group.size if is_cut else size
        whole += size if shape == x.shape and not is_cut else 0
    return whole / max(1, total)


def shardings(
    local: PyTree,
    shared: PyTree,
    params: PyTree,
    group: ReplicaGroup,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Return the shardings of local state, of one replica, and of shared state, by their types."""
    replicas = StackedReplicas(mesh, axis_name)
    cuts = group.with_layout(replicas, param_specs).dimensions(params)
    names, specs = leaf_names(params), leaf_specs(param_specs, params)
    known = dict(zip(names, zip(jax.tree.leaves(params), specs, cuts, strict=True), strict=True))

    def local_spec(name: str, x: Any) -> P:
        like, spec, _ = _matching_param(name, known)
        is_alike = like is not None and x.ndim == like.ndim and _fits(x.shape, spec, mesh.shape)
        return P(axis_names(axis_name), *(spec if is_alike else ()))

    def shared_spec(name: str, x: Any) -> P:
        like, spec, cut = _matching_param(name, known)
        if like is None or x.shape != like.shape:
            return P()
        return cut_spec(spec, cut, group.axes)

    def to_shardings(tree: PyTree, spec_of: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaf_names(tree), leaves, strict=True)
        return treedef.unflatten([placement(mesh, spec_of(name, x)) for name, x in pairs])

    return to_shardings(local, local_spec), to_shardings(shared, shared_spec)


def _matching_param(name: str, known: Mapping[str, Any]) -> Any:
    if [*known] == ["(root)"]:  # the parameters are one array, without a name
        name = "(root)"
    return known.get(matching_suffix(name, known), (None, P(), None))


def _fits(shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> bool:
    for size, entry in zip(shape, spec, strict=False):
        for axis in axis_names(entry or ()):
            if size % sizes[axis]:
                return False
            size //= sizes[axis]
    return True
