"""Neighbour exchange: every node sends to at most one other and receives from at most one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, between_cpu_processes

# Where two processes swap large messages over one TCP connection, acknowledgements wait behind the
# data of the other direction. 5.4 MB to and fro between hosts at 200 Mbit/s took 430 ms at once,
# 245 in pieces of 512 KiB, 222 in pieces of 256 KiB; the link's limit is 217.
_PIECE_BYTES = 2**18

Permutation = Sequence[tuple[int, int]]  # (source, destination), partial


def permute(x: jax.Array, axis_name: AxisName, permutation: Permutation) -> jax.Array:
    """What this node receives when every source in `permutation` sends `x` to its destination.

    Args:
      x: any shape.
      axis_name: mapped axis of the nodes; over several, nodes count in row-major order.
      permutation: (source, destination) pairs, in which a node is source at most once and
        destination at most once.

    Returns:
      The sender's `x`, or zeros on a node that nobody sends to.

    Communication: one collective-permute of `x` over `axis_name`; what is not in `permutation` is
      not sent. Between processes on CPU in pieces of 256 KiB, one after the other.
    """
    if _takes_partial(axis_name):
        axis, pairs = _in_mesh_order(axis_name, permutation)
        if x.nbytes > _PIECE_BYTES and between_cpu_processes(axis_name):
            return _in_pieces(lambda piece: lax.ppermute(piece, axis, pairs), x)
        return lax.ppermute(x, axis, pairs)
    size = axis_size(axis_name)
    me = lax.axis_index(axis_name)
    # vmap permutes whole axes only: the others swap places, and what they get is dropped.
    whole = complete_permutation(permutation, size)
    if len(axis_names(axis_name)) == 1:
        arrived = lax.ppermute(x, axis_name, whole)
    else:  # and one axis at a time; on one device nothing needs to go anywhere
        source_of = np.array([source for source, _ in sorted(whole, key=lambda pair: pair[1])])
        arrived = _of_all(x, axis_name)[jnp.asarray(source_of)[me]]
    if len(permutation) == size:
        return arrived
    receives = np.zeros(size, bool)
    receives[[destination for _, destination in permutation]] = True
    return jnp.where(jnp.asarray(receives)[me], arrived, 0)


def _of_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`(nodes, *s)` under vmap: what all have, in the order in which the axes are named."""
    for name in reversed(axis_names(axis_name)):
        x = lax.all_gather(x, name)
    return x.reshape(-1, *x.shape[len(axis_names(axis_name)) :])


def _in_pieces(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`send(x)` in pieces of equal size: a loop, and what is left."""
    size = _PIECE_BYTES // x.dtype.itemsize
    flat = x.reshape(-1)
    whole = flat.size - flat.size % size
    arrived = [lax.map(send, flat[:whole].reshape(-1, size)).reshape(-1)]
    if whole < flat.size:
        arrived.append(send(flat[whole:]))
    return jnp.concatenate(arrived).reshape(x.shape)


def _takes_partial(axis_name: AxisName) -> bool:
    """Whether devices run along the axis (shard_map, pmap), as opposed to vmap."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(name in manual for name in axis_names(axis_name))


def _in_mesh_order(
    axis_name: AxisName, permutation: Permutation
) -> tuple[AxisName, list[tuple[int, int]]]:
    """The same nodes, counted as `lax.ppermute` does: by the order of the mesh's axes.

    `lax.axis_index` and other collectives count by the order in which the axes are named.
    """
    names = axis_names(axis_name)
    in_mesh = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in names]
    sizes = [axis_size(name) for name in names]
    named = np.arange(axis_size(axis_name)).reshape(sizes)
    # place[i]: where the i-th node, as named, comes in the mesh
    place = np.argsort(named.transpose([names.index(name) for name in in_mesh]).ravel())
    moved = [(int(place[s]), int(place[d])) for s, d in permutation]
    return (tuple(in_mesh) if isinstance(axis_name, tuple) else axis_name), moved


def complete_permutation(permutation: Permutation, size: int) -> list[tuple[int, int]]:
    """`permutation` with further pairs, so that each of `size` nodes sends and receives once.

    Nodes that neither send nor receive are sent to themselves.
    """
    sources = set(range(size)) - {source for source, _ in permutation}
    destinations = set(range(size)) - {destination for _, destination in permutation}
    idle = sources & destinations
    added = [(node, node) for node in idle]
    added += zip(sorted(sources - idle), sorted(destinations - idle), strict=True)
    return sorted([*permutation, *added])
