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
    """Reads `dataset` in the main process and deals its samples out to XLA devices.

    Args:
      dataset: any iterable of samples that can be pickled; sample i goes to device i % nprocs.
      nprocs: number of devices; None where only the process that drives them all knows it, which
        sets it before its first sample.
      master_prefetch: samples per device read ahead of the step that needs them.
      start: begin to read now; else call `start()`, after the devices' process has been forked.

    Raises:
      ValueError: naming the argument, for what is not iterable and numbers below 1.
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
