"""Operations that torchax lacks, or computes differently from torch."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table

from . import _safe
from ._torchax import OperatorNotFound, Tensor
from ._views import View

_SUM, _MEAN = 0, 1  # modes of torch's embedding bags; the third is the maximum


def define(env: Any) -> None:
    """Define the operations of this module in an environment of torchax."""

    def of_arrays(function: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = env.t2j_iso((args, kwargs))
            return env.j2t_iso(function(*args, **kwargs))

        return operation

    aten: Any = torch.ops.aten
    for name, function in {
        aten.embedding.default: _embedding,
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_forward_only.default: _embedding_bag,
        torch.linalg.solve: _solve,
        aten.angle.default: _safe.angle,
        aten.linalg_vector_norm.default: _safe.vector_norm,
        aten.put.default: _safe.put,
        aten.special_erfcx.default: jax.scipy.special.erfcx,
        aten.special_log_ndtr.default: jax.scipy.special.log_ndtr,
        aten.multilabel_margin_loss_forward.default: _safe.multilabel_margin_loss,
        torch.take_along_dim: _safe.take_along_dim,
        torch.Tensor.take_along_dim: _safe.take_along_dim,
    }.items():
        env.override_op_definition(name, of_arrays(function))
    for name in (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default):
        by_torchax = env._get_op_or_decomp(name).func
        env.override_op_definition(name, of_arrays(_safe.max_pool(by_torchax)))
    for name, function in {
        torch.cdist: _safe.cdist,
        aten.cdist.default: _safe.cdist,
        aten._cdist_forward.default: _safe.cdist,
        aten._pdist_forward.default: _safe.pdist,
    }.items():
        env.override_op_definition(name, function)
    del env._ops[torch.angle], env._ops[F.max_pool2d]  # torch calls those of aten
    function: Any = F.scaled_dot_product_attention
    by_torchax = env._get_op_or_decomp(function).func
    for name in (function, aten.scaled_dot_product_attention.default):
        env.override_op_definition(name, _safe.attention(by_torchax))
    einsum = of_arrays(env._get_op_or_decomp(torch.einsum).func)
    env.override_op_definition(torch.einsum, _einsum(einsum))


def decomposition(func: Any) -> Any:
    """Return torch's decomposition of an operation into others, or None."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return None
    function = decomposition_table.get(func)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        function = func.decompose
    if function is None:
        return None

    def operation(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is NotImplemented:  # there is none for these arguments
            raise OperatorNotFound(f"{func} has no decomposition for its arguments")
        return result

    return operation


def write_out(out: Any, result: Any) -> Any:
    """Write the result of an operation into its argument `out`, and return `out`.

    Raises:
      ValueError: a tensor of another shape that is not empty, or one made before the call.
    """
    if isinstance(out, tuple | list):
        return type(result)(map(write_out, out, result))
    if not isinstance(out, Tensor):
        raise ValueError(
            "`out` is a tensor that was made outside of the module's call, and what is written to "
            "it would be lost: make it in the call, or use what the operation returns."
        )
    if out.shape == result.shape:
        return out.copy_(result)
    if isinstance(out, View) or out.numel():
        raise ValueError(
            f"`out` has the shape {tuple(out.shape)} and the result {tuple(result.shape)}: leave "
            "`out` out, and use what the operation returns."
        )
    out._elem = result.to(out.dtype).jax()  # torch resizes empty tensors
    return out


def _embedding(
    weight: jax.Array,
    ids: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Compute `aten.embedding`; scale gradients by frequency if `scale_grad_by_freq`."""
    del sparse
    rows = jnp.take(weight, ids, axis=0)
    if padding_idx >= 0:
        rows = jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
    if scale_grad_by_freq:
        count = jnp.zeros(weight.shape[0], weight.dtype).at[ids].add(1.0)
        share = 1 / count[ids][..., None]
        rows = rows * share + jax.lax.stop_gradient(rows * (1 - share))
    return rows


def _embedding_bag(
    weight: jax.Array,
    ids: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute `aten._embedding_bag`, also for traced offsets."""
    num_bags = offsets.shape[0] - include_last_offset
    positions = jnp.arange(ids.shape[0])
    bags = jnp.searchsorted(offsets[:num_bags], positions, side="right") - 1
    rows = _embedding(weight, ids, -1, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = ids != padding_idx
    sizes = jax.ops.segment_sum(counts.astype(ids.dtype), bags, num_bags)
    if mode in (_SUM, _MEAN):
        out = jax.ops.segment_sum(jnp.where(counts[:, None], rows, 0), bags, num_bags)
        if mode == _MEAN:
            out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype)
    else:
        lowest = jnp.where(counts[:, None], rows, -jnp.inf)
        out = jax.ops.segment_max(lowest, bags, num_bags)
        out = jnp.where(sizes[:, None] > 0, out, 0)
    return out, bags, sizes, sizes


def _solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    """Compute `torch.linalg.solve`: `b` is one vector, or a vector for each matrix of a batch."""
    if not left:
        transposed = jnp.swapaxes(b, -1, -2)
        return jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), transposed), -1, -2)
    if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
        return jnp.linalg.solve(a, b[..., None])[..., 0]
    return jnp.linalg.solve(a, b)


def _einsum(by_torchax: Any) -> Any:
    """Return torchax's `torch.einsum`; torch itself decomposes that of one operand into views."""

    def operation(equation: Any, *operands: Any) -> Any:
        if len(operands[0] if isinstance(operands[0], list | tuple) else operands) == 1:
            raise OperatorNotFound("torch.einsum of one operand")
        return by_torchax(equation, *operands)

    return operation
