"""One copy of a tree to stacked replicas."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..tree import check_arrays, leaf_names
from ._axes import axis_names, vary_over
from ._build import VirtualMesh
from ._mapped import AnyMesh, map_replicas, model_axes, replica_count
from ._same_tree import compare_trees, is_of_host


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
        put_one = _put_equal if mesh.is_multi_process and is_of_host(x) else jax.device_put
        return _put(x, NamedSharding(mesh, P()), put_one)

    return jax.tree.map(put, tree)


def _put(
    x: Any,
    sharding: NamedSharding,
    put_one: Callable[[Any, NamedSharding], jax.Array] = jax.device_put,
) -> jax.Array:
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return put_one(x, sharding)
    # As bits: of keys themselves jax puts none on devices of other processes.
    bits = put_one(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def _put_equal(x: Any, sharding: NamedSharding) -> jax.Array:
    """`device_put` of what is known to be equal on all processes, which that would gather it for.

    Communication: none.
    """
    values = np.asarray(x).astype(jax.typeof(x).dtype)  # of float64 and Python's numbers, too
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


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
        so. Copies on the host of what is stacked already (`np.asarray(state.params["w"])`) tell
        nobody that they are, and would be stacked again.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.

    Returns:
      Tree of arrays `(replicas, *s)`, split over `axis_name`: each replica holds one copy. Equal on
      all replicas, and never an alias of `params`.

    Raises:
      ValueError: `axis_name` is not an axis of `mesh`, leaves are no arrays (named), `params` are
        stacked already, or trees differ between processes in names, shapes or dtypes (every
        difference listed), or in values.

    Communication: none between replicas; host to device, each device receives one copy. With
      several processes one exchange of names, shapes, dtypes and digests of 8 bytes per leaf
      through the host.
    """
    replicas = replica_count("replicate", mesh, axis_name)
    if _is_stacked(jax.tree.leaves(params), replicas, mesh, axis_name):
        raise ValueError(
            "replicate: `params` must be one copy, and these are stacked for "
            f"{replicas} replicas already: pass what was given to `js.replicate` before, or one "
            "copy of what was trained, `js.consensus(...)`."
        )
    check_arrays("replicate", params)
    compare_trees(params, with_values=True)
    placed = _place(params, mesh)
    automatic = model_axes(placed, mesh, axis_name)
    stacked = _replicate_fn(mesh, axis_name, automatic)(placed)
    if isinstance(mesh, VirtualMesh):
        _made.update({id(x): x for x in jax.tree.leaves(stacked)})
    return stacked


# What was made for one device, where no sharding tells of replicas.
_made: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def _is_stacked(leaves: list[Any], replicas: int, mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Whether leaves have a replica axis, by how all of them lie or by where one comes from."""
    if isinstance(mesh, VirtualMesh):
        return any(_made.get(id(x)) is x for x in leaves)

    def is_split(x: Any) -> bool:
        if not _is_on(x, mesh) or np.shape(x)[:1] != (replicas,) or not x.sharding.spec:
            return False
        entry = x.sharding.spec[0]
        return (entry if isinstance(entry, tuple) else (entry,)) == axis_names(axis_name)

    return bool(leaves) and all(map(is_split, leaves))


def on_mesh(tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Stacked leaves that are not placed yet, split over the replica axis."""
    if not isinstance(mesh, Mesh):
        return tree
    sharding = NamedSharding(mesh, P(axis_names(axis_name)))
    return jax.tree.map(
        lambda x: x if _is_on(x, mesh) else _put(x, sharding),
        tree,
    )
