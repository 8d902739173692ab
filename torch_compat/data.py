"""One stream of samples, read in the main process, dealt out to the devices in turn."""

import multiprocessing as mp
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.utils.data
import torch_xla
import torch_xla.runtime as xr

from . import runtime, samples


class EndOfData(NamedTuple):
    """What follows the last sample: why there are no more."""

    message: str
    traceback: str | None = None


class DataError(RuntimeError):
    """A device needs a sample and there is none; its message says why."""

    def __init__(self, end: EndOfData):
        super().__init__(end.message)
        self.end = end


class QueueDataset(torch.utils.data.IterableDataset):
    """A dataset that ceaselessly iterates over a queue.

    Args:
        queue: anything with `get()`. An `EndOfData` in it ends the iteration with a `DataError`,
            for whoever asks for a sample from then on.
    """

    def __init__(self, queue: Any):
        super().__init__()
        self.queue = queue

    def __iter__(self) -> Iterator[Any]:
        while True:
            sample = self.queue.get()
            if isinstance(sample, EndOfData):
                self.queue.put(sample)  # the next one to ask learns it too
                raise DataError(sample)
            yield sample


class TPUDataManager:
    """Reads `dataset` in the main process and deals its samples out to the devices.

    Sample i goes to device i % nprocs. The dataset is iterated once, by a daemon thread of the
    process that called `start`; samples travel pickled through one pipe, in order. In the process
    that drives the devices a thread puts them into one queue per device. What ends the data, its
    last sample or an exception, travels behind the samples before it and is raised by the step that
    lacks a sample, not earlier.

    Args:
        dataset: any iterable of samples that can be pickled; never indexed, never asked its length.
        nprocs: number of devices; None where it is known only to the process that drives them,
            which sets it before its first `get_device_dataloader`.
        master_prefetch: samples per device read ahead of the step that needs them.
    """

    def __init__(
        self, dataset: Iterable[Any], nprocs: int | None = None, master_prefetch: int = 16
    ):
        if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
            raise ValueError(f"`dataset` must be iterable, got {type(dataset).__name__}.")
        if master_prefetch < 1:
            raise ValueError(
                f"`prefetch` counts samples per device and must be >= 1, got {master_prefetch}."
            )
        self.dataset, self.nprocs, self.master_prefetch = dataset, nprocs, master_prefetch
        self._owner = os.getpid()
        self._receiver, self._sender = mp.Pipe(duplex=False)
        self._loader: threading.Thread | None = None
        self._dealer: threading.Thread | None = None
        self._device_queues: list[queue.Queue] | None = None

    def start(self) -> None:
        """Begin to read the dataset, in the calling process; after the devices' process forked."""
        if self._loader is None:
            self._loader = threading.Thread(
                target=_send_samples,
                args=(self.dataset, self._sender),
                name="TPUDataManager-loader",
                daemon=True,  # a dataset that waits for ever must not keep the program alive
            )
            self._loader.start()

    def release_receiver(self) -> None:
        """In the process that reads the dataset, if the devices live in another.

        Only then does a dead device process break the pipe, and with it end the loader thread.
        """
        self._receiver.close()

    def is_loading(self) -> bool:
        """Whether the loader thread is alive."""
        return self._loader is not None and self._loader.is_alive()

    def stop(self, timeout: float = 0.3) -> None:
        """After the devices' process has ended: wait for the loader thread, which then ends too.

        Unless it is inside the dataset and does not come back in time; it ends when it does.
        """
        if self._loader is not None:
            self._loader.join(timeout)
        if not self.is_loading():
            self._sender.close()

    @property
    def device_queues(self) -> list[queue.Queue]:
        """One queue of samples per device, in the process that drives the devices."""
        if self._device_queues is None:
            if self.nprocs is None:
                raise ValueError("`nprocs` is not known yet: set it before asking for samples.")
            if os.getpid() == self._owner:
                self.start()
            else:
                self._sender.close()
            self._device_queues = [queue.Queue(self.master_prefetch) for _ in range(self.nprocs)]
            self._dealer = threading.Thread(
                target=_deal_samples,
                args=(self._receiver, self._device_queues),
                name="TPUDataManager-dealer",
                daemon=True,
            )
            self._dealer.start()
        return self._device_queues

    def get_device_dataloader(
        self,
        *,
        index: int | None = None,
        device: torch.device | None = None,
        batch_size: int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Endless batches for one device, on that device.

        Args:
            index: the device's number among the nprocs; None: the calling thread's ordinal.
            device: None: the calling thread's default device.
            batch_size: samples per batch; None for samples as they are.
            collate_fn: as in `torch.utils.data.DataLoader`.
            **kwargs: further arguments of `torch.utils.data.DataLoader`.

        Raises:
            DataError: from the iterator, where the dataset lacks a sample.
        """
        index = xr.global_ordinal() if index is None else index
        loader = torch.utils.data.DataLoader(
            QueueDataset(self.device_queues[index]),
            batch_size=batch_size,
            collate_fn=collate_fn,
            **kwargs,
        )
        return _on_device(loader, torch_xla.device() if device is None else device)


def _send_samples(dataset: Iterable[Any], sender: Connection) -> None:
    count = 0
    try:
        iterator = iter(dataset)
    except BaseException as error:
        _send(sender, samples.dumps(_failed_at(count, error)))
        return
    while True:
        try:
            data = samples.dumps(next(iterator))
        except StopIteration:
            _send(sender, samples.dumps(EndOfData(f"The dataset ended after {count} samples.")))
            return
        except BaseException as error:
            _send(sender, samples.dumps(_failed_at(count, error)))
            return
        if not _send(sender, data):
            return
        count += 1


def _failed_at(count: int, error: BaseException) -> EndOfData:
    return EndOfData(f"The dataset failed at sample {count}: {error!r}", traceback.format_exc())


def _send(sender: Connection, data: bytes) -> bool:
    """Whether somebody is left to read."""
    try:
        sender.send_bytes(data)
    except OSError:
        return False
    return True


def _deal_samples(receiver: Connection, device_queues: list[queue.Queue]) -> None:
    end = EndOfData("The process that reads the dataset is gone.")
    count = 0
    try:
        while True:
            sample = samples.loads(receiver.recv_bytes())
            if isinstance(sample, EndOfData):
                end = sample
                break
            device_queues[count % len(device_queues)].put(sample)
            count += 1
    except (EOFError, OSError):
        pass
    except BaseException as error:
        end = EndOfData(f"Sample {count} could not be read: {error!r}", traceback.format_exc())
    for device_queue in device_queues:
        # A device that has stopped asking must not keep the others from learning it.
        threading.Thread(target=device_queue.put, args=(end,), daemon=True).start()


def _on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield send_to_device(batch, device)


def send_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its CPU tensors on `device`, in one transfer.

    Mappings (as dicts), tuples, named tuples and lists are searched for tensors; what is neither
    stays as it is.
    """
    tensors: list[torch.Tensor] = []
    _map_tensors(batch, lambda tensor: tensors.append(tensor))
    moved = iter(runtime.to_device(tensors, device))
    return _map_tensors(batch, lambda _: next(moved))


def _map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if hasattr(tree, "items"):  # dicts, and such as the BatchEncoding of transformers
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(value, function) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, function) for value in tree)
    return tree
