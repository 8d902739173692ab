"""Conversions between tensors of torch and arrays of jax."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.ops.mappings import TORCH_DTYPE_TO_JAX

# Classes of tensors whose operations are torch's own.
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# torch cannot convert these to NumPy; float32 holds each of their values.
_NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# Those of which torch computes little or nothing, or that hold two numbers.
_REFUSED = (torch.uint16, torch.uint32, torch.uint64, torch.float4_e2m1fn_x2)


def jax_dtype(dtype: torch.dtype) -> np.dtype | None:
    """Return jax's dtype for one of torch, 32 bits unless jax allows 64; None without one."""
    if dtype in _REFUSED or dtype not in TORCH_DTYPE_TO_JAX:
        return None
    return np.dtype(jax.dtypes.canonicalize_dtype(TORCH_DTYPE_TO_JAX[dtype]))


def keeps_values(tensor: torch.Tensor) -> bool:
    """Return whether jax's array holds the tensor's numbers: 64 bits may become 32."""
    dtype = jax_dtype(tensor.dtype)
    if dtype is None or dtype.itemsize == tensor.element_size():
        return dtype is not None
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    limits = np.iinfo(dtype)
    return tensor.numel() == 0 or bool((tensor.min() >= limits.min) & (tensor.max() <= limits.max))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy, independent of the tensor, in the dtype that jax has for it."""
    tensor = tensor.detach().cpu()
    values = tensor.float() if tensor.dtype in _NARROW else tensor
    return np.array(values.numpy(), dtype=jax_dtype(tensor.dtype))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return a copy, independent of the tensor, as an array of jax."""
    return jnp.asarray(to_numpy(tensor))


def to_torch(array: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, of the dtype of `like`."""
    values = np.asarray(array)
    if like.dtype in _NARROW:
        values = values.astype(np.float32)
    return torch.from_numpy(np.array(values)).to(like.dtype)


def plain_tree(out: Any, where: str) -> Any:
    """Return a module's result as a tree of tensors and numbers; dataclasses become dicts.

    Raises:
      ValueError: a type that jax cannot return.
    """
    if out is None or isinstance(out, torch.Tensor | bool | int | float | complex):
        return out
    if isinstance(out, Mapping):
        return {name: plain_tree(x, f"{where}[{name!r}]") for name, x in out.items()}
    if isinstance(out, tuple | list):
        items = [plain_tree(x, f"{where}[{i}]") for i, x in enumerate(out)]
        if hasattr(out, "_fields"):
            return type(out)(*items)
        return items if isinstance(out, list) else tuple(items)  # not torch.return_types, a leaf
    if is_dataclass(out) and not isinstance(out, type):
        names = [field.name for field in fields(out)]
        return {name: plain_tree(getattr(out, name), f"{where}.{name}") for name in names}
    raise ValueError(
        f"{where} must be tensors and numbers, in dicts, lists, tuples or dataclasses, got a "
        f"{type(out).__name__}."
    )
