"""Separate traced graphs on an XLA device, for work that must not be fused with other work.

On other devices torch computes eagerly, and these functions are plain torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Pairs of a tensor to write and its new value.
Writes = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def own_graph(device: torch.device) -> Iterator[Writes]:
    """Run the block as a separate graph: what was traced before, and the block, are launched.

    Inside of `torch_xla.compile(full_graph=True)`, which forbids separate graphs, the block becomes
    a part of the graph that is traced there.

    Yields:
      A list of (tensor, new value): fill it with what to write after the block. The block itself
      must not write into existing tensors.
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
    """Write each tensor's new value, without a gradient."""
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def write_between_passes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write as `write` does, and let graphs of earlier forward passes still be differentiated.

    Autograd refuses a graph if a tensor that it has saved was written since. The caller guarantees
    that derivatives are right: by DDP's rule for buffers, or since values return before the pass.
    """
    writes = [*pairs]
    targets = tuple(target for target, _ in writes)
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(targets):
        write(writes)


def launch(device: torch.device) -> None:
    """Launch what an XLA device has traced so far, unless a caller forbids it."""
    if device.type == "xla" and _runtime().may_launch():
        _runtime().run_pending(device)


def device_data(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `values` as a vector on the device that no graph holds as a constant."""
    return to_device([torch.tensor(values, dtype=dtype)], device)[0]


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors of the host on `device`."""
    if device.type == "xla":
        return _runtime().to_device(tensors, device)
    return [tensor.detach().to(device) for tensor in tensors]


@contextmanager
def driving(device: torch.device) -> Iterator[None]:
    """Bind the thread, one of autograd's, to an XLA device within the block."""
    if device.type != "xla":
        yield
        return
    import torch_xla

    previous = torch_xla.device()
    _runtime().bind(device)
    try:
        yield
    finally:
        _runtime().bind(previous)


def _runtime() -> Any:
    """Return the module that drives XLA devices; imported late, since it needs torch_xla."""
    from .. import runtime

    return runtime
