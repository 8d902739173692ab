"""What can be known of an operation of torch before it runs."""

from typing import Any

import torch


def is_fixed(func: Any) -> bool:
    """Whether an operation without tensors, below torch's functions, gives the same every time."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def changes_first(func: Any) -> bool:
    """Whether an operation writes its result into its first argument: `aten.fill_`."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write and not func._schema.arguments[0].is_out


def out_of_place(func: Any) -> Any:
    """`aten.erfinv` for `aten.erfinv_`; itself where there is none."""
    packet = getattr(torch.ops.aten, func._opname.removesuffix("_"), None)
    return getattr(packet, func._overloadname, func)


def plain_index(index: Any) -> Any:
    """Return an index as torchax can take it.

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
