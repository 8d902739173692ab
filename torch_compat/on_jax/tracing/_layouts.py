"""Shapes and strides of tensors in torch, which decide what shares memory."""

import functools
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_tree
from torch.utils._mode_utils import no_dispatch

from ._torchax import Tensor


def layout_of(x: Any) -> torch.Tensor:
    """Return a tensor of the meta device with the shape and the strides that `x` has in torch."""
    layout = vars(x).get("_layout")
    if layout is None or tuple(layout.shape) != x.shape:
        with no_dispatch(), torch._C.DisableTorchFunction():
            layout = x._layout = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
    return layout


def empty_tensor(kind: Any, layout: torch.Tensor) -> Any:
    """Return a tensor of torchax without an array, with the shape and strides of `layout`."""
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(
        kind,
        layout.shape,
        layout.stride(),
        layout.storage_offset(),
        dtype=layout.dtype,
        device="meta",
    )


def on_layouts(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of torch on tensors of the meta device."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        return func(*args, **(kwargs or {}))


def laid_out(func: Any, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> Any:
    """Return a result of torchax with the strides that torch gives it.

    These are the strides of a contiguous tensor, unless one of the arguments `tensors` has others.
    """
    if all(map(is_contiguous, tensors)):
        return result
    leaves, structure = torch_tree.tree_flatten((args, kwargs))
    try:
        layouts = _layouts(func, structure, *(described(x) for x in leaves))
    except Exception:  # torch's operation needs values; torchax's has given a result
        return result
    results, structure = torch_tree.tree_flatten(result)
    if len(results) != len(layouts):
        return result
    pairs = zip(results, layouts, strict=True)
    return torch_tree.tree_unflatten([_with_layout(x, layout) for x, layout in pairs], structure)


def is_contiguous(x: Any) -> bool:
    """Return whether the elements of `x` are in order in torch; the default is yes."""
    layout = vars(x).get("_layout")
    return layout is None or layout.is_contiguous()


def described(x: Any) -> Any:
    """Return a hashable description of a tensor of torchax; anything else itself."""
    if not isinstance(x, Tensor):
        return x
    layout = layout_of(x)
    return Description(tuple(layout.shape), layout.stride(), layout.dtype)


class Description(NamedTuple):
    """The shape, strides and dtype of a tensor in torch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


# The call takes 2.5 ms for attention, and a deep model has the same one in every layer.
@functools.lru_cache(maxsize=1024, typed=True)
def _layouts(func: Any, structure: Any, *leaves: Any) -> list[Any]:
    """Return an operation's results for tensors of the meta device."""

    def meta(x: Any) -> Any:
        if not isinstance(x, Description):
            return x
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")

    with no_dispatch(), torch._C.DisableTorchFunction():
        args, kwargs = torch_tree.tree_unflatten(map(meta, leaves), structure)
        return torch_tree.tree_leaves(func(*args, **kwargs))


def _with_layout(x: Any, layout: Any) -> Any:
    is_new = type(x) is Tensor and "_layout" not in vars(x)
    if not is_new or not isinstance(layout, torch.Tensor) or layout.is_contiguous():
        return x
    if tuple(layout.shape) != x.shape:
        return x
    strided = empty_tensor(Tensor, layout)
    strided._env, strided._elem, strided._layout = x._env, x._elem, layout
    return strided
