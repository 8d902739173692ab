"""The import of torchax, such that plain torch in the same process does not change."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ...errors import not_installed

try:
    import jax
    import jax.numpy as jnp
    import torch

    @contextlib.contextmanager
    def _spare_backend_unnamed() -> Iterator[None]:
        """Keep torchax from naming torch's spare backend "jax".

        The name cannot be undone, and torch then requests an accelerator from this backend, which
        has none: `DataLoader(pin_memory=True)`, `torch.compile` and `init_process_group()` fail.
        """
        utils: Any = torch.utils
        module: Any = torch
        rename, register = utils.rename_privateuse1_backend, module._register_device_module
        utils.rename_privateuse1_backend = lambda name: None
        # torch looks this module up for tensors of the backend, by the backend's current name.
        module._register_device_module = lambda name, of: register("privateuseone", of)
        try:
            yield
        finally:
            utils.rename_privateuse1_backend, module._register_device_module = rename, register

    _TELEMETRY = os.environ.get("ENABLE_RUNTIME_UPTIME_TELEMETRY")
    # torchax disables torch's fused inference of attention for the whole process.
    _FAST_ATTENTION = torch.backends.mha.get_fastpath_enabled()
    with _spare_backend_unnamed():
        import torchax.tensor as torchax_tensor
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("jax", "jaxlib", "torch", "torchax"):
        raise
    raise not_installed(missing, "torchax", "torch_compat.on_jax") from error

torch.backends.mha.set_fastpath_enabled(_FAST_ATTENTION)
if _TELEMETRY is None:  # torchax sets it at import
    os.environ.pop("ENABLE_RUNTIME_UPTIME_TELEMETRY", None)

from ._internals import spare_device  # noqa: E402

torchax_tensor.Tensor.device = property(lambda tensor: spare_device)  # pyright: ignore

Environment = torchax_tensor.Environment
OperatorNotFound = torchax_tensor.OperatorNotFound
Tensor = torchax_tensor.Tensor


def torch_dtype(array: jax.Array) -> torch.dtype:
    """Return torch's dtype of an array; int64 for int32 where jax has no 64 bits.

    torch requires 64 bits of labels and indices.
    """
    if array.dtype == jnp.int32 == jax.dtypes.canonicalize_dtype(jnp.int64):
        return torch.int64
    return torchax_tensor.mappings.j2t_dtype(array.dtype)
