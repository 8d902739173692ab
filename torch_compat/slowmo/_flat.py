"""Conversions between tensors and flat vectors, without communication."""

from collections.abc import Iterable, Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor], length: int | None = None) -> torch.Tensor:
    """Return all elements in order, as (length,), never a view.

    Zeros follow if `length` is larger than the number of elements.
    """
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = 0 if length is None else length - sum(part.numel() for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing))
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def unflatten(like: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of `flat` in the shapes and dtypes of `like`, in order; new tensors."""
    parts, offset = [], 0
    for tensor in like:
        part = flat[offset : offset + tensor.numel()].reshape(tensor.shape)
        # A view would keep all of `flat` alive.
        parts.append(part.to(tensor.dtype, copy=True))
        offset += tensor.numel()
    return parts


def by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the nonempty tensors grouped by dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def pack(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return one new vector per dtype."""
    return [flatten(same) for same in by_dtype(tensors)]


def unpack(like: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `pack`, for tensors of the shapes, dtypes and order of `like`."""
    parts = {id(tensor): tensor for tensor in like}  # empty tensors stay as they are
    for same, flat in zip(by_dtype(like), flats, strict=True):
        parts |= dict(zip(map(id, same), unflatten(same, flat), strict=True))
    return [parts[id(tensor)] for tensor in like]


def times(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `value * factor`, `factor` (1,), computed in at least float32, in `value`'s dtype."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * factor.to(wide).reshape(())).to(value.dtype)
