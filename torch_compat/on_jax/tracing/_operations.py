"""Properties of an operation of torch that are known before it runs."""

from typing import Any

import torch


def is_fixed(func: Any) -> bool:
    """Return whether an aten operation without tensors has the same result in every call."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def changes_first(func: Any) -> bool:
    """Return whether an operation writes into its first argument, such as `aten.fill_`."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write and not func._schema.arguments[0].is_out


def out_of_place(func: Any) -> Any:
    """Return `aten.erfinv` for `aten.erfinv_`; the operation itself if there is none."""
    packet = getattr(torch.ops.aten, func._opname.removesuffix("_"), None)
    return getattr(packet, func._overloadname, func)


def plain_index(index: Any) -> Any:
    """Return an index in a form that torchax supports.

    Tensors at the ends of slices become numbers, as in torch; lists become tensors.
    """

    def plain(index: Any) -> Any:
        if isinstance(index, range):
            index = list(index)
        if isinstance(index, list) and all(isinstance(i, bool | int) for i in index):
            return torch.tensor(index)
        if not isinstance(index, slice):
            return index
        ends = (index.start, index.stop, index.step)
        return slice(*(int(x) if isinstance(x, torch.Tensor) else x for x in ends))

    return tuple(map(plain, index)) if isinstance(index, tuple) else plain(index)
