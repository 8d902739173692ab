"""Equal parameters at the start: broadcast from rank 0, or checked."""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ._collectives import Collectives, broadcast
from ._graphs import device_data, launch
from ._places import Places
from .backends import Kind, choose

# Elements per step; their int64 intermediate values take 8 bytes each.
_CHUNK = 2**22
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that multiplying by it is invertible modulo 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def broadcast_parameters(
    module: torch.nn.Module, *, global_group: Any = None, backend: str | None = None
) -> None:
    """Give all processes rank 0's parameters and buffers; call it in all of them.

    It does what torch_xla's `xm.broadcast_master_param` does, which aborts several CPU devices.

    Args:
      module: module on the device of this process; shapes and dtypes are equal in all processes.
      global_group: process group of `torch.distributed` with the processes; None for all.
      backend: name of the backend, see `SlowMoDistributedDataParallel`.

    Raises:
      ValueError: a module without parameters, or on several devices; an unknown backend.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
      PeerLostError: another process has ended.

    Communication: one all-reduce of the bytes of parameters and buffers per dtype; nothing with one
      process.
    """
    if not isinstance(module, torch.nn.Module) or not any(True for _ in module.parameters()):
        raise ValueError(f"`module` must be a torch.nn.Module with parameters, got {module!r}.")
    connection = choose(backend, module, {"global_group": global_group})
    device = connection.device_of(module)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.numel()]
    collectives = Collectives(Places(connection.rank, connection.world_size), connection)
    broadcast(tensors, collectives, device, Kind.PARAMETERS)


def check_equal(
    params: Mapping[str, torch.Tensor],
    chosen: Collection[str],
    collectives: Collectives,
    device: torch.device,
    *,
    values: bool,
) -> None:
    """Raise `ValueError` unless all processes hold the same parameters; call it in all of them.

    Args:
      params: parameters, by name.
      chosen: names of those that are exchanged, or that the optimizers hold.
      collectives: collectives of this process.
      device: device of `params`.
      values: whether to compare the bits of the parameters, beside their names and what is chosen.

    Raises:
      ValueError: in all processes; it names the processes that differ from process 0, and the
        parameters.

    Communication: one all-gather of 16 bytes per process; if they differ, another of 8 bytes per
      parameter and process. With `values` parameters on XLA devices are copied to the host once.
    """
    if values:
        launch(device)  # otherwise reading a parameter would launch a separate graph
    texts = [f"{name} {tuple(p.shape)} {name in chosen}" for name, p in params.items()]
    prints = torch.tensor([zlib.crc32(text.encode()) for text in texts], dtype=torch.int64)
    if values:
        prints = prints + torch.stack([fingerprint(p).cpu() for p in params.values()])
    summary = [int(fingerprint(prints)), len(params)]
    totals = _gathered(summary, collectives, device)
    unequal = [rank for rank, total in enumerate(totals) if not torch.equal(total, totals[0])]
    if not unequal:
        return
    which = "their number is not the same"
    if all(total[1] == totals[0][1] for total in totals):
        rows = _gathered(prints.tolist(), collectives, device)
        names = [name for name, row in zip(params, rows.T, strict=True) if (row != row[0]).any()]
        which = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    lists = f"processes {', '.join(map(str, unequal))} of {len(totals)} do not have ({which})"
    if values:
        raise ValueError(
            f"`module` must start with equal parameters in all processes, which {lists}. Load the "
            "same, seed alike before the module is made, or pass broadcast_parameters=True; with "
            "check_start=False they may differ."
        )
    raise ValueError(
        "`module` must train the same parameters in all processes (their names, shapes, "
        f"requires_grad, and whether an optimizer holds them), which {lists}."
    )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number () int64 that changes with any bit; equal on every kind of device."""
    # torch_xla has no view of a number's bits, and would copy and compile for every operation.
    value = tensor.detach().cpu() if tensor.device.type == "xla" else tensor.detach()
    bits = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    bits = bits if bits.dtype == torch.int64 else bits.view(_INTEGERS[bits.element_size()])
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=value.device)
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + len(part), device=part.device)
        # Sums of integers modulo 2**64 do not depend on their order.
        total = total + (part * (2 * places + 1) * _FACTOR).sum()
    return total


def _gathered(numbers: list[int], collectives: Collectives, device: torch.device) -> torch.Tensor:
    """Return `numbers` of every process, (world_size, len(numbers))."""
    value = device_data(numbers, torch.int64, device)
    with collectives.graph(device, Kind.START, [value]):
        rows = collectives.gather(value)
    return rows.cpu().reshape(collectives.places.world_size, -1)
