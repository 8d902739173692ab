"""Where torch's rules for gradients are not jax's: `torch.no_grad`, functions with a backward."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_tree

from ._torchax import Tensor, View


@jax.custom_jvp
def _changed(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new`, with the derivative of `old`."""
    del old
    return new


@_changed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def without_gradient(result: Any, arguments: list[tuple[Any, jax.Array]]) -> Any:
    """What an operation under `torch.no_grad` leaves behind.

    Its results are constants. What it changed in place goes on as if it were unchanged, as in
    torch, which does not record the change.

    Args:
      result: of the operation.
      arguments: tensors that it was given, and their arrays before.
    """
    for tensor, old in arguments:
        new = tensor._elem
        if new is not old:
            is_alike = (new.shape, new.dtype) == (old.shape, old.dtype)
            tensor._elem = _changed(old, new) if is_alike else jax.lax.stop_gradient(new)
    given = {id(tensor) for tensor, _ in arguments}
    return torch_tree.tree_map_only(
        torch.Tensor, lambda x: x if id(x) in given else _constant(x), result
    )


def _constant(x: Any) -> Any:
    if isinstance(x, Tensor):
        x._elem = jax.lax.stop_gradient(x._elem)
    elif isinstance(x, View):  # stays a view: what is written to it reaches its source
        read = x.jax
        x.jax = lambda: jax.lax.stop_gradient(read())
    return x


@contextlib.contextmanager
def functions_refused() -> Iterator[None]:
    """Inside, this thread cannot apply a `torch.autograd.Function`.

    Its backward pass would not be seen: jax would differentiate its forward pass.
    """
    # What `apply` itself asks first: a program may have kept `Name.apply`, as torch's guides do.
    module: Any = torch.autograd.function
    asked = module._is_setup_context_defined
    tracing = threading.get_ident()

    def refuse(setup_context: Any) -> Any:
        if threading.get_ident() != tracing:
            return asked(setup_context)
        applied = sys._getframe(1).f_locals.get("cls")
        raise ValueError(
            f"The module uses {getattr(applied, '__name__', 'one')}, a torch.autograd.Function, "
            "whose backward pass jax does not see: write it with torch's operations and `detach` "
            "(straight-through: `x + (f(x) - x).detach()`). torch.utils.checkpoint needs "
            "use_reentrant=False."
        )

    module._is_setup_context_defined = refuse
    try:
        yield
    finally:
        module._is_setup_context_defined = asked
