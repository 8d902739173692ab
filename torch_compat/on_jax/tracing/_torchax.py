"""torchax, imported so that plain torch in the same process stays as it was."""

import os

try:
    import jax  # noqa: F401
    import torch

    _TELEMETRY = os.environ.get("ENABLE_RUNTIME_UPTIME_TELEMETRY")
    # torchax switches torch's fused inference of attention off for the whole process.
    _FAST_ATTENTION = torch.backends.mha.get_fastpath_enabled()
    import torchax.tensor as torchax_tensor
    import torchax.view as torchax_view
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("jax", "jaxlib", "torch", "torchax"):
        raise
    raise ModuleNotFoundError(
        f"torch_compat.on_jax needs {missing}, which is not installed; the extra `torchax` has "
        "it: pip install 'jaxslowmo[torchax]' (in a checkout: '.[torchax]')",
        name=missing,
    ) from error

torch.backends.mha.set_fastpath_enabled(_FAST_ATTENTION)
if _TELEMETRY is None:  # set by torchax, of a process that need not use it
    os.environ.pop("ENABLE_RUNTIME_UPTIME_TELEMETRY", None)

Environment = torchax_tensor.Environment
OperatorNotFound = torchax_tensor.OperatorNotFound
Tensor = torchax_tensor.Tensor
View = torchax_view.View
