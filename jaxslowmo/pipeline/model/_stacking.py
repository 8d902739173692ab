"""Convert between a tree of the whole model and the buffers of its stages."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import only_over
from ...tree import Staged
from ._buffer_packing import BufferPacking


def stacked(
    packing: BufferPacking, tree: PyTree, num_lead: int = 0, *, on_mesh: bool = False
) -> Staged:
    """Return the buffers of all stages.

    Args:
      packing: the places of the leaves.
      tree: the tree of the whole model, of arrays or types.
      num_lead: number of dimensions that leaves have before their own, such as replicas.
      on_mesh: whether NumPy arrays are moved to the mesh, too; else they stay on the host.
    """

    def stages(numpy: Any, tree: PyTree) -> dict[str, Any]:
        packed = [packing.pack(tree, s, numpy, num_lead) for s in range(packing.num_stages)]
        return {name: numpy.stack([x[name] for x in packed], num_lead) for name in packing.axes}

    leaves = jax.tree.leaves(tree)
    if not leaves:
        return packing.staged({})
    if any(isinstance(x, Tracer) for x in leaves):
        buffers = stages(jnp, tree)
        return packing.staged(_over_explicit_axes(packing, buffers) if on_mesh else buffers)
    if not on_mesh and all(isinstance(x, np.ndarray | np.generic) for x in leaves):
        return packing.staged(stages(np, tree))
    kinds = jax.eval_shape(lambda tree: stages(jnp, tree), tree)
    dtypes = {name: x.dtype for name, x in kinds.items()}
    types = packing.buffer_types(dtypes, np.shape(leaves[0])[:num_lead])
    if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return packing.staged(types)
    shardings = {name: x.sharding for name, x in types.items()}
    if all(_is_on(packing.mesh, x) for x in leaves):
        fn = _placing(lambda tree: stages(jnp, tree), packing.mesh, shardings)
        return packing.staged(fn(tree))
    on_host = jax.tree.map(np.asarray, tree)

    def part(name: str, dtype: Any, index: Any) -> np.ndarray:
        of_stages = range(packing.num_stages)[index[num_lead]]
        rest = *index[:num_lead], *index[num_lead + 1 :]
        packed = (packing.pack(on_host, s, np, num_lead) for s in of_stages)
        return np.stack([buffers[name][rest] for buffers in packed], num_lead).astype(dtype)

    return packing.staged(
        {
            name: jax.make_array_from_callback(x.shape, x.sharding, partial(part, name, x.dtype))
            for name, x in types.items()
        }
    )


def unstacked(packing: BufferPacking, buffers: Mapping[str, Any]) -> PyTree:
    """Return the tree of the whole model from buffers (*lead, stages, ...).

    Raises:
      ValueError: buffers of other shapes.
    """
    name, shape = next(iter(packing.shapes.items()), ("", ()))
    num_lead = np.ndim(buffers[name]) - len(shape) if name else 0
    for name, shape in packing.shapes.items():
        got = tuple(np.shape(buffers[name]))
        if num_lead < 0 or got[num_lead:] != shape:
            raise ValueError(
                f"`buffers` must end in {list(shape)} at {name!r}, got an array of {list(got)}."
            )
    lead = (slice(None),) * num_lead

    def whole(buffers: Mapping[str, Any]) -> PyTree:
        return packing.map(lambda p: packing.read(buffers[p.leaf.buffer][(*lead, p.stage)], p))

    arrays = list(buffers.values())
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        return jax.eval_shape(whole, dict(buffers))
    sharding = getattr(arrays[0], "sharding", None) if arrays else None
    if isinstance(arrays[0] if arrays else None, Tracer) or not isinstance(sharding, NamedSharding):
        return whole(buffers)
    front = [*sharding.spec, *[None] * num_lead][:num_lead]
    mesh = sharding.mesh
    shardings = packing.map(lambda p: NamedSharding(mesh, P(*front, *p.leaf.spec)))
    return _placing(whole, mesh, shardings)(dict(buffers))


def _over_explicit_axes(packing: BufferPacking, buffers: dict[str, Any]) -> dict[str, Any]:
    """Return traced buffers, sharded over Explicit axes like buffers that are on the mesh."""
    context = jax.sharding.get_abstract_mesh()
    mesh = packing.mesh if context.empty else context
    explicit = frozenset(mesh.explicit_axes)
    if not explicit:
        return buffers
    types = packing.buffer_types({name: x.dtype for name, x in buffers.items()}, ())
    specs = {name: only_over(x.sharding.spec, explicit) for name, x in types.items()}

    def over(name: str, x: Any) -> Any:
        # First replicate the buffer on the mesh, then shard it: the gradient takes the same way
        # back. A sharded gradient cannot be divided into leaves, and without the first step there
        # is no mesh on which to make it whole.
        whole = jax.sharding.reshard(x, NamedSharding(mesh, P()))
        return jax.sharding.reshard(whole, NamedSharding(mesh, specs[name]))

    return {name: over(name, x) for name, x in buffers.items()}


def _placing(fn: Any, mesh: Any, shardings: PyTree) -> Any:
    """Return the compiled `fn` of arrays on a mesh, with results in these shardings."""
    if explicit := frozenset(mesh.explicit_axes):
        typed = jax.tree.map(lambda s: NamedSharding(mesh, only_over(s.spec, explicit)), shardings)
        fn = jax.sharding.auto_axes(fn, out_sharding=typed)
    return jax.jit(fn, out_shardings=shardings)


def _is_on(mesh: Mesh, x: Any) -> bool:
    """Return whether an array is on the devices of `mesh`, or not fully in this process."""
    if not isinstance(x, jax.Array):
        return False
    return not x.is_fully_addressable or x.sharding.device_set == set(mesh.devices.flat)
