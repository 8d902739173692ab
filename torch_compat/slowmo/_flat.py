"""Many tensors as one vector."""

from collections.abc import Iterable, Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor], length: int | None = None) -> torch.Tensor:
    """All elements in order, as (length,); zeros follow where `length` is larger than their sum."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = 0 if length is None else length - sum(part.numel() for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unflatten_into(tensors: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    """Write `flat` into `tensors`, in order and in their dtypes; elements left over are cut."""
    offset = 0
    for tensor in tensors:
        size = tensor.numel()
        tensor.copy_(flat[offset : offset + size].reshape(tensor.shape))
        offset += size


def by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors that have elements, those of one dtype together, in order of first appearance."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def times(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`value * factor`, computed at least in float32, in the dtype of `value`."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * factor.to(wide)).to(value.dtype)
