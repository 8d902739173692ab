"""A stream of samples that the main process reads and distributes over devices in turn."""

import multiprocessing as mp
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.utils.data

from .checks import as_count
from .errors import describe
from .tensors import dumps, loads


class EndOfData(NamedTuple):
    """The message after the last sample: the reason why there are no more."""

    message: str
    traceback: str | None = None


class DataError(RuntimeError):
    """A device needs a sample and there is none; the message says why."""

    def __init__(self, end: EndOfData):
        super().__init__(end.message)
        self.end = end


class DeviceQueue(torch.utils.data.IterableDataset):
    """The samples of one device, in the process that drives it, read ahead from the first one."""

    def __init__(self, prefetch: int, read: Callable[[], None]):
        super().__init__()
        self.samples: queue.Queue = queue.Queue(prefetch)
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        """Yield samples; raise `DataError` if there are no more."""
        while True:
            self._read()
            sample = self.samples.get()
            if isinstance(sample, EndOfData):
                self.samples.put(sample)  # for the next iterator
                raise DataError(sample)
            yield sample


class SampleReader:
    """A reader of `dataset` in the main process that distributes samples over the devices.

    Sample i goes to device i % nprocs. The dataset is iterated once, by a daemon thread of the
    process that starts it. Samples are sent pickled through one pipe per device, in order, and are
    read ahead in the process that drives the device: this process, a fork of it, or one fork per
    device. The end of the data, or an exception, is sent after the last sample, and is raised by
    the step that lacks a sample, not earlier.

    Args:
      dataset: any iterable of samples that can be pickled; it needs no index and no length.
      nprocs: number of devices; None if only the process that drives all of them knows it, which
        then sets it before its first sample.
      master_prefetch: number of samples per device to read ahead.
      start: whether to begin to read now; otherwise call `start()`, after the fork of the devices'
        process.

    Raises:
      ValueError: `dataset` is not iterable, or a number is below 1; the text names the argument.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        nprocs: int | None = None,
        master_prefetch: int = 16,
        *,
        start: bool = True,
    ):
        if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
            raise ValueError(f"`dataset` must be iterable, got {type(dataset).__name__}.")
        as_count("prefetch", master_prefetch)
        if nprocs is not None:
            as_count("nprocs", nprocs)
        self.dataset, self.nprocs, self.master_prefetch = dataset, nprocs, master_prefetch
        self._owner = os.getpid()
        # One pipe for all if the number of devices is not known yet.
        pipes = [mp.Pipe(duplex=False) for _ in range(nprocs or 1)]
        self._receivers, self._senders = map(list, zip(*pipes, strict=True))
        self._loader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._device_queues: list[DeviceQueue] | None = None
        self._readers: dict[int, threading.Thread] = {}
        if start:
            self.start()

    def start(self) -> None:
        """Begin to read the dataset, in the calling process."""
        if self._loader is None:
            self._loader = threading.Thread(
                target=_send_samples,
                args=(self.dataset, self._senders),
                name="TPUManager-loader",
                daemon=True,  # a dataset that waits for ever must not keep the program alive
            )
            self._loader.start()

    def release_receivers(self) -> None:
        """Close the receiving ends in the process that reads, if devices are in another process.

        Only then the end of the device process breaks the pipes, which ends the loader thread.
        """
        for receiver in self._receivers:
            receiver.close()

    def is_loading(self) -> bool:
        """Return whether the loader thread is alive."""
        return self._loader is not None and self._loader.is_alive()

    def stop(self, timeout: float = 0.3) -> None:
        """Wait for the loader thread, which ends after the devices' process.

        If the dataset does not return in time, the thread ends when the dataset does return.
        """
        if self._loader is not None:
            self._loader.join(timeout)
        if not self.is_loading():
            for sender in self._senders:
                sender.close()

    @property
    def device_queues(self) -> list[DeviceQueue]:
        """The queues of samples, one per device, for the processes that drive the devices."""
        with self._lock:
            if self._device_queues is None:
                if self.nprocs is None:
                    raise ValueError("`nprocs` is not known yet: set it before asking for samples.")
                self._device_queues = [
                    DeviceQueue(self.master_prefetch, partial(self._read, index))
                    for index in range(self.nprocs)
                ]
            return self._device_queues

    def _read(self, index: int) -> None:
        """Start a thread of this process that reads the samples of device `index`."""
        queues = self.device_queues
        with self._lock:
            if not self._readers and os.getpid() != self._owner:
                for sender in self._senders:  # pipes then break when the reading process ends
                    sender.close()
            alone = len(self._receivers) > 1
            number, readers_of = (index, [queues[index]]) if alone else (0, queues)
            if number not in self._readers:
                self._readers[number] = threading.Thread(
                    target=_deal_samples,
                    args=(self._receivers[number], readers_of),
                    name=f"TPUManager-reader-{number}",
                    daemon=True,
                )
                self._readers[number].start()

    def get_batches(self, index: int, *, num_workers: int = 0, **kwargs: Any) -> Iterator[Any]:
        """Return an endless iterator of batches on the host, for one device.

        Args:
          index: number of the device, 0 <= index < nprocs.
          num_workers: must be 0, since a thread of this process reads the samples.
          **kwargs: further arguments of `torch.utils.data.DataLoader`: `batch_size` is the number
            of samples per batch, 1 by default, None for samples without batching; `collate_fn` the
            function from samples to a batch.

        Raises:
          DataError: from the iterator, if there are no more samples.
          ValueError: `num_workers` is not 0, or `index` is not that of a device.
        """
        if num_workers != 0:
            raise ValueError(
                f"`num_workers` must be 0, got {num_workers}: a thread of this process reads the "
                "samples; load in the dataset instead."
            )
        if not 0 <= index < len(self.device_queues):
            raise ValueError(
                f"`index` must be one of the {len(self.device_queues)} devices, got {index}."
            )
        self._read(index)  # begin to read before the first batch is requested
        return iter(torch.utils.data.DataLoader(self.device_queues[index], **kwargs))


def _send_samples(dataset: Iterable[Any], senders: list[Connection]) -> None:
    count = 0
    try:
        iterator = iter(dataset)
        while True:
            data = dumps(next(iterator))
            if not _send(senders[count % len(senders)], data):
                return
            count += 1
    except StopIteration:
        end = EndOfData(f"The dataset ended after {count} samples.")
    except BaseException as error:
        message = f"The dataset failed at sample {count}: {describe(error)}"
        end = EndOfData(message, traceback.format_exc())
    for sender in senders:
        _send(sender, dumps(end))


def _send(sender: Connection, data: bytes) -> bool:
    """Send to a pipe; return whether its other end is open."""
    try:
        sender.send_bytes(data)
    except OSError:
        return False
    return True


def _deal_samples(receiver: Connection, queues: list[DeviceQueue]) -> None:
    end = EndOfData("The process that reads the dataset is gone.")
    count = 0
    try:
        while True:
            sample = loads(receiver.recv_bytes())
            if isinstance(sample, EndOfData):
                end = sample
                break
            queues[count % len(queues)].samples.put(sample)
            count += 1
    except (EOFError, OSError):
        pass
    except BaseException as error:
        message = f"Sample {count} of the device could not be read: {describe(error)}"
        end = EndOfData(message, traceback.format_exc())
    for device_queue in queues:
        # A full queue of one device must not keep the message from the others.
        threading.Thread(target=device_queue.samples.put, args=(end,), daemon=True).start()
