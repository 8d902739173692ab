"""Which backend a wrapper uses."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ._base import Backend

BACKENDS = ("torch_xla", "torch.distributed")


def choose(name: str | None, module: torch.nn.Module, groups: dict[str, Any]) -> Backend:
    """The backend of that name; None is the one that fits.

    That is torch_xla for a module on an XLA device; otherwise `torch.distributed` where its default
    process group is there, and is not torch_xla's own; otherwise torch_xla.

    Args:
      name: one of `BACKENDS`, or None.
      module: whose device tells.
      groups: arguments of the constructor that mean something to `torch.distributed` alone.

    Raises:
      ValueError: another name, or what `DistributedBackend` refuses.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
    """
    if name not in (None, *BACKENDS):
        known = " or ".join(map(repr, BACKENDS))
        raise ValueError(f"`backend` must be None or {known}, got {name!r}.")
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
        # The error without torch_xla names the extra that has it.
        from ._xla import XlaBackend

        return XlaBackend()
    from ._distributed import DistributedBackend

    return DistributedBackend(**groups)
