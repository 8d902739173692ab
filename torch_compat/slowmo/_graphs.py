"""Work on a device in steps that must not be mixed: graphs of their own on an XLA device.

Elsewhere torch computes at once, and all of this is plain torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# (tensor to be written, its new value)
Writes = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def own_graph(device: torch.device) -> Iterator[Writes]:
    """What is traced inside becomes a graph of its own; everything before and inside is launched.

    Inside of `torch_xla.compile(full_graph=True)`, which forbids that, it becomes a part of the
    graph that is traced there.

    Yields:
      A list, to be filled with what shall be written afterwards. Inside, nothing that exists may be
      written.
    """
    launch(device)
    with torch.no_grad():
        writes: Writes = []
        yield writes
        launch(device)
        if writes:
            write(writes)
            launch(device)


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each tensor becomes its new value, without a gradient."""
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def launch(device: torch.device) -> None:
    """Launch what an XLA device has traced so far, unless a caller forbids it."""
    if device.type == "xla" and _runtime().may_launch():
        _runtime().run_pending(device)


def device_data(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a vector on the device that no graph holds as a constant."""
    return moved([torch.tensor(values, dtype=dtype)], device)[0]


def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on `device`."""
    if device.type == "xla":
        return _runtime().to_device(tensors, device)
    return [tensor.detach().to(device) for tensor in tensors]


@contextmanager
def driving(device: torch.device) -> Iterator[None]:
    """A thread of autograd's drives an XLA device, and afterwards what it had before."""
    if device.type != "xla":
        yield
        return
    before = _runtime().bound()
    _runtime().bind(device)
    try:
        yield
    finally:
        _runtime().bind(before)


def _runtime() -> Any:
    """What drives XLA devices; loaded when there is one, since it needs torch_xla."""
    from .. import runtime

    return runtime
