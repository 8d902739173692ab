"""One copy of a tree to stacked replicas and back, and stacked states of transforms."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, PyTree
from ..tree import leaf_names
from ._axes import axis_names, vary_over, varying_axes
from ._build import VirtualMesh
from ._kept import kept_with
from ._layouts import Layouts, layouts_of, sharded_like
from ._mapped import AnyMesh, map_replicas, model_axes, replica_count
from ._same_tree import check_same_tree


def _is_on(x: Any, mesh: Mesh) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _place(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Leaves on `mesh`, whole on every device unless they are sharded over it already."""
    if isinstance(mesh, VirtualMesh):
        return jax.tree.map(jnp.asarray, tree)

    def put(x: Any) -> jax.Array:
        if _is_on(x, mesh):
            return x
        return jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def check_stacked(owner: str, tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> int:
    """Number of replicas; `ValueError` naming every leaf without that leading axis."""
    count = replica_count(owner, mesh, axis_name)
    wrong = [
        f"{name} {tuple(np.shape(leaf))}"
        for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] != count
    ]
    if wrong:
        raise ValueError(
            f"{owner}: every leaf needs a leading axis of {count} replicas (`axis_name` "
            f"{axis_name!r}), as `js.replicate` makes it; got {', '.join(wrong)}."
        )
    return count


@functools.lru_cache(maxsize=64)
def _replicate_fn(mesh: AnyMesh, axis_name: AxisName, automatic: frozenset[str]):
    def per_replica(tree: PyTree) -> PyTree:
        return vary_over(jax.tree.map(jnp.copy, tree), axis_names(axis_name))

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("shared",),
            automatic=automatic,
        )
    )


def replicate(params: PyTree, *, mesh: AnyMesh, axis_name: AxisName = "replica") -> PyTree:
    """Stack one copy of `params` for every replica.

    Args:
      params: tree of arrays of shapes `s`; leaves already sharded over other axes of `mesh` stay
        so.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.

    Returns:
      Tree of arrays `(replicas, *s)`, split over `axis_name`: each replica holds one copy. Equal on
      all replicas, and never an alias of `params`.

    Raises:
      ValueError: `axis_name` is not an axis of `mesh`, or trees differ between processes in names,
        shapes or dtypes (every difference listed). Values must be equal on all processes, too.

    Communication: none between replicas; host to device, each device receives one copy. With
      several processes one exchange of names, shapes and dtypes through the host.
    """
    replica_count("replicate", mesh, axis_name)
    check_same_tree(params)
    placed = _place(params, mesh)
    automatic = model_axes(placed, mesh, axis_name)
    return _replicate_fn(mesh, axis_name, automatic)(placed)


def init(
    tx: optax.GradientTransformation,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """The state of `tx` for stacked parameters, made inside the mapped axes.

    Transforms that shard their state over replicas cannot be initialised outside of the axis;
    here they can.

    Args:
      tx: any optax transform or chain.
      stacked_params: tree of `(replicas, *s)`, as `js.replicate` returns it.
      mesh: mesh with `axis_name`, or a `VirtualMesh`; its other axes are bound too.
      axis_name: the replica axis, or several.

    Returns:
      The state with a leading replica axis on every leaf; copies, so the parameters can be donated.

    Raises:
      ValueError: leaves without the leading axis, trees that differ between processes (every
        difference listed with the process that has it), or state that differs between the devices
        of a replica.

    Communication: none over devices; with several processes one exchange of the trees' names,
      shapes and dtypes (a few KiB) through the host.
    """
    check_stacked("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = on_mesh(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    layouts = layouts_of(placed) if automatic else ()

    def made(tx_init: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        return _init_fn(tx_init, mesh, axis_name, automatic, layouts)

    return kept_with(tx.init, (mesh, axis_name, automatic, layouts), made)(placed)


def _init_fn(
    tx_init: Callable[[PyTree], PyTree],
    mesh: AnyMesh,
    axis_name: AxisName,
    automatic: frozenset[str],
    layouts: Layouts,
) -> Callable[[PyTree], PyTree]:
    def per_replica(params: PyTree) -> PyTree:
        state = jax.tree.map(jnp.copy, tx_init(params))
        _check_equal_inside(state, {*axis_names(axis_name), *automatic})
        return sharded_like(state, layouts)

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
            automatic=automatic,
        )
    )


def _check_equal_inside(state: PyTree, allowed: set[str]) -> None:
    """State is stacked over replicas: one copy for all devices of a replica."""
    wrong = {
        name: sorted(varying_axes(leaf) - allowed)
        for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True)
        if varying_axes(leaf) - allowed
    }
    if wrong:
        listed = ", ".join(f"{name} (over {axes})" for name, axes in wrong.items())
        raise ValueError(
            "init: `tx` keeps state that differs between the devices of a replica, and the state "
            f"is stacked over replicas only: {listed}. A hook with error feedback that reduces "
            "over inner axes needs them all in `axis_name`."
        )


def on_mesh(tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Stacked leaves that are not placed yet, split over the replica axis."""
    if not isinstance(mesh, Mesh):
        return tree
    sharding = NamedSharding(mesh, P(axis_names(axis_name)))
    return jax.tree.map(
        lambda x: x if _is_on(x, mesh) else jax.device_put(x, sharding),
        tree,
    )
