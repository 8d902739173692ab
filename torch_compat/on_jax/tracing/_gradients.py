"""Where torch's rules for gradients are not jax's: `torch.no_grad`, functions with a backward."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch._functorch import eager_transforms
from torch.utils import _pytree as torch_tree

from ._torchax import Tensor
from ._views import Detached, View, changed


def without_gradient(result: Any, tensors: list[Any], before: list[tuple[Any, jax.Array]]) -> Any:
    """What an operation under `torch.no_grad` leaves behind.

    Its results are constants. What it changed in place goes on as if it were unchanged, as in
    torch, which does not record the change.

    Args:
      result: of the operation.
      tensors: that it was given.
      before: what these tensors are views of, or they themselves, and their arrays before.
    """
    for tensor, old in before:
        new = tensor._elem
        if new is not old:
            is_alike = (new.shape, new.dtype) == (old.shape, old.dtype)
            tensor._elem = changed(old, new) if is_alike else jax.lax.stop_gradient(new)
    given = set(map(id, tensors))
    return torch_tree.tree_map_only(Tensor, lambda x: x if id(x) in given else _constant(x), result)


def _constant(x: Any) -> Any:
    if isinstance(x, View):  # what is written to it reaches its source
        return Detached(x)
    x._elem = jax.lax.stop_gradient(x._elem)
    return x


@contextlib.contextmanager
def functions_refused() -> Iterator[None]:
    """Inside, this thread cannot apply a `torch.autograd.Function`, nor differentiate by torch.

    The backward pass of a function would not be seen: jax would differentiate its forward pass.
    torch records nothing here, and `torch.func` would return zeros.
    """
    # What `apply` itself asks first: a program may have kept `Name.apply`, as torch's guides do.
    function: Any = torch.autograd.function
    functorch: Any = eager_transforms
    tracing = threading.get_ident()

    def refused(owner: Any, name: str, refuse: Any) -> None:
        plain = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                refuse()
            return plain(*args, **kwargs)

        setattr(owner, name, asked)
        patches.callback(setattr, owner, name, plain)

    with contextlib.ExitStack() as patches:
        refused(function, "_is_setup_context_defined", _refuse_function)
        refused(torch.autograd, "_engine_run_backward", _refuse_differentiation)
        for name in ("grad_increment_nesting", "jvp_increment_nesting"):
            refused(functorch, name, _refuse_differentiation)
        yield


def _refuse_function() -> None:
    applied = sys._getframe(2).f_locals.get("cls")
    raise ValueError(
        f"The module uses {getattr(applied, '__name__', 'one')}, a torch.autograd.Function, "
        "whose backward pass jax does not see: write it with torch's operations and `detach` "
        "(straight-through: `x + (f(x) - x).detach()`). torch.utils.checkpoint needs "
        "use_reentrant=False."
    )


def _refuse_differentiation() -> None:
    raise ValueError(
        "The module differentiates by itself (torch.autograd.grad, backward, torch.func), where "
        "torch records nothing: use jax.grad of on_jax.as_apply, in a loss written in jax."
    )
