"""Operations whose values or gradients in torchax or torch's decompositions differ from torch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ._torchax import torchax_tensor

_NONE, _MEAN = 0, 1  # torch's reductions of losses; the third is the sum
_ALWAYS_BY_PRODUCTS = ("use_mm_for_euclid_dist", 1)  # ways of torch.cdist, by name and by number
_NEVER_BY_PRODUCTS = ("donot_use_mm_for_euclid_dist", 2)
_MANY_ROWS = 25  # torch.cdist uses products of matrices above this, unless `compute_mode` forbids


def attention(by_torchax: Any) -> Any:
    """Return torchax's attention, with torch's zeros where a mask allows no key.

    Like torch it refuses masks of integers, which torchax would add to the scores.
    """

    def operation(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is None:
            return by_torchax(query, key, value, None, *args, **kwargs)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise ValueError(
                "`attn_mask` must be boolean, True where a key is used, or floating, added to the "
                f"scores, got {attn_mask.dtype}: a mask of 0 and 1 is `mask > 0`."
            )
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


def vector_norm(
    x: jax.Array,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """Compute `aten.linalg_vector_norm`."""
    sizes = jnp.abs(x if dtype is None else x.astype(torchax_tensor.mappings.t2j_dtype(dtype)))
    narrow = sizes.dtype
    if jnp.finfo(narrow).bits < 32:
        sizes = sizes.astype(jnp.float32)  # the dtype of torch's sums
    dim = (dim,) if isinstance(dim, int) else tuple(dim or ()) or None
    axes: dict[str, Any] = {"axis": dim, "keepdims": keepdim}
    if ord == 0:
        norm = jnp.sum(sizes != 0, **axes)
    elif math.isinf(ord):
        norm = (jnp.max if ord > 0 else jnp.min)(sizes, **axes)
    else:
        norm = jnp.sum(sizes**ord, **axes) ** (1 / ord)
    return norm.astype(narrow)


def cdist(
    x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: Any = None
) -> torch.Tensor:
    """Compute `torch.cdist`."""
    is_many = max(x.shape[-2], y.shape[-2]) > _MANY_ROWS and compute_mode not in _NEVER_BY_PRODUCTS
    if p == 2 and (is_many or compute_mode in _ALWAYS_BY_PRODUCTS):
        return torch.ops.aten._euclidean_dist.default(x, y)
    return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


def pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Compute `aten._pdist_forward`."""
    first, second = torch.triu_indices(len(x), len(x), 1)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


def angle(x: jax.Array) -> jax.Array:
    """Compute `aten.angle`: without a gradient for real numbers and for zero, and 0 for -0.0."""
    if jnp.iscomplexobj(x):
        return jnp.angle(jnp.where(x == 0, 1, x))
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))


def put(x: jax.Array, index: jax.Array, values: jax.Array, accumulate: bool = False) -> jax.Array:
    """Compute `aten.put`; with `accumulate` a position that occurs twice has both values added."""
    elements = x.ravel().at[index.ravel()]
    return (elements.add if accumulate else elements.set)(values.ravel()).reshape(x.shape)


def multilabel_margin_loss(
    x: jax.Array, labels: jax.Array, reduction: int = _MEAN
) -> tuple[jax.Array, jax.Array]:
    """Compute `aten.multilabel_margin_loss_forward`; labels end at the first -1."""
    rows, row_labels = jnp.atleast_2d(x), jnp.atleast_2d(labels)
    counts = jnp.cumprod(row_labels != -1, axis=-1) > 0
    of_labels = jnp.take_along_axis(rows, jnp.where(counts, row_labels, 0), axis=-1)
    is_label = row_labels[..., None] == jnp.arange(rows.shape[-1])
    is_target = jnp.any(is_label & counts[..., None], axis=-2)
    margins = jax.nn.relu(1 - of_labels[..., None] + rows[..., None, :])
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


def max_pool(by_torchax: Callable[..., Any]) -> Callable[..., Any]:
    """Return torchax's max pooling with indices, with a gradient where windows are dilated."""

    def operation(
        x: jax.Array, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, *mode: Any
    ) -> tuple[jax.Array, jax.Array]:
        if np.all(np.equal(dilation, 1)):
            return by_torchax(x, kernel, stride, padding, dilation, *mode)
        # jax has no gradient of these windows, so the elements are read at the indices.
        fixed = jax.lax.stop_gradient(x)
        _, indices = by_torchax(fixed, kernel, stride, padding, dilation, *mode)
        kept = x.shape[: -len(kernel)]
        elements = x.reshape(*kept, -1)
        out = jnp.take_along_axis(elements, indices.reshape(*kept, -1), axis=-1)
        return out.reshape(indices.shape), indices

    return operation
