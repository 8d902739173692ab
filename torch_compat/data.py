"""The samples of a `SampleReader` on XLA devices."""

from collections.abc import Iterator
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from . import runtime
from .batches import map_tensors
from .reader import SampleReader


class TPUDataManager(SampleReader):
    """A reader of `dataset` in the main process that distributes samples over XLA devices.

    Args:
      dataset: any iterable of samples that can be pickled; sample i goes to device i % nprocs.
      nprocs: number of devices; None if only the process that drives all of them knows it, which
        then sets it before its first sample.
      master_prefetch: number of samples per device to read ahead.
      start: whether to begin to read now; otherwise call `start()`, after the fork of the devices'
        process.

    Raises:
      ValueError: `dataset` is not iterable, or a number is below 1; the text names the argument.
    """

    def get_device_dataloader(
        self,
        *,
        index: int | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Return an endless iterator of batches on one device, for that device.

        Args:
          index: number of the device, 0 <= index < nprocs; None: the calling thread's ordinal.
          device: device of the batches; None: the calling thread's default device.
          **kwargs: arguments of `torch.utils.data.DataLoader`. `batch_size` is the number of
            samples per batch, 1 by default, None for samples without batching; `collate_fn` is the
            function from samples to a batch; `num_workers` must be 0, since a thread of this
            process reads the samples.

        Raises:
          DataError: from the iterator, if there are no more samples.
          ValueError: `num_workers` is not 0, or `index` is not that of a device.
        """
        batches = self.get_batches(xr.global_ordinal() if index is None else index, **kwargs)
        device = torch_xla.device() if device is None else device
        return (send_to_device(batch, device) for batch in batches)


def send_to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its CPU tensors on `device`, moved in one transfer."""
    tensors: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: tensors.append(tensor))
    on_device = iter(runtime.to_device(tensors, device))
    return map_tensors(batch, lambda _: next(on_device))
