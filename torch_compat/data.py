"""The samples of a `SampleReader` on XLA devices."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from . import runtime
from .batches import map_tensors
from .reader import SampleReader


class TPUDataManager(SampleReader):
    """A `SampleReader` whose batches go to XLA devices.

    Its arguments and errors are those of `SampleReader`.
    """

    def get_device_dataloader(
        self,
        *,
        index: int | None = None,
        device: torch.device | None = None,
        batch_size: int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Endless batches for one device, on that device.

        Args:
          index: the device's number among the nprocs; None: the calling thread's ordinal.
          device: None: the calling thread's default device.
          batch_size: samples per batch; None for samples as they are.
          collate_fn: as in `torch.utils.data.DataLoader`.
          num_workers: 0, since samples are read by a thread of this process.
          **kwargs: further arguments of `torch.utils.data.DataLoader`.

        Raises:
          DataError: from the iterator, where the dataset lacks a sample.
          ValueError: for workers, and an index that is no device.
        """
        batches = self.get_batches(
            xr.global_ordinal() if index is None else index,
            batch_size=batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            **kwargs,
        )
        return _on_device(batches, torch_xla.device() if device is None else device)


def _on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield send_to_device(batch, device)


def send_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its CPU tensors on `device`, in one transfer; searched as by `map_tensors`."""
    tensors: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: tensors.append(tensor))
    moved = iter(runtime.to_device(tensors, device))
    return map_tensors(batch, lambda _: next(moved))
