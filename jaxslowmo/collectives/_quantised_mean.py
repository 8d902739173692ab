"""Mean of a flat buffer of which 8 bits per element travel, each way."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, vary_over
from ._blockwise import Codec, dequantise, num_blocks, quantise
from ._packed import exchange, gather, pack, unpack

_BLOCKS_TO_ALIGN = 32


@dataclass(frozen=True)
class Quantised:
    """How values travel.

    Attributes:
      codec: what 8 bits stand for.
      block_size: elements that share a float32 scale.
    """

    codec: Codec
    block_size: int

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """`(r, m)` float32 as `(r, rows, lanes)` bytes, scales behind the codes."""
        return pack(*quantise(x, self.codec, self.block_size, key))

    def decode(self, packed: jax.Array, size: int) -> jax.Array:
        """`(r, size)` float32."""
        codes, scales = unpack(
            packed,
            (size, self.codec.dtype),
            (num_blocks(size, self.block_size), jnp.float32),
        )
        return dequantise(codes, scales, self.codec, self.block_size)

    def chunk_size(self, size: int, replicas: int) -> int:
        """Elements that each replica sums; whole blocks unless that is much padding."""
        even = math.ceil(size / replicas)
        if even < _BLOCKS_TO_ALIGN * self.block_size:
            return even
        return num_blocks(even, self.block_size) * self.block_size


def quantised_mean(
    flat: jax.Array,
    axis_name: AxisName,
    how: Quantised,
    *,
    dtype: jnp.dtype,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean of `flat` over replicas, and what got lost on the way.

    Each replica sums one chunk. Its own part of that chunk does not travel, so it is exact; in its
    place in `lost` stands the error of the rounded mean, times the number of replicas:

        sum over replicas of (flat - lost) / replicas = mean

    up to rounding in float32. A replica that adds `lost` to the next `flat` makes up for it.

    Args:
      flat: `(n,)` float32, n > 0.
      axis_name: mapped axis, or several, of R > 1 replicas.
      how: format on the wire.
      dtype: of the mean.
      key: equal on all replicas, for stochastic rounding; None rounds to nearest.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`, NaN in a
      block in which a value of some replica is not finite; and `(n,)` float32 `lost`.

    Communication: one all-to-all and one all-gather over `axis_name`, each of n bytes and 4 per
      block (padding apart); of several axes, an all-gather over each.
    """
    replicas, size = axis_size(axis_name), flat.shape[0]
    me = lax.axis_index(axis_name)
    to_chunk, to_all = (
        (None, None) if key is None else jax.random.split(jax.random.fold_in(key, me))
    )
    per = how.chunk_size(size, replicas)
    chunks = jnp.pad(flat, (0, replicas * per - size)).reshape(replicas, per)
    chunks = vary_over(chunks, axis_names(axis_name))

    sent = how.encode(chunks, to_chunk)
    mine = (jnp.arange(replicas, dtype=me.dtype) == me)[:, None]
    parts = jnp.where(mine, chunks, how.decode(exchange(sent, axis_name), per))
    mean = jnp.sum(parts, axis=0) / replicas
    gathered = gather(how.encode(mean[None], to_all), axis_name)
    means = how.decode(gathered, per).astype(dtype)

    own = lax.dynamic_index_in_dim(means, me, keepdims=False).astype(jnp.float32)
    lost = jnp.where(mine, replicas * (mean - own), chunks - how.decode(sent, per))
    return means.reshape(-1)[:size], lost.reshape(-1)[:size]
