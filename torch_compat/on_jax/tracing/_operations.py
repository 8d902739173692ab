"""Operations of torch that torchax lacks, or of which it has other values, on arrays of jax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ._torchax import torchax_tensor

_ATEN: Any = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's reductions of losses; the third is the sum


def _det(x: jax.Array, is_transposed: bool) -> tuple[jax.Array, ...]:
    """Compute `aten._linalg_det`, whose backward pass needs the factors, of a transpose or not."""
    lu, pivots = jax.scipy.linalg.lu_factor(jnp.swapaxes(x, -1, -2) if is_transposed else x)
    return jnp.linalg.det(x), lu, pivots + 1


def _slogdet(x: jax.Array, is_transposed: bool) -> tuple[jax.Array, ...]:
    return *jnp.linalg.slogdet(x), *_det(x, is_transposed)[1:]


def _eigh(x: jax.Array, uplo: str = "L", compute_v: bool = True) -> tuple[jax.Array, ...]:
    """Compute `aten._linalg_eigh`, which reads one triangle."""
    del compute_v
    return tuple(jnp.linalg.eigh(x, uplo, symmetrize_input=False))


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2).conj()


def _pinv(x: jax.Array, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> jax.Array:
    """Compute `aten.linalg_pinv`, which drops small singular values."""
    if hermitian:
        x = jnp.tril(x) + _adjoint(jnp.tril(x, -1))
    left, sizes, right = jnp.linalg.svd(x, full_matrices=False)
    if rtol is None:
        rtol = 0.0 if atol is not None else jnp.finfo(sizes.dtype).eps * max(x.shape[-2:])
    limit = jnp.maximum(0.0 if atol is None else atol, rtol * jnp.max(sizes, -1, initial=0))
    inverse = jnp.where(sizes > limit[..., None], 1 / sizes, 0)
    return (_adjoint(right) * inverse[..., None, :]) @ _adjoint(left)


def _nanmedian(x: jax.Array, dim: int = 0, keepdim: bool = False) -> tuple[jax.Array, ...]:
    count = jnp.sum(~jnp.isnan(x), dim, keepdims=True)
    order = jnp.argsort(x, dim)  # NaN comes last
    places = jnp.take_along_axis(order, jnp.maximum(count - 1, 0) // 2, dim)
    found = jnp.take_along_axis(x, places, dim), places
    return found if keepdim else tuple(y.squeeze(dim) for y in found)


def _solve(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, ...]:
    """Solve for one vector, or a matrix of them for each matrix of a batch."""
    del check_errors
    if not left:
        x = _adjoint(jnp.linalg.solve(_adjoint(a), _adjoint(b)))
    elif b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
        x = jnp.linalg.solve(a, b[..., None])[..., 0]
    else:
        x = jnp.linalg.solve(a, b)
    lu, pivots = jax.scipy.linalg.lu_factor(a)
    return x, lu, pivots + 1, jnp.zeros(a.shape[:-2], jnp.int32)


def _lu_solve(
    lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if not left:  # of the equation's adjoint
        return _adjoint(_lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))
    return jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=2 if adjoint else 0)


def _angle(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))  # 0 for -0.0


def _polygamma(order: int, x: jax.Array) -> jax.Array:
    """Compute `aten.polygamma`; XLA's is wrong at less than -8, so steps of 1 lead up to 9."""
    steps = x[..., None].astype(jnp.float32) + jnp.arange(73)
    terms = jnp.where(steps < 9, steps, jnp.inf) ** -(order + 1)
    above = jax.scipy.special.polygamma(order, steps[..., 0] + jnp.sum(steps < 9, -1))
    return above - (-1) ** order * math.factorial(order) * jnp.sum(terms, -1)


def _aten_put(
    x: jax.Array, index: jax.Array, values: jax.Array, accumulate: bool = False
) -> jax.Array:
    elements = x.ravel().at[index.ravel()]
    return (elements.add if accumulate else elements.set)(values.ravel()).reshape(x.shape)


def _multilabel_margin_loss(
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


def _of_maxima(dims: int) -> Callable[..., Any]:
    """Return the backward pass of max pooling, whose last argument are places of the maxima."""

    def operation(cotangent: jax.Array, x: jax.Array, *rest: Any) -> jax.Array:
        kept = x.shape[:-dims]
        rows = jnp.zeros((math.prod(kept), math.prod(x.shape[-dims:])), x.dtype)
        places, values = (y.reshape(len(rows), -1) for y in (rest[-1], cotangent))
        return rows.at[jnp.arange(len(rows))[:, None], places].add(values).reshape(x.shape)

    return operation


def _convolution(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *options: Any
) -> jax.Array:
    """Compute `aten.convolution`; a transposed one has (in, out / groups, ...) weights."""
    *lists, transposed, output_padding, groups = options
    dims = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        [*y] * (dims // len(y)) for y in (*lists, output_padding)
    )
    around, strides = [(p, p) for p in padding], [1] * dims
    if transposed:
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        ends = zip(reach, padding, output_padding, strict=True)
        around = [(r - p, r - p + extra) for r, p, extra in ends]
        strides, stride = stride, strides
        weight = jnp.flip(weight, range(2, weight.ndim))
        weight = jnp.swapaxes(weight.reshape(groups, -1, *weight.shape[1:]), 1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
    out = jax.lax.conv_general_dilated(
        x, weight, stride, around, strides, dilation, feature_group_count=groups
    )
    if bias is None:
        return out
    wide = jnp.promote_types(bias.dtype, jnp.float32)  # in which its gradient is summed
    return (out + bias.astype(wide).reshape(-1, *[1] * dims)).astype(out.dtype)


def _avg_pool(
    x: jax.Array,
    sizes: Sequence[int],
    strides: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    """Compute `aten.avg_pool2d` or `avg_pool3d`, whose last windows may reach past the padding."""
    dims = len(sizes)
    around, counts = [(0, 0)] * (x.ndim - dims), np.ones([1] * x.ndim)
    steps, pads = strides or sizes, [*padding] * (dims // len(padding))
    for i, size, step, pad in zip(range(dims), sizes, steps, pads, strict=True):
        length = x.shape[i - dims]
        starts = np.arange(-pad, length, step)
        starts = starts[starts + size <= length + pad + (step - 1 if ceil_mode else 0)]
        ends = np.minimum(starts + size, length + pad)
        around.append((pad, max(int(starts[-1]) + size - length, 0)))
        if not count_include_pad:
            starts, ends = np.maximum(starts, 0), np.minimum(ends, length)
        counts = counts * (ends - starts).reshape(-1, *[1] * (dims - 1 - i))
    outer = [1] * (x.ndim - dims)
    window, by = (*outer, *sizes), (*outer, *steps)
    sums = jax.lax.reduce_window(x, np.zeros((), x.dtype), jax.lax.add, window, by, around)
    return sums / jnp.asarray(divisor_override or counts, x.dtype)


def _adaptive_max_pool(x: jax.Array, sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return the maxima of windows that cover the last dimensions, and their places in these."""
    shape = x.shape[-len(sizes) :]
    places = jnp.broadcast_to(jnp.arange(math.prod(shape)).reshape(shape), x.shape)
    for axis in range(-1, -len(sizes) - 1, -1):
        length, number = shape[axis], sizes[axis]
        parts: list[Any] = []
        for i in range(number):
            window = range(i * length // number, -(-(i + 1) * length // number))
            of, at = (jnp.take(y, np.array(window), axis) for y in (x, places))
            best = jnp.argmax(of, axis, keepdims=True)
            parts.append([jnp.take_along_axis(y, best, axis) for y in (of, at)])
        x, places = (jnp.concatenate(part, axis) for part in zip(*parts, strict=True))
    return x, places


def _scatter(x: jax.Array, dim: int, index: jax.Array, value: float) -> jax.Array:
    places: list[Any] = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return x.at[tuple(places)].set(jnp.asarray(value, x.dtype))


def _diagonal_scatter(
    x: jax.Array, diagonal: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    matrices, number = jnp.moveaxis(x, (dim1, dim2), (-2, -1)), jnp.arange(diagonal.shape[-1])
    places = matrices.at[..., number + max(-offset, 0), number + max(offset, 0)]
    return jnp.moveaxis(places.set(diagonal), (-2, -1), (dim1, dim2))


def _masked_scatter_backward(
    cotangent: jax.Array, mask: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    mask = jnp.broadcast_to(mask, cotangent.shape).ravel()
    places = jnp.where(mask, jnp.cumsum(mask) - 1, math.prod(sizes))  # what is outside is dropped
    source = jnp.zeros(math.prod(sizes), cotangent.dtype)
    return source.at[places].add(cotangent.ravel(), mode="drop").reshape(sizes)


def _slice_scatter(
    x: jax.Array,
    part: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    """Compute `aten.slice_scatter`, of which torch's own form gives views other strides."""
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(part)


OPERATIONS: dict[Any, Callable[..., Any]] = {
    _ATEN._efficientzerotensor.default: lambda size, dtype=None, **_: jnp.zeros(
        size, torchax_tensor.mappings.t2j_dtype(dtype or torch.float32)
    ),
    _ATEN._linalg_det.default: _det,
    _ATEN._linalg_slogdet.default: _slogdet,
    _ATEN._linalg_eigh.default: _eigh,
    _ATEN.linalg_pinv.atol_rtol_tensor: _pinv,
    _ATEN.nanmedian.dim: _nanmedian,
    _ATEN.convolution.default: _convolution,
    _ATEN.avg_pool2d.default: _avg_pool,
    _ATEN.avg_pool3d.default: _avg_pool,
    _ATEN.adaptive_max_pool2d.default: _adaptive_max_pool,
    _ATEN.adaptive_max_pool3d.default: _adaptive_max_pool,
    _ATEN._linalg_solve_ex.default: _solve,
    _ATEN.linalg_lu_solve.default: _lu_solve,
    _ATEN.angle.default: _angle,
    _ATEN.polygamma.default: _polygamma,
    _ATEN.put.default: _aten_put,
    _ATEN.scatter.value: _scatter,
    _ATEN.diagonal_scatter.default: _diagonal_scatter,
    _ATEN.slice_scatter.default: _slice_scatter,
    _ATEN.special_erfcx.default: jax.scipy.special.erfcx,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    _ATEN.masked_scatter_backward.default: _masked_scatter_backward,
    _ATEN.max_pool2d_with_indices_backward.default: _of_maxima(2),
    _ATEN.max_pool3d_with_indices_backward.default: _of_maxima(3),
    _ATEN.adaptive_max_pool2d_backward.default: _of_maxima(2),
    _ATEN.adaptive_max_pool3d_backward.default: _of_maxima(3),
}
