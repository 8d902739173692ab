"""Checks that a module can be traced."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ._arrays import PLAIN_TENSORS, jax_dtype, keeps_values
from .tracing import OptimizedModule


def check_module(owner: str, module: Any) -> None:
    """Raise `ValueError` unless jax can hold every tensor of the module; name all it cannot."""
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"{owner}: `module` must be a torch.nn.Module, got {type(module).__name__}."
        )
    inner = "_orig_mod" if hasattr(module, "_orig_mod") else "module"
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | OptimizedModule):
        raise ValueError(
            f"{owner}: `module` is a {type(module).__name__}, which does what jax does here: give "
            f"the module in it, `module.{inner}`."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{owner}: `module` is compiled by TorchScript, whose operations are not seen: give "
            "the module that it was made of."
        )
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    problems = [
        f"{name} {problem}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if (problem := _problem(tensor))
    ]
    problems += [
        f"{name} is {p.dtype}, and only floating numbers are trained"
        for name, p in trained
        if not p.is_floating_point()
    ]
    if problems:
        raise ValueError(f"{owner}: `module` holds what jax cannot: {'; '.join(problems)}.")


def _problem(tensor: torch.Tensor) -> str | None:
    """Return why a parameter or a buffer cannot be an array of jax, or None."""
    if is_lazy(tensor):
        return "has no shape yet: call the module once"
    if type(tensor) not in PLAIN_TENSORS:
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.is_meta:
        return "is on the meta device, without values: initialise it with module.to_empty(...)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}, not torch.strided"
    if jax_dtype(tensor.dtype) is None:
        return f"is {tensor.dtype}, a dtype that is not supported"
    if not keeps_values(tensor):
        return (
            f"is {tensor.dtype} and would lose digits, since jax has 32 bits by default: convert "
            'the module (module.float()), or jax.config.update("jax_enable_x64", True)'
        )
    return None
