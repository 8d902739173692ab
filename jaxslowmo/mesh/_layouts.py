"""How the leaves of a tree lie inside a replica: read off arrays or types, and given to states."""

from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ._axes import only_over
from ._meshes import AnyMesh, model_axes

Layouts = tuple[tuple[tuple[Any, ...], tuple[int, ...], P], ...]
"""Path, shape and layout inside a replica of each parameter that has one."""


def inner_specs(stacked: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree | None:
    """A `PartitionSpec` per leaf over the axes inside a replica, read off concrete arrays.

    Args:
      stacked: arrays `(replicas, *s)`, on `mesh` or not; specs are for `s`.
      mesh: where the replicas lie.
      axis_name: the replica axis.

    Returns:
      A tree like `stacked`; None where nothing is sharded inside a replica.
    """
    inside = model_axes(stacked, mesh, axis_name)
    if not inside:
        return None

    def spec_of(x: Any) -> P:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return P()
        return only_over(sharding.spec[1:], inside)

    return jax.tree.map(spec_of, stacked)


def layouts_of(stacked_params: PyTree) -> Layouts:
    """How parameters `(replicas, *s)` lie inside a replica."""
    return tuple(
        (path, leaf.shape[1:], P(*leaf.sharding.spec[1:]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked_params)
        if isinstance(leaf.sharding, NamedSharding)
    )


def laid_out(tree: PyTree, specs: PyTree) -> PyTree:
    """`tree` with every leaf laid out by its spec, over the axes that are the compiler's here.

    Left to itself it may split what is whole, and gather it again for the next that wants it whole.
    Over Explicit axes nothing is changed: there, types carry the layout already.

    Communication: none of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return tree
    automatic = frozenset(mesh.auto_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, only_over(spec, automatic))

    return jax.tree.map(place, tree, specs) if automatic else tree


def sharded_like(state: PyTree, layouts: Layouts) -> PyTree:
    """`state` with the leaves that mirror a parameter sharded as it is inside a replica.

    Fresh zeros carry no layout, so the compiler would keep moments of sharded parameters whole on
    every device. A leaf mirrors a parameter if its path ends in the parameter's and its shape is
    the parameter's, as in optax's states.

    Args:
      state: one replica's state, under the replica axis.
      layouts: of the parameters.

    Communication: none.
    """

    def place(path: tuple, x: jax.Array) -> jax.Array:
        for suffix, shape, spec in layouts:
            if x.shape == shape and path[len(path) - len(suffix) :] == suffix:
                return lax.with_sharding_constraint(x, spec)
        return x

    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:  # there, types carry the layout already
        return state
    return jax.tree_util.tree_map_with_path(place, state)
