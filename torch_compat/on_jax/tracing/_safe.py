"""Operations whose values or gradients in torchax or torch's decompositions differ from torch."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ._torchax import torchax_tensor

_NONE, _MEAN = 0, 1  # torch's reductions of losses; the third is the sum
_ALWAYS_BY_PRODUCTS = ("use_mm_for_euclid_dist", 1)  # ways of torch.cdist, by name and by number
_NEVER_BY_PRODUCTS = ("donot_use_mm_for_euclid_dist", 2)
_MANY_ROWS = 25  # torch.cdist uses products of matrices above this, unless `compute_mode` forbids


def attention(by_torchax: Any) -> Any:
    """Return torchax's attention, with torch's zeros where a mask allows no key."""

    def operation(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is None:
            return by_torchax(query, key, value, None, *args, **kwargs)
        is_allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
        has_none = is_allowed.any(-1, keepdim=True).logical_not()
        # The gradient of a softmax over no key is NaN, so it is computed over all keys.
        if attn_mask.dtype == torch.bool:
            mask = attn_mask | has_none
        else:
            mask = attn_mask.masked_fill(has_none, 0.0)
        out = by_torchax(query, key, value, mask, *args, **kwargs)
        return out.masked_fill(has_none, 0.0)

    return operation


def safe_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Compute `aten._safe_softmax`, used by `nn.MultiheadAttention`: zeros for no key."""
    x = _converted(x, dtype)
    has_none = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(has_none, 0, jax.nn.softmax(jnp.where(has_none, 0, x), axis=dim))


def vector_norm(
    x: jax.Array,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """Compute `aten.linalg_vector_norm`; the gradient of a norm that is zero is zero."""
    sizes = jnp.abs(_converted(x, dtype))
    narrow = sizes.dtype
    if jnp.finfo(narrow).bits < 32:
        sizes = sizes.astype(jnp.float32)  # the dtype of torch's sums
    axes: dict[str, Any] = {"axis": _axes(dim), "keepdims": keepdim}
    if ord == 0:
        norm = jnp.sum(sizes != 0, **axes).astype(sizes.dtype)
    elif math.isinf(ord):
        norm = (jnp.max if ord > 0 else jnp.min)(sizes, **axes)
    elif ord == 1:
        norm = jnp.sum(sizes, **axes)
    elif ord < 0:
        norm = jnp.sum(sizes**ord, **axes) ** (1 / ord)
    else:
        norm = _power(jnp.sum(_power(sizes, ord), **axes), 1 / ord)
    return norm.astype(narrow)


def dist(x: jax.Array, y: jax.Array, p: float = 2) -> jax.Array:
    """Compute `aten.dist`."""
    return vector_norm(x - y, p)


def cdist(x: jax.Array, y: jax.Array, p: float = 2.0, compute_mode: Any = None) -> jax.Array:
    """Compute `torch.cdist`; the gradient of a distance that is zero is zero."""
    is_many = max(x.shape[-2], y.shape[-2]) > _MANY_ROWS and compute_mode not in _NEVER_BY_PRODUCTS
    if p == 2 and (is_many or compute_mode in _ALWAYS_BY_PRODUCTS):
        squares = jnp.sum(x**2, -1)[..., :, None] + jnp.sum(y**2, -1)[..., None, :]
        return _power(jnp.maximum(squares - 2 * x @ jnp.swapaxes(y, -1, -2), 0), 0.5)
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


def pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    """Compute `aten._pdist_forward`."""
    first, second = jnp.triu_indices(x.shape[0], k=1)
    return vector_norm(x[first] - x[second], p, -1)


def std(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    *,
    correction: int | None = None,
    keepdim: bool = False,
) -> jax.Array:
    """Compute `aten.std.correction`; the gradient of a deviation that is zero is zero."""
    correction = 1 if correction is None else correction
    return _power(jnp.var(x, _axes(dim), ddof=correction, keepdims=keepdim), 0.5)


def std_mean(
    x: jax.Array, dim: int | Sequence[int] | None = None, *, keepdim: bool = False, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute `aten.std_mean.correction`."""
    mean = jnp.mean(x, _axes(dim), keepdims=keepdim)
    return std(x, dim, keepdim=keepdim, **options), mean


def multilabel_margin_loss(
    x: jax.Array, labels: jax.Array, reduction: int = _MEAN
) -> tuple[jax.Array, jax.Array]:
    """Compute `aten.multilabel_margin_loss_forward`; labels end at the first -1."""
    rows, row_labels = jnp.atleast_2d(x), jnp.atleast_2d(labels)
    counts = jnp.cumprod(row_labels != -1, axis=-1) > 0
    of_labels = jnp.take_along_axis(rows, jnp.where(counts, row_labels, 0), axis=-1)
    is_label = row_labels[..., None] == jnp.arange(rows.shape[-1])
    is_target = jnp.any(is_label & counts[..., None], axis=-2)
    margins = jnp.maximum(1 - of_labels[..., None] + rows[..., None, :], 0)
    pairs = counts[..., None] & ~is_target[..., None, :]
    losses = jnp.sum(jnp.where(pairs, margins, 0), (-2, -1)) / rows.shape[-1]
    if reduction == _NONE:
        loss = losses.reshape(x.shape[:-1])
    else:
        loss = jnp.mean(losses) if reduction == _MEAN else jnp.sum(losses)
    return loss, is_target.reshape(x.shape).astype(x.dtype)


def take_along_dim(x: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
    """Compute `torch.take_along_dim`, whose integers have 64 bits in torch and 32 in jax."""
    if dim is None:
        return jnp.take_along_axis(x.ravel(), indices.ravel(), axis=0)
    return jnp.take_along_axis(x, indices, axis=dim)


def _converted(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    return x if dtype is None else x.astype(torchax_tensor.mappings.t2j_dtype(dtype))


def _axes(dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the axes that torch reduces; None for all of them."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(dim or ()) or None


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """Return powers of numbers >= 0, with zero as the gradient at zero."""
    is_zero = x == 0
    positive = jnp.where(is_zero, 1, x)
    powers = jnp.sqrt(positive) if exponent == 0.5 else positive**exponent
    return jnp.where(is_zero, 0, powers)
