"""Batch normalisation where torch's own does not trace, or has no derivative."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm


@contextlib.contextmanager
def cumulative_averages(module: torch.nn.Module) -> Iterator[None]:
    """Run the block with layers of `momentum=None` counting batches in a traced tensor.

    They average over all batches, whose number torch reads as a float.
    """
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
    mean, variance, number = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert number is not None
    _track(x, mean, variance, 1.0 / number.add_(1).to(torch.float32))
    return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


def _track(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, share: torch.Tensor | float
) -> None:
    with torch.no_grad():
        new_variance, new_mean = torch.var_mean(x.to(mean.dtype), (0, *range(2, x.ndim)))
    mean.lerp_(new_mean, share)
    variance.lerp_(new_variance, share)


def batch_norm(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Compute `F.batch_norm`, whose own has no gradient with respect to statistics."""
    if mean is None or variance is None or not (mean.requires_grad or variance.requires_grad):
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    if training:
        _track(x, mean, variance, momentum)
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    each = (-1, *(1 for _ in x.shape[2:]))
    return x * scale.view(each) + shift.view(each)
