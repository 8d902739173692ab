"""The process that a test's function runs in, whatever connects it to the others."""

import torch
import torch.distributed as dist


def by_gloo() -> bool:
    return dist.is_initialized()


def device() -> torch.device:
    if by_gloo():
        return torch.device("cpu")
    import torch_xla

    return torch_xla.device()


def rank() -> int:
    if by_gloo():
        return dist.get_rank()
    import torch_xla.runtime as xr

    return xr.global_ordinal()


def world() -> int:
    if by_gloo():
        return dist.get_world_size()
    import torch_xla.runtime as xr

    return xr.world_size()


def launch() -> None:
    """What scripts on XLA devices call after every step."""
    if not by_gloo():
        from torch_compat import runtime

        runtime.run_pending()
