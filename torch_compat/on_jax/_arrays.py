"""Tensors of torch as arrays of jax, and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .tracing import Tensor

# NumPy has no name for these in torch; float32 holds each of their values.
_NARROW = {
    torch.bfloat16: jnp.bfloat16,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}
_PLAIN = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}


def jax_dtype(dtype: torch.dtype) -> np.dtype | None:
    """The dtype of jax for one of torch, as wide as jax now allows; None where it has none."""
    found = _NARROW.get(dtype) or _PLAIN.get(dtype)
    return None if found is None else np.dtype(jax.dtypes.canonicalize_dtype(found))


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether an array of jax holds the tensor's numbers: 64 bits may have become 32."""
    dtype = jax_dtype(tensor.dtype)
    if dtype is None or dtype.itemsize == tensor.element_size():
        return dtype is not None
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    limits = np.iinfo(dtype)
    return tensor.numel() == 0 or bool((tensor.min() >= limits.min) & (tensor.max() <= limits.max))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy, which later changes of the tensor do not reach, of the dtype that jax has for it."""
    tensor = tensor.detach().cpu()
    values = tensor.float() if tensor.dtype in _NARROW else tensor
    return np.array(values.numpy(), dtype=jax_dtype(tensor.dtype))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy, which later changes of the tensor do not reach."""
    return jnp.asarray(to_numpy(tensor))


def to_torch(array: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, of the dtype of `like`."""
    values = np.asarray(array)
    if like.dtype in _NARROW:
        values = values.astype(np.float32)
    return torch.from_numpy(np.array(values)).to(like.dtype)


def as_traced(env: Any, tree: Any) -> Any:
    """A tree of jax with tensors in place of arrays; other leaves stay."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return Tensor(jnp.asarray(x), env)

    return jax.tree.map(one, tree)


def as_arrays(env: Any, out: Any, where: str) -> Any:
    """What a module returned, with arrays in place of tensors; dataclasses become dicts.

    Raises:
      ValueError: a type that jax would not return.
    """
    if isinstance(out, torch.Tensor):
        return env.constant(out).jax()
    if out is None or isinstance(out, bool | int | float | complex):
        return out
    if isinstance(out, Mapping):
        return {name: as_arrays(env, x, f"{where}[{name!r}]") for name, x in out.items()}
    if isinstance(out, tuple | list):
        items = [as_arrays(env, x, f"{where}[{i}]") for i, x in enumerate(out)]
        return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)
    if is_dataclass(out) and not isinstance(out, type):
        names = [field.name for field in fields(out)]
        return {name: as_arrays(env, getattr(out, name), f"{where}.{name}") for name in names}
    raise ValueError(
        f"{where} is a {type(out).__name__}, of which jax returns none: tensors, numbers and None, "
        "in dicts, lists, tuples and dataclasses, are possible."
    )
