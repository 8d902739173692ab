"""Equal parameters at the start: broadcast from rank 0, or checked."""

from collections.abc import Collection, Mapping
from typing import Any
from zlib import crc32

import torch

from ._collectives import Collectives, broadcast
from ._graphs import device_data, launch
from ._options import check_has_parameters, choose_backend
from ._places import Places
from .backends import Kind


def broadcast_parameters(module: torch.nn.Module, *, global_group: Any = None) -> None:
    """Give all processes rank 0's parameters and buffers; call it in all of them.

    It does what torch_xla's `xm.broadcast_master_param` does, which aborts several CPU devices.

    Args:
      module: module on the device of this process; shapes and dtypes are equal in all processes.
      global_group: process group of `torch.distributed` with the processes; None for all.

    Raises:
      ValueError: a module without parameters, or on several devices.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
      PeerLostError: another process has ended.

    Communication: one all-reduce of the bytes of parameters and buffers per dtype; nothing with one
      process.
    """
    check_has_parameters(module)
    connection = choose_backend(module, global_group=global_group)
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
      parameter and process. With `values` parameters on devices are copied to the host once.
    """
    if values:
        launch(device)  # otherwise reading a parameter would launch a separate graph
    prints = []
    for name, param in params.items():
        text = f"{name} {tuple(param.shape)} {name in chosen}"
        prints.append(crc32(text.encode(), checksum(param) if values else 0))
    summary = [crc32(str(prints).encode()), len(params)]
    totals = _all_gather(summary, collectives, device, Kind.START)
    unequal = [rank for rank, total in enumerate(totals) if not torch.equal(total, totals[0])]
    if not unequal:
        return
    which = "their number is not the same"
    if all(total[1] == totals[0][1] for total in totals):
        names = _unequal(params, prints, collectives, device, Kind.START)
        which = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    lists = f"processes {', '.join(map(str, unequal))} of {len(totals)} do not have ({which})"
    if values:
        raise ValueError(
            f"`module` must start with equal parameters in all processes, which {lists}: call "
            "broadcast_parameters(module) first, or pass init_sync=False."
        )
    raise ValueError(
        "`module` must train the same parameters in all processes (their names, shapes, "
        f"requires_grad, and whether an optimizer holds them), which {lists}."
    )


def unequal(
    params: Mapping[str, torch.Tensor], collectives: Collectives, device: torch.device, kind: Kind
) -> list[str]:
    """Return the names of parameters whose bits differ between processes; call it in all of them.

    `kind` is that of the exchange which needs them, for messages.

    Communication: one all-gather of 8 bytes per parameter; nothing without parameters.
    """
    if not params or collectives.places.world_size == 1:
        return []
    launch(device)
    return _unequal(params, [*map(checksum, params.values())], collectives, device, kind)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number of 32 bits that changes with any bit of the elements, which the host reads.

    It is equal on every kind of device.
    """
    return crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _unequal(
    names: Collection[str],
    numbers: list[int],
    collectives: Collectives,
    device: torch.device,
    kind: Kind,
) -> list[str]:
    rows = _all_gather(numbers, collectives, device, kind)
    return [name for name, row in zip(names, rows.T, strict=True) if (row != row[0]).any()]


def _all_gather(
    numbers: list[int], collectives: Collectives, device: torch.device, kind: Kind
) -> torch.Tensor:
    """Return `numbers` of every process, (world_size, len(numbers))."""
    value = device_data(numbers, torch.int64, device)
    with collectives.graph(device, kind, [value]):
        rows = collectives.gather(value)
    return rows.cpu().reshape(collectives.places.world_size, -1)
