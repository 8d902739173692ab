"""Whether the processes start from the same parameters."""

from collections.abc import Mapping

import torch

from ._collectives import Collectives
from ._graphs import own_graph

# Elements of one step where torch computes at once: its numbers of the positions take 8 bytes each.
_CHUNK = 2**22
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that a product with it loses nothing modulo 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal(
    params: Mapping[str, torch.Tensor], collectives: Collectives, device: torch.device
) -> None:
    """All processes hold the same bits; to be called in all.

    Args:
      params: by name.
      collectives: of this process.
      device: where `params` are.

    Raises:
      ValueError: in all processes alike; it names the processes that differ from process 0, and the
        parameters.

    Communication: one all-gather of 16 bytes per process; where they differ, another of 8 bytes per
      parameter and process.
    """
    tensors = list(params.values())
    with own_graph(device):
        prints = torch.stack([fingerprint(tensor) for tensor in tensors])
        own = torch.stack([fingerprint(prints), torch.full_like(prints[0], len(tensors))])
    totals = _gathered(own, collectives, device)
    unequal = [rank for rank, total in enumerate(totals) if not torch.equal(total, totals[0])]
    if not unequal:
        return
    which = "their number is not the same"
    if all(total[1] == totals[0][1] for total in totals):
        rows = _gathered(prints, collectives, device)
        names = [name for name, row in zip(params, rows.T, strict=True) if (row != row[0]).any()]
        which = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    raise ValueError(
        "`module` must start with equal parameters in all processes, which processes "
        f"{', '.join(map(str, unequal))} of {len(totals)} do not have ({which}). Load the same, "
        "seed alike before the module is made, or pass broadcast_parameters=True; with "
        "check_start=False they may differ."
    )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number () int64 that other bits at any place change; the same on every kind of device."""
    value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = value.detach().reshape(-1)
    bits = bits if bits.dtype == torch.int64 else bits.view(_INTEGERS[bits.element_size()])
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    size = max(len(bits), 1) if tensor.device.type == "xla" else _CHUNK
    for begin in range(0, len(bits), size):
        part = bits[begin : begin + size].to(torch.int64)
        places = torch.arange(begin, begin + len(part), device=part.device)
        # Sums of integers modulo 2**64 do not depend on their order.
        total = total + (part * (2 * places + 1) * _FACTOR).sum()
    return total


def _gathered(own: torch.Tensor, collectives: Collectives, device: torch.device) -> torch.Tensor:
    with collectives.graph(device):
        rows = collectives.gather(own)
    return rows.cpu().reshape(collectives.places.world_size, -1)
