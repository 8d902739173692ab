"""Torch's rules for gradients that jax does not have: `torch.no_grad`, custom backward passes."""

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
    """Return the result of an operation under `torch.no_grad`, without gradients.

    Its results are constants. A tensor that it changed in place keeps the derivative that it had,
    as in torch, which does not record the change.

    Args:
      result: result of the operation.
      tensors: tensors among its arguments.
      before: pairs of each tensor's source (itself unless it is a view) and its array before.
    """
    for tensor, old in before:
        new = tensor._elem
        if new is not old:
            is_alike = (new.shape, new.dtype) == (old.shape, old.dtype)
            tensor._elem = changed(old, new) if is_alike else jax.lax.stop_gradient(new)
    ids = set(map(id, tensors))
    return torch_tree.tree_map_only(Tensor, lambda x: x if id(x) in ids else _constant(x), result)


def _constant(x: Any) -> Any:
    if isinstance(x, View):  # writes to it change its source
        return Detached(x)
    x._elem = jax.lax.stop_gradient(x._elem)
    return x


@contextlib.contextmanager
def functions_refused() -> Iterator[None]:
    """Run the block; in it `torch.autograd.Function` and torch's differentiation raise.

    jax would ignore the backward pass of a function, and differentiate its forward pass. torch
    records nothing here, and `torch.func` would return zeros. Other threads are not affected.
    """
    # A function that `apply` calls first: programs may have stored `Name.apply`, as torch's guides
    # do.
    function: Any = torch.autograd.function
    functorch: Any = eager_transforms
    tracing = threading.get_ident()

    def refused(owner: Any, name: str, refuse: Any) -> None:
        plain = getattr(owner, name)

        def checked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                refuse()
            return plain(*args, **kwargs)

        setattr(owner, name, checked)
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
