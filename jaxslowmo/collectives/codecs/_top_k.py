"""The elements of largest magnitude in each chunk of a row, and their places."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.checks import check_choice, checked_int, checked_share, checks_flags
from ...tree import at_least_float32
from ._blocks import ratio_of, scale_of
from ._codec import Codec, Kind, pack, unpack

Values = Literal["int8", "bits2"]
_ROUNDING = 1e-9  # 0.07 * 100 is above 7


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """A sparse format; elements that are not sent count as 0.

    Attributes:
      share: share of the elements of a chunk that are sent; None sends `count`.
      count: number of elements of a chunk that are sent.
      chunk: number of elements of a chunk; None: a row is one chunk.
      values: how the values are sent: "int8", "bits2", or in a floating dtype.
    """

    share: float | None = None
    count: int = 1
    chunk: int | None = None
    values: Any = jnp.float32
    is_sparse = True

    def __repr__(self) -> str:
        """Return the expression that makes this codec."""
        return (
            f"js.codecs.top_k({self.share}, chunk={self.chunk}, values={self.values!r}, "
            f"error_feedback={self.error_feedback})"
        )

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return places and values, chunk by chunk; see `Codec.encode`.

        Values that are not finite come first.
        """
        del key
        rows, size = x.shape
        chunk, chunks, count = self._division(size)
        padded = jnp.pad(x, ((0, 0), (0, chunks * chunk - size))).reshape(rows, chunks, chunk)
        magnitude = jnp.where(jnp.isnan(padded), jnp.full_like(padded, jnp.inf), jnp.abs(padded))
        places = jax.lax.top_k(magnitude, count)[1]
        values = jnp.take_along_axis(padded, places, axis=2)
        places = places.astype(self._places)
        return pack(*[part.reshape(rows, -1) for part in (places, *self._encode_values(values))])

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """See `Codec.decode`; values of 64 bits stay so."""
        chunk, chunks, count = self._division(size)
        parts = unpack(sent, *self.kinds(size))
        rows = sent.shape[0]
        places, *rest = [part.reshape(rows, chunks, -1) for part in parts]
        values: Any = self._decode_values(rest, count)
        first = np.arange(chunks, dtype=np.int32)[None, :, None] * np.int32(chunk)
        flat: Any = (places.astype(jnp.int32) + first).reshape(rows, -1)
        if isinstance(values, np.ndarray):
            dense: Any = np.zeros((rows, chunks * chunk), values.dtype)
            np.put_along_axis(dense, flat, values.reshape(rows, -1), axis=1)
            return dense[:, :size]
        whole = jnp.zeros_like(values, shape=(rows, chunks * chunk))

        def scatter(whole: jax.Array, flat: jax.Array, values: jax.Array) -> jax.Array:
            return whole.at[flat].set(values, unique_indices=True)

        return jax.vmap(scatter)(whole, flat, values.reshape(rows, -1))[:, :size]

    def kinds(self, size: int) -> list[Kind]:
        """Return the sizes and dtypes of places and parts of values; see `Codec.kinds`."""
        _, chunks, count = self._division(size)
        return [(chunks * count, self._places), *self._kinds(chunks, count)]

    @property
    def _places(self) -> Any:
        return jnp.int32 if self.chunk is None or self.chunk > 1 << 16 else jnp.uint16

    def _division(self, size: int) -> tuple[int, int, int]:
        """Return the size of a chunk of a row, their number, and how many elements each sends."""
        chunk = min(self.chunk or size, size)
        share = self.count if self.share is None else self.share * chunk * (1 - _ROUNDING)
        return chunk, math.ceil(size / chunk), min(max(math.ceil(share), 1), chunk)

    def _kinds(self, chunks: int, count: int) -> list[Kind]:
        """Return the kinds of the parts of values."""
        if self.values == "int8":
            return [(chunks * count, jnp.int8), (chunks, jnp.bfloat16)]
        if self.values == "bits2":
            return [(chunks * math.ceil(count / 4), jnp.uint8), (chunks * 2, jnp.bfloat16)]
        return [(chunks * count, self.values)]

    def _encode_values(self, values: jax.Array) -> list[jax.Array]:
        """Return the parts in which values `(r, chunks, count)` are sent."""
        if self.values not in ("int8", "bits2"):
            return [values.astype(self.values)]
        values = values.astype(jnp.float32)
        if self.values == "int8":
            largest = scale_of(values, jnp.bfloat16)[:, :, None]
            ratio = ratio_of(values, largest)
            return [jnp.round(ratio * _INT8).astype(jnp.int8), largest.astype(jnp.bfloat16)]
        # A sign and one of two sizes, each the mean of the sizes on its side of the middle.
        sizes = jnp.abs(values)
        ends = jnp.min(sizes, axis=2, keepdims=True), jnp.max(sizes, axis=2, keepdims=True)
        is_large = sizes >= (ends[0] + ends[1]) / 2
        levels = [_mean_where(is_large == side, sizes) for side in (False, True)]
        codes = is_large.astype(jnp.uint8) | (values < 0).astype(jnp.uint8) << 1
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, -codes.shape[2] % 4)))
        codes = codes.reshape(*codes.shape[:2], 4, -1) << _SHIFTS
        held = codes[:, :, 0] | codes[:, :, 1] | codes[:, :, 2] | codes[:, :, 3]
        return [held, jnp.concatenate(levels, axis=2).astype(jnp.bfloat16)]

    def _decode_values(self, parts: Sequence[jax.Array], count: int) -> jax.Array:
        """Return the values, in at least float32; the inverse of `_encode_values`."""
        if self.values == "int8":
            codes, largest = parts
            return codes.astype(jnp.float32) * (1 / _INT8) * largest.astype(jnp.float32)
        if self.values != "bits2":
            return parts[0].astype(at_least_float32(parts[0].dtype))
        held, levels = parts[0], parts[1].astype(jnp.float32)
        codes = (held[:, :, None] >> _SHIFTS).reshape(*held.shape[:2], -1)[:, :, :count]
        where = codes.__array_namespace__().where
        sizes = where(codes & 1, levels[:, :, 1:], levels[:, :, :1])
        return where(codes & 2, -sizes, sizes)


_INT8 = 127.0
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)


def _mean_where(chosen: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the mean of the chosen sizes of each chunk, 0 of none; NaN if one is not finite."""
    number = jnp.sum(chosen, axis=2, keepdims=True, dtype=sizes.dtype)
    total = jnp.sum(jnp.where(chosen, sizes, 0), axis=2, keepdims=True)
    is_finite = jnp.all(jnp.isfinite(sizes), axis=2, keepdims=True)
    return jnp.where(is_finite, total / jnp.maximum(number, 1), jnp.nan)


@checks_flags("codecs.top_k")
def top_k(
    fraction: float, *, chunk: int = 4096, values: Values = "int8", error_feedback: bool = True
) -> TopK:
    """Return the codec that sends only the elements of largest magnitude of each chunk.

    Args:
      fraction: share of the elements of a chunk that are sent, in (0, 1]: at least one.
      chunk: number of consecutive elements among which the largest are chosen.
      values: `"int8"`: codes from -127 to 127 with a scale per chunk; `"bits2"`: a sign and one of
        two sizes, the means of the smaller and of the larger magnitudes of a chunk.
      error_feedback: whether what is not sent is kept and added to what the next exchange sends;
        without it small changes may never be sent.

    Returns:
      A value of `codec=`, as `js.codecs.int8`.

    Raises:
      ValueError: a `fraction` that is not in (0, 1], a `chunk` below 1, other `values`, or
        `error_feedback` that is neither True nor False.

    Communication: that of the transform, where each replica receives what all others send: with R
      replicas, (R - 1) * fraction * (2 + 1) bytes per element for `"int8"`, (2 + 1/4) for
      `"bits2"`. Beyond R = 0.35 / fraction (0.47), `js.codecs.int4` sends less. With a sharded
      anchor the mean is sent as sparsely as each part, in fewer bytes, and much of it comes late.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025; Aji and
      Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
    """
    owner = "codecs.top_k"
    check_choice("values", values, Values, owner)
    return TopK(
        share=checked_share(owner, "fraction", fraction),
        chunk=checked_int(f"{owner}: `chunk`", chunk, 1),
        values=values,
        error_feedback=error_feedback,
    )
