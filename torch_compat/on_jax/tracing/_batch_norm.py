"""Normalisation with updates of running statistics, which torchax does not make."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm


def define(env: Any) -> None:
    """Define the operations of this module in an environment of torchax."""
    aten = torch.ops.aten
    env.override_op_definition(torch.batch_norm, _batch_norm)
    env.override_op_definition(torch.nn.functional.instance_norm, _instance_norm)
    env.override_op_definition(aten.native_batch_norm, _native)
    env.override_op_definition(aten._native_batch_norm_legit, _native)


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: Any,
    eps: float,
    cudnn_enabled: bool = False,
) -> Any:
    """Compute `torch.batch_norm`; `momentum` may be a tensor."""
    del cudnn_enabled
    return _native(x, weight, bias, mean, variance, training, momentum, eps)[0]


def _instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Compute `F.instance_norm`: statistics per example; running ones average over examples."""
    if not use_input_stats:
        return _native(x, weight, bias, running_mean, running_var, False, momentum, eps)[0]
    size = x[0, 0].numel()
    flat = x.reshape(1, -1, size)
    y, center, inverse = _native(flat, None, None, None, None, True, 0.0, eps)
    y = y.reshape(x.shape)
    with torch.no_grad():
        spread = (inverse**-2 - eps) * (size / max(size - 1, 1))
        _move(running_mean, center.reshape(x.shape[:2]).mean(0), momentum)
        _move(running_var, spread.reshape(x.shape[:2]).mean(0), momentum)
    y = y if weight is None else y * _along(weight, x)
    return (y if bias is None else y + _along(bias, x)).to(x.dtype)


def _native(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Any, Any, Any]:
    """Compute `aten.native_batch_norm` in at least float32; update running statistics in place."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training:
        axes = [0, *range(2, x.ndim)]
        count = x.numel() // x.shape[1]
        center = wide.mean(axes)
        spread = ((wide - _along(center, x)) ** 2).mean(axes)
        with torch.no_grad():
            _move(mean, center, momentum)
            # The running variance is unbiased, that of the batch is not.
            _move(variance, spread * (count / max(count - 1, 1)), momentum)
    else:
        center, spread = mean.to(wide.dtype), variance.to(wide.dtype)
    inverse = torch.rsqrt(spread + eps)
    y = (wide - _along(center, x)) * _along(inverse, x)
    if weight is not None:
        y = y * _along(weight, x)
    if bias is not None:
        y = y + _along(bias, x)
    return y.to(x.dtype), center, inverse


def _along(per_channel: Any, x: Any) -> Any:
    return per_channel.reshape([1, -1] + [1] * (x.ndim - 2))


def _move(running: Any, new: Any, momentum: Any) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running + momentum * new)


@contextlib.contextmanager
def cumulative_averages(module: torch.nn.Module) -> Iterator[None]:
    """Run the block with layers of `momentum=None` counting batches in a traced tensor."""
    layers = [
        m
        for m in module.modules()
        if isinstance(m, BatchNorm)
        and m.training
        and m.momentum is None
        and m.num_batches_tracked is not None
        and type(m).forward is BatchNorm.forward
    ]
    try:
        for layer in layers:
            layer.__dict__["forward"] = functools.partial(_cumulative, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _cumulative(layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
    layer._check_input_dim(x)
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share: Any = 1.0 / layer.num_batches_tracked.to(torch.float32)
    stats = layer.running_mean, layer.running_var
    return torch.batch_norm(x, layer.weight, layer.bias, *stats, True, share, layer.eps, False)
