"""Means of flat buffers over replicas that are sent in few bits, and what of them was not sent."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, is_device_axis, sum_over
from ._permute import all_gather_under_vmap
from ._scatter import exchange_in_slices, gather_slices, scatter_mean_of
from .codecs import Codec


def all_to_all(packed: jax.Array, axis_name: AxisName) -> jax.Array:
    """Send entry i of `packed` to replica i, and return the entries from all replicas, in order.

    Args:
      packed: array `(replicas, rows, lanes)`.
      axis_name: mapped axis, or several.

    Communication: one all-to-all of `packed` over `axis_name`.
    """
    if is_device_axis(axis_name):
        return lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    # vmap exchanges over one axis at a time; its all-gather sends nothing.
    return all_gather_under_vmap(packed, axis_name)[:, lax.axis_index(axis_name)]


def mean_in_codec(
    flat: jax.Array,
    axis_name: AxisName,
    codec: Codec,
    local_axis_name: AxisName | None = None,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of `flat` over replicas, sent in a codec, and what this replica has not sent.

    Up to rounding in float32

        sum over replicas of (flat - lost) / replicas = mean

    so a replica that adds `lost` to the next `flat` compensates for it.

    Args:
      flat: array `(n,)`, at least float32; with a codec that is not sparse it is sent from float32.
      axis_name: mapped axis, or several, of R replicas.
      codec: format of the numbers that are sent.
      local_axis_name: axis of L devices inside a replica, which hold equal `flat`; see
        `exchange_in_slices`.
      key: PRNG key for stochastic rounding, equal on all replicas; None rounds to nearest.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`, NaN near
      a value that is not finite on some replica; and `(n,)` `lost`. Both in the dtype of `flat`.

    Communication: one all-to-all and one all-gather over `axis_name`, each of the codec's bytes for
      n/L elements (plus padding); with several axes, an all-gather over each. A sparse codec has
      one all-gather of the bytes of all replicas. With `local_axis_name` two all-gathers of n over
      that axis. None if the axis has size 1, where nothing is lost.
    """
    if axis_size(axis_name) == 1 or flat.size == 0:
        return sum_over(flat, axis_name), jnp.zeros_like(flat)
    mean = _sparse_mean if codec.is_sparse else _dense_mean

    def both(part: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x.reshape(part.shape) for x in mean(part.reshape(-1), axis_name, codec, key))

    return exchange_in_slices(flat, local_axis_name, both)


def _dense_mean(
    flat: jax.Array, axis_name: AxisName, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Each replica sums one chunk, and sends its mean to all.

    It does not send its own part of that chunk, which is exact; in that place `lost` holds the
    error of the rounded mean, times the number of replicas.
    """
    replicas, size, me = axis_size(axis_name), flat.shape[0], lax.axis_index(axis_name)
    keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, me))
    per = codec.chunk_size(size, replicas)
    chunks = jnp.pad(flat, (0, replicas * per - size)).reshape(replicas, per)
    mean, lost, is_mine = _mean_of_chunk(chunks, axis_name, codec, keys[0])
    gathered = gather_slices(codec.encode(mean[None], keys[1]), axis_name)
    means = codec.decode(gathered, per)
    rounded = lax.dynamic_index_in_dim(means, me, keepdims=False)
    lost = jnp.where(is_mine, replicas * (mean - rounded), lost)
    means, lost = (x.reshape(-1)[:size].astype(flat.dtype) for x in (means, lost))
    return means, lost


def _mean_of_chunk(
    chunks: jax.Array, axis_name: AxisName, codec: Codec, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the mean of this replica's chunk, what it has not sent of others, and which is its.

    Communication: one all-to-all over `axis_name`.
    """
    chunks = chunks.astype(jnp.float32)
    replicas, per = chunks.shape
    sent = codec.encode(chunks, key)
    me = lax.axis_index(axis_name)
    is_mine = (jnp.arange(replicas, dtype=me.dtype) == me)[:, None]
    parts = jnp.where(is_mine, chunks, codec.decode(all_to_all(sent, axis_name), per))
    lost = jnp.where(is_mine, 0, chunks - codec.decode(sent, per))
    return jnp.sum(parts, axis=0) / replicas, lost, is_mine


def _sparse_mean(
    flat: jax.Array, axis_name: AxisName, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Each replica receives what all others send, so that nothing of the mean is lost."""
    (total,), lost = _sparse_sums(flat, axis_name, codec, key, lambda values: (values,))
    return total / axis_size(axis_name), lost


def mean_of_senders(
    flat: jax.Array, axis_name: AxisName, codec: Codec
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of each element over the replicas that sent it, and what this one did not.

    Args:
      flat: array `(n,)`, n >= 1, at least float32.
      axis_name: mapped axis, or several.
      codec: a sparse format; an element that is sent as 0 counts as not sent.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`, 0 where
      no replica sent; and `(n,)` what this replica has not sent. Both in the dtype of `flat`.

    Communication: one all-gather over `axis_name` of the bytes of all replicas.
    """

    def terms(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return values, (values != 0).astype(values.dtype)

    (total, senders), lost = _sparse_sums(flat, axis_name, codec, None, terms)
    return total / jnp.maximum(senders, jnp.ones_like(senders)), lost


def _sparse_sums(
    flat: jax.Array,
    axis_name: AxisName,
    codec: Codec,
    key: jax.Array | None,
    terms: Callable[[jax.Array], tuple[jax.Array, ...]],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the sums over replicas of `terms` of what each sent, and what this one did not send.

    Communication: one all-gather over `axis_name` of the bytes of all replicas.
    """
    sent, size = codec.encode(flat[None], key), flat.shape[0]
    lost = flat - codec.decode(sent, size)[0].astype(flat.dtype)

    def add(sums: tuple[jax.Array, ...], of_one: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        # The order of sums is fixed, so the bits are equal everywhere.
        values = codec.decode(of_one[None], size)[0].astype(flat.dtype)
        return tuple(x + y for x, y in zip(sums, terms(values), strict=True)), None

    gathered = gather_slices(sent, axis_name)
    zeros = jnp.zeros_like(gathered, flat.dtype, shape=flat.shape)
    return lax.scan(add, tuple(zeros for _ in jax.eval_shape(terms, zeros)), gathered)[0], lost


def scatter_mean_in_codec(
    rows: jax.Array,
    axis_name: AxisName,
    codec: Codec,
    local_axis_name: AxisName | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return this replica's row of the mean, and what it has not sent; see `scatter_mean`.

    Returns:
      `(n,)`, the mean of what was sent in float32; and `(replicas, n)` as in `mean_in_codec`, 0 in
      this replica's row.

    Communication: one all-to-all over `axis_name` of the codec's bytes for the padded rows; with L
      local devices each sends 1/L of it, and all-gathers of a row and of all rows follow over
      `local_axis_name`. None if the axis has size 1.
    """
    if axis_size(axis_name) == 1:
        return rows[0], jnp.zeros_like(rows)

    def chunk_mean(chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, lost, _ = _mean_of_chunk(chunks, axis_name, codec)
        return mean, lost

    mean, lost = scatter_mean_of(chunk_mean, rows, local_axis_name)
    return mean.astype(rows.dtype), lost.astype(rows.dtype)
