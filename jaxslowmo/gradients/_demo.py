"""DeMo: replicas send the fast components of their momentum, and keep the rest."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import ArgumentError, as_number, checked_int, records_settings
from .._support.types import AxisName, PyTree
from ..collectives import mean_of_senders
from ..collectives.codecs import TopK
from ..transform import GradientTransform
from ..tree import at_least_float32
from ._all_reduce import all_reduce_gradients
from ._hook import CommHook, GradBucket


@records_settings
def demo(
    axis_name: AxisName,
    *,
    compression_decay: float = 0.999,
    top_k: int = 32,
    chunk: int = 64,
    param_specs: PyTree | None = None,
) -> GradientTransform:
    """Replace gradients by the fast components of replicas' momenta, which alone are sent (DeMo).

        m <- compression_decay * m + gradient       each replica's momentum
        q = the `top_k` largest components of m in each chunk;    m <- m - q
        result: of each component the mean over the replicas that sent it

    Components are those of a cosine transform of the chunk. The result takes the place of the
    gradients, and the authors' optimizer moves parameters by its sign:

        tx = js.chain(js.demo("replica"), optax.sign_sgd(1e-3))

    More, also on weight decay and schedules: [docs/api/gradients.md](#details).

    Args:
      axis_name: mapped axis of the replicas, or under shard_map a tuple of axes.
      compression_decay: factor of the momentum in each update, 0 <= decay < 1.
      top_k: number of components that a replica sends of each chunk, at least 1.
      chunk: largest length of a chunk along each of a leaf's last two dimensions, which its lengths
        divide. A (768, 3072) matrix has chunks of 64 x 64, a (768,) vector has chunks of 64.
      param_specs: how the gradients are laid out inside a replica, as `js.all_reduce_gradients`
        takes it; this is that reduction with a hook.

    Returns:
      A transform with state `js.gradients.AllReduceGradientsState`. It holds the cosine components
      of this replica's momentum, as many as elements of the gradients, at least float32. The result
      has the gradients' shapes and dtypes, and the same bits on all replicas.

    Raises:
      ValueError: an argument out of its range; as `js.all_reduce_gradients`.

    Communication: every update, one all-gather over `axis_name` per bucket and size of chunks. Each
      replica sends top_k * (2 + itemsize) bytes of a chunk: with the defaults 192 of the 16,384 of
      a chunk of a float32 matrix, and of the 256 of a vector's. A weight adds 8 bytes.

    Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv
      2411.19870, version 1; github.com/bloc97/DeMo.
    """
    decay = as_number(compression_decay)
    if decay is None or not 0 <= decay < 1:
        rule = f"must be a number in [0, 1), got {compression_decay!r}."
        raise ArgumentError("compression_decay", f"demo: `compression_decay` {rule}")
    count = checked_int("demo: `top_k`", top_k, 1)
    longest = checked_int("demo: `chunk`", chunk, 1)

    def init(bucket: GradBucket) -> PyTree:
        wide = at_least_float32(bucket.dtype)
        groups = _groups(bucket, longest).values()
        return tuple(jnp.zeros(sum(map(math.prod, grids.values())), wide) for grids in groups)

    def update(bucket: GradBucket, momenta: PyTree) -> tuple[jax.Array, PyTree]:
        parts, kept = bucket.split(bucket.flat), []
        groups = _groups(bucket, longest).items()
        for (size, grids), momentum in zip(groups, momenta, strict=True):
            wide = [_components(parts[i].astype(momentum.dtype), x) for i, x in grids.items()]
            momentum = decay * momentum + jnp.concatenate(wide)
            codec = TopK(count=count, chunk=size, values=bucket.dtype)
            mean, left = mean_of_senders(momentum, bucket.axis_name, codec)
            # What is not finite is sent, so that one bad update has no lasting effect.
            kept.append(jnp.where(jnp.isfinite(left), left, jnp.zeros_like(left)))
            ends = np.cumsum([*map(math.prod, grids.values())])[:-1]
            for (i, grid), part in zip(grids.items(), jnp.split(mean, ends), strict=True):
                parts[i] = _elements(part, grid).astype(bucket.dtype)
        return bucket.join(parts), tuple(kept)

    return all_reduce_gradients(axis_name, hook=CommHook(init, update), param_specs=param_specs)


class _Grid(NamedTuple):
    """How a leaf's last two dimensions are cut into chunks; a vector has one row."""

    others: int  # product of the dimensions before them
    down: int  # number of chunks
    rows: int  # of a chunk
    across: int
    columns: int


def _groups(bucket: GradBucket, longest: int) -> dict[int, dict[int, _Grid]]:
    """Return the grids of leaves by position in the bucket, for each size of chunks."""
    groups: dict[int, dict[int, _Grid]] = {}
    for i, piece in enumerate(bucket.pieces):
        *others, height, width = (1, 1, *piece.part_shape)
        if piece.stop > piece.start:
            rows, columns = _divisor(height, longest), _divisor(width, longest)
            grid = _Grid(math.prod(others), height // rows, rows, width // columns, columns)
            groups.setdefault(rows * columns, {})[i] = grid
    return groups


def _divisor(length: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if length % d == 0)


def _components(part: jax.Array, grid: _Grid) -> jax.Array:
    """Return the cosine components of a leaf, (n,), chunk by chunk."""
    bases = _cosines(grid.rows, part.dtype), _cosines(grid.columns, part.dtype)
    chunks = jnp.einsum("oyhxw,hi,wj->oyxij", part.reshape(grid), *bases, precision="highest")
    return chunks.reshape(-1)


def _elements(components: jax.Array, grid: _Grid) -> jax.Array:
    """Return the elements of a leaf from its cosine components: the inverse of `_components`."""
    others, down, rows, across, columns = grid
    bases = _cosines(rows, components.dtype), _cosines(columns, components.dtype)
    chunks = components.reshape(others, down, across, rows, columns)
    return jnp.einsum("oyxij,hi,wj->oyhxw", chunks, *bases, precision="highest")


def _cosines(size: int, dtype: np.dtype) -> np.ndarray:
    """Return the orthonormal basis of DCT-II, (size, size); a column is a component."""
    place, component = np.arange(size)[:, None], np.arange(size)
    basis = np.cos(np.pi * (2 * place + 1) * component / (2 * size)) * math.sqrt(2 / size)
    basis[:, 0] = math.sqrt(1 / size)
    return basis.astype(dtype)
