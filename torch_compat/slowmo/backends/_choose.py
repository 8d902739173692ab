"""The choice of the backend of a wrapper."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ._base import Backend

BACKENDS = ("torch_xla", "torch.distributed")


def choose(name: str | None, module: torch.nn.Module, groups: dict[str, Any]) -> Backend:
    """Return the backend of that name; None chooses one.

    The choice is torch_xla for a module on an XLA device; otherwise `torch.distributed` if its
    default process group is initialised and not torch_xla's own; otherwise torch_xla.

    Args:
      name: one of `BACKENDS`, or None.
      module: module whose device decides without a name.
      groups: arguments of the constructor that only `torch.distributed` uses.

    Raises:
      ValueError: another name, or groups that `DistributedBackend` refuses.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
    """
    if name not in (None, *BACKENDS):
        names = " or ".join(map(repr, BACKENDS))
        raise ValueError(f"`backend` must be None or {names}, got {name!r}.")
    on_xla = any(param.device.type == "xla" for param in module.parameters())
    if name is None:
        ready = dist.is_available() and dist.is_initialized() and dist.get_backend() != "xla"
        name = "torch.distributed" if ready and not on_xla else "torch_xla"
        if name == "torch_xla" and find_spec("torch_xla") is None:
            raise RuntimeError(
                "SlowMoDistributedDataParallel finds neither torch_xla nor an initialised "
                "torch.distributed: call torch.distributed.init_process_group() first, in a "
                "program that torchrun or torch.multiprocessing starts, or install torch_xla."
            )
    if name == "torch_xla":
        # Without torch_xla this import raises an error that names the extra to install.
        from ._xla import XlaBackend

        return XlaBackend()
    from ._distributed import DistributedBackend

    return DistributedBackend(**groups)
