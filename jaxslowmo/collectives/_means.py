"""Means of flat buffers over replicas: plain, weighted, asynchronous, and in a codec.

`coded_mean` is an all-reduce in 16 bits. `mean_in_codec` is for any codec: replicas decode and sum
what they receive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName, tracks_types
from ..mesh import axis_size, is_device_axis, is_on_tpu, platform, sum_over
from ..tree import WeightedSum, at_least_float32, cast
from ._scatter import (
    all_gather_under_vmap,
    codec_scope,
    exchange_in_slices,
    gather_slices,
    padding_scope,
    permute,
    scatter_mean_of,
)
from .codecs import Codec, Half


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `factor * x` in x's dtype; 0 where the factor is 0, even if x is not finite."""
    return cast(WeightedSum.from_value(x, factor).sum, x.dtype)


def all_mean(
    flat: jax.Array,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    *,
    factor: jax.Array | None = None,
) -> jax.Array:
    """Return the mean of `flat` over `axis_name`, in its dtype.

    Args:
      flat: array of any shape; `(n,)` with `local_axis_name`.
      axis_name: mapped axis, or several, between replicas (slow network).
      local_axis_name: axis inside a replica (fast network), over which `flat` is equal: each of
        its L devices reduces 1/L of it. None: every device reduces the whole.
      factor: () float, factor of this replica's `flat`; 0 ignores it, even if it is not finite.
        None: 1.

    Returns:
      The mean, equal (and typed as unvarying) over `axis_name`. The sum is divided, so 2 or 4
      replicas that agree keep their exact value, and more of them up to rounding. float16 is
      divided before the sum, which cannot overflow then.

    Communication: one all-reduce of `flat` over `axis_name`; none if its size is 1. With
      `local_axis_name` one of n/L elements per device, so n per replica, and one all-gather of n
      over that axis (plus padding, see `shard_layout`).
    """
    count = axis_size(axis_name)
    if local_axis_name is not None and count > 1:
        return exchange_in_slices(
            flat, local_axis_name, lambda x: all_mean(x, axis_name, factor=factor)
        )
    if flat.dtype == jnp.float16 and count > 1:
        # Above 65504 the sum overflows even if the mean does not.
        part = _divide(flat, count) if factor is None else scale(flat, factor / count)
        return sum_over(part, axis_name)
    total = sum_over(flat if factor is None else scale(flat, factor), axis_name)
    return total if count == 1 or flat.size == 0 else _divide(total, count)


_LARGE = 1 << 24  # bytes from which an array is exchanged chunk by chunk on CPU
_NUM_CHUNKS = 64


def uses_chunks(x: Any) -> bool:
    """Return whether `exchange_in_chunks` is used for an array, or for one of this type.

    That is on CPU from 16 MiB. There a collective writes its result apart from its operand (jaxlib
    0.10), which takes memory of the size of `x`; on TPU it is written where the operand lies. Where
    jax tracks the axes that values vary over, `x` is exchanged as a whole: a loop cannot change the
    type of what it carries.
    """
    size = x.size * x.dtype.itemsize
    return x.ndim > 0 and size >= _LARGE and platform() == "cpu" and not tracks_types()


def chunk_sizes(rows: int) -> set[int]:
    """Return the numbers of rows of the chunks of an array: of most of them, and of the last."""
    size = -(-rows // _NUM_CHUNKS)
    return {size, rows % size} - {0}


def exchange_in_chunks(
    exchange: Callable[..., Sequence[jax.Array]], *arrays: jax.Array, parts: int = 1
) -> list[jax.Array]:
    """Return `exchange(*arrays)`, computed in place for up to 64 chunks of rows.

    Args:
      exchange: function that acts on elements of arrays, and keeps their shapes and dtypes.
      *arrays: arrays with equal first dimensions.
      parts: number of equal parts of that dimension, on different devices; each chunk has as many
        rows of each part.

    Communication: that of `exchange`, for the chunks one after the other.
    """
    rows, axis = arrays[0].shape[0] // parts, 0 if parts == 1 else 1
    size = max(chunk_sizes(rows))

    def exchange_chunk(whole: list[jax.Array], start: Any, size: int) -> list[jax.Array]:
        chunks = [lax.dynamic_slice_in_dim(x, start, size, axis) for x in whole]
        new = exchange(*(x.reshape(parts * size, *x.shape[axis + 1 :]) for x in chunks))
        new = [x.reshape(like.shape) for x, like in zip(new, chunks, strict=True)]
        pairs = zip(whole, new, strict=True)
        return [lax.dynamic_update_slice_in_dim(x, chunk, start, axis) for x, chunk in pairs]

    lead = () if parts == 1 else (parts,)
    whole = [x.reshape(*lead, rows, *x.shape[1:]) for x in arrays]
    whole = lax.fori_loop(0, rows // size, lambda i, x: exchange_chunk(x, i * size, size), whole)
    whole = exchange_chunk(whole, rows - rows % size, rows % size) if rows % size else whole
    return [x.reshape(like.shape) for x, like in zip(whole, arrays, strict=True)]


def _divide(x: jax.Array, count: int) -> jax.Array:
    """Return `x / count` in x's dtype, computed in float32 if that dtype may not hold the count.

    In bfloat16, 257 is rounded to 256.
    """
    if count <= 2 ** (jnp.finfo(x.dtype).nmant + 1):
        return x / count
    return (x.astype(at_least_float32(x.dtype)) / count).astype(x.dtype)


class TotalWeight(NamedTuple):
    """The total weight of all replicas."""

    weight: jax.Array  # () float32, sum of the weights
    active: jax.Array  # () float32, number of replicas with a weight above 0


def total_weight(weight: jax.Array, axis_name: AxisName) -> TotalWeight:
    """Return the total weight of all replicas.

    Communication: one all-reduce of 8 bytes over `axis_name`.
    """
    return TotalWeight(*sum_over(_with_active(weight), axis_name))


def relative_weight(
    weight: jax.Array, total: TotalWeight, axis_name: AxisName, *, idle_as_zeros: bool = False
) -> jax.Array:
    """Return the factor that makes a plain mean over replicas a weighted one; 0 if all weigh 0.

    With `idle_as_zeros` the mean is the one with zeros from the replicas of weight 0.
    """
    local = _positive(weight).astype(_precise())
    count = total.active.astype(local.dtype) if idle_as_zeros else axis_size(axis_name)
    return quotient(count * local, total.weight)


def quotient(x: jax.Array, total: jax.Array) -> jax.Array:
    """Return `x / total` for a scalar total, in x's dtype; 0 if the total is 0.

    It is computed in at least float32, since bfloat16 would round a total of 257 to 256.
    """
    wide = at_least_float32(x.dtype)
    total = total.astype(wide)
    ratio = x.astype(wide) / jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, ratio, jnp.zeros_like(ratio)).astype(x.dtype)


def weighted_means(
    flats: Sequence[jax.Array], weight: jax.Array, axis_name: AxisName, *, idle_as_zeros: bool
) -> list[jax.Array]:
    """Return the weighted means of flat buffers over replicas.

    Args:
      flats: 1-D arrays of any floating dtypes.
      weight: () float32 >= 0, this replica's weight; the values of a replica of weight 0 are
        ignored, NaN included.
      axis_name: mapped axis, or several.
      idle_as_zeros: whether replicas of weight 0 count as if they had sent zeros, which makes the
        means smaller by their share.

    Returns:
      The means, equal over the axis; all are 0 if every weight is 0.

    The mean of a buffer in half precision does not depend on the other buffers.

    Communication: one all-reduce per buffer over `axis_name`. The weights are sent in the first
      float32 (or wider) buffer, which grows by two elements; buffers in half precision wait for it.
      Without such a buffer, or with a float16 buffer, whose weighted sum might overflow, the
      weights have a separate all-reduce of 8 bytes.
    """
    carriers = [i for i, flat in enumerate(flats) if flat.dtype.itemsize >= 4 and flat.size]
    if not carriers or any(flat.dtype == jnp.float16 for flat in flats):
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name, idle_as_zeros=idle_as_zeros)
        return [all_mean(flat, axis_name, factor=factor) for flat in flats]
    carrier = carriers[0]
    counts, part = _with_active(weight), scale(flats[carrier], weight)
    sums = sum_over(jnp.concatenate([part, counts.astype(part.dtype)]), axis_name)
    total = TotalWeight(*sums[-2:].astype(_precise()))
    factor = relative_weight(weight, total, axis_name, idle_as_zeros=idle_as_zeros)
    divisor = total.weight
    if idle_as_zeros:
        divisor = quotient(total.weight * axis_size(axis_name), total.active)

    def mean(i: int, flat: jax.Array) -> jax.Array:
        if i == carrier:
            return quotient(sums[:-2], divisor)
        # Half precision would round the sum of weighted gradients to a multiple of the weights:
        # equal gradients of replicas of 257 samples would become 256/257 of themselves.
        if flat.dtype.itemsize < 4:
            return all_mean(flat, axis_name, factor=factor)
        return quotient(sum_over(scale(flat, weight), axis_name), divisor)

    return [mean(i, flat) for i, flat in enumerate(flats)]


def _precise() -> jnp.dtype:
    """Return the default float dtype, which under x64 is precise enough for float64 leaves."""
    return jnp.dtype(jnp.result_type(float))


def _with_active(weight: jax.Array) -> jax.Array:
    """Return the weight and 1 if it is above 0, (2,), for a sum over replicas."""
    return jnp.stack([_positive(weight), (weight > 0).astype(weight.dtype)])


def _positive(weight: jax.Array) -> jax.Array:
    """Return the weight; 0 for NaN and weights below 0."""
    return jnp.where(weight > 0, weight, jnp.zeros_like(weight))


def coded_mean(
    flat: jax.Array,
    codec: Half,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    *,
    factor: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of the replicas' encoded `flat`, and the residual of this replica's.

    A replica divides before it rounds, so that a sum is in range if the mean is.

    Args:
      flat: array of any shape; it is sent unchanged if the codec does not narrow its dtype.
      codec: format in which it is sent.
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica, as in `all_mean`.
      factor: () float, factor of this replica's `flat`, like that of `all_mean`.

    Returns:
      The mean, equal (and typed as unvarying) over `axis_name`, and this replica's residual, both
      in the dtype of `flat`. With error feedback the mean of the replicas' `flat` is this mean plus
      the mean of the residuals, up to the rounding of the sum.

    Communication: one all-reduce over `axis_name` of n elements in the dtype of the codec (the
      backend may sum in a wider one); with `local_axis_name` of 1/L of them per device, and one
      all-gather of n over that axis. None if the size of the axis is 1.
    """
    count = axis_size(axis_name)
    if count == 1 or flat.size == 0 or not codec.narrows(flat.dtype):
        mean = all_mean(flat, axis_name, local_axis_name, factor=factor)
        return mean, jnp.zeros_like(flat)
    part, residual = codec.part(flat, divisor=count, factor=factor)
    total = exchange_in_slices(part, local_axis_name, lambda x: lax.psum(x, axis_name))
    return total.astype(flat.dtype), residual


_MOST_REPLICAS = 16  # of more replicas the permutes would be too many


def async_mean(flat: jax.Array, axis_name: AxisName, local_axis_name: AxisName | None) -> jax.Array:
    """Return the mean of `flat` over `axis_name` by collectives that run asynchronously.

    Inside a TPU slice XLA makes every all-reduce synchronous, and permutes asynchronous (libtpu
    0.0.52). So there each of up to 16 replicas sends each other one its part of the buffer, and
    then the mean of its own part.

    Args:
      flat: `(n,)`, equal over `local_axis_name`.
      axis_name: axis between replicas.
      local_axis_name: axis inside a replica, whose devices split the work; see
        `exchange_in_slices`.

    Returns:
      `(n,)`, the mean, equal on all replicas.

    Communication: per device one all-reduce of n/L elements over `axis_name`; on a TPU with R
      replicas, 2 <= R <= 16, 2 (R - 1) collective-permutes of n/(L R). With `local_axis_name` an
      all-gather of n over that axis.
    """
    by_permutes = is_on_tpu(axis_name) and 2 <= axis_size(axis_name) <= _MOST_REPLICAS
    mean = functools.partial(_by_permutes if by_permutes else all_mean, axis_name=axis_name)
    return exchange_in_slices(flat, local_axis_name, mean)


def _by_permutes(x: jax.Array, axis_name: AxisName) -> jax.Array:
    count, me = axis_size(axis_name), lax.axis_index(axis_name)
    size = -(-x.size // count)
    pieces = jnp.pad(x.reshape(-1), (0, count * size - x.size)).reshape(count, size)

    def shift(x: jax.Array, by: int) -> jax.Array:
        return permute(x, axis_name, [(i, (i + by) % count) for i in range(count)])

    with padding_scope(pieces.size, x.size):
        piece = pieces[me]
        for by in range(1, count):
            piece = piece + shift(pieces[(me + by) % count], by)
        mean = piece / count
        # Its owner alone computes each piece of the mean, so all replicas hold the same bits.
        whole = pieces.at[me].set(mean)
        for by in range(1, count):
            whole = whole.at[(me - by) % count].set(shift(mean, by))
    return whole.reshape(-1)[: x.size].reshape(x.shape)


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
    with padding_scope(chunks.size, size):
        mean, lost, is_mine = _mean_of_chunk(chunks, axis_name, codec, keys[0])
        sent = codec.encode(mean[None], keys[1])
        with codec_scope(codec, per):
            gathered = gather_slices(sent, axis_name)
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
    with codec_scope(codec, per):
        arrived = all_to_all(sent, axis_name)
    parts = jnp.where(is_mine, chunks, codec.decode(arrived, per))
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

    with codec_scope(codec, size):
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
