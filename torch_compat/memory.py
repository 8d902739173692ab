"""Tensors several of whose elements share memory, such as expanded ones."""

from collections.abc import Iterable

import torch


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory: a stride within the extent of smaller ones."""
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


def separate(tensors: Iterable[torch.Tensor]) -> None:
    """Give each element memory of its own, in place: torch writes to no others."""
    for tensor in tensors:
        if overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
