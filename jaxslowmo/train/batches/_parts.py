"""What several processes give of one array: which parts are this process', and how they join."""

import functools
import math
import zlib
from collections import Counter
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...mesh import AnyMesh, VirtualMesh, is_of_host

HostBatch = Literal["local", "global"]


@functools.lru_cache(maxsize=64)
def own_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Of a dimension that is split over `axes`, the parts that devices of this process hold.

    Args:
      mesh: in several processes or in one; a `VirtualMesh` has all parts.
      axes: of the mesh, outermost first.

    Returns:
      Numbers in 0 .. parts - 1, ascending. They need not follow each other, and where devices
      differ along another axis several processes hold the same part.

    Communication: none.
    """
    count = num_parts(mesh, axes)
    if isinstance(mesh, VirtualMesh):
        return tuple(range(count))
    held = NamedSharding(mesh, P(axes)).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({index[0].indices(count)[0] for index in held if index}))


def num_parts(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    """Into how many parts a dimension is split over `axes`."""
    return math.prod(mesh.shape[name] for name in axes)


def is_of_processes(mesh: AnyMesh) -> TypeGuard[Mesh]:
    """Whether devices of several processes form the mesh."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def processes_of(mesh: Mesh) -> list[int]:
    """Numbers of the processes whose devices form the mesh, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


_num_topics: Counter[str] = Counter()


def topic_of(kind: str, mesh: Mesh) -> str:
    """Where the processes of a mesh leave notes on one object, which all of them make in one order.

    Args:
      kind: of the object.
      mesh: of several processes.
    """
    name = f"jaxslowmo/{kind}/{zlib.crc32(repr(processes_of(mesh)).encode()):08x}"
    _num_topics[name] += 1
    return f"{name}/{_num_topics[name]}"


def parts_given(x: Any, mesh: AnyMesh, axes: tuple[str, ...], host_batch: HostBatch) -> int:
    """Of how many parts `x` holds the rows: of all, or of those of this process."""
    if host_batch == "local" and is_of_processes(mesh) and is_of_host(x):
        return len(own_parts(mesh, axes))
    return num_parts(mesh, axes)


def from_parts(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """The array over all processes of which this one gives its own parts.

    Args:
      x: NumPy or jax array (own parts * rows, ...): the rows of `own_parts`, one part after the
        other; as many rows in every part, on every process. Processes that hold the same part
        must give the same.
      mesh: of several processes.
      axes: over which the leading dimension is split.

    Communication: none.
    """
    own = own_parts(mesh, axes)
    rows = x.shape[0] // len(own)
    whole = rows * num_parts(mesh, axes)
    begins = {part: i * rows for i, part in enumerate(own)}
    x = _cuttable(x)

    def of_device(where: Any) -> Any:
        begin = begins[where[0].indices(whole)[0] // rows]
        return x[begin : begin + rows]

    shape = (whole, *x.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(axes)), of_device)


def from_whole(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """The array over all processes of which each gives the same whole.

    Communication: none; nobody looks whether it is the same.
    """
    x = _cuttable(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(axes)), x.__getitem__)


def _cuttable(x: Any) -> Any:
    """`x` with rows that can be taken without a program over several devices."""
    if not isinstance(x, jax.Array) or len(x.devices()) == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.asarray(x)
