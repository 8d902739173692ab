"""XLA devices in the device process of a `TPUManager`, each with a thread and a replica."""

import queue
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

from . import runtime
from .batches import call_model, loss_of
from .data import TPUDataManager
from .errors import describe
from .messages import Failed, Loaded, Step, StepDone, StepStatistics
from .reader import DataError
from .synchronizer import TPUSynchronizer
from .worker import GroupFailed, Link, WorkerOptions


@dataclass
class _Clock:
    """The seconds that one device spent waiting in the current step."""

    data: float = 0.0
    barrier: float = 0.0


@dataclass
class _Shared:
    """The barrier and queues that the threads of a group share."""

    barrier: threading.Barrier
    outcomes: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    commits: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def wait_to_commit(self) -> None:
        """Wait until the device that calls this may write into shared memory."""
        self.outcomes.put(_COMPUTED)
        self.commits.get()


_COMPUTED = object()  # an outcome: gradients are on the host, and a commit is needed


class DeviceGroup:
    """All devices of this process, each with a replica and a thread that drives it."""

    def __init__(
        self, synchronizer: TPUSynchronizer, data_manager: TPUDataManager, options: WorkerOptions
    ):
        self.devices = runtime.open_devices(options.nprocs)
        self.num_devices = data_manager.nprocs = len(self.devices)
        self._shared = _Shared(threading.Barrier(len(self.devices)))
        self._requests = [queue.SimpleQueue() for _ in self.devices]
        for index, device in enumerate(self.devices):
            worker = _DeviceWorker(index, device, self._shared, synchronizer, data_manager, options)
            threading.Thread(
                target=worker.run,
                args=(self._requests[index],),
                name=f"TPUManager-device-{index}",
                daemon=True,  # a thread that hangs in a device must not keep the process alive
            ).start()
            # One after the other: the host then needs temporary memory for one replica at a time.
            self._outcome()

    def step(self, request: Step, link: Link) -> StepDone:
        """Let all devices take a step; raise `GroupFailed` with the first failure."""
        begin, before = time.perf_counter(), _counters()
        for requests in self._requests:
            requests.put(request)
        if request.load_parameters:
            # First, since no device exchanges gradients before all have loaded parameters.
            for _ in self.devices:
                self._outcome()
            link.send(Loaded())
        parts = []
        while len(parts) < len(self.devices):
            outcome = self._outcome()
            if outcome is _COMPUTED:
                link.wait_to_commit()
                self._shared.commits.put(None)
            else:
                parts.append(outcome)
        loss, num_samples, clock = next(part for part in parts if part is not None)
        used = {key: value - before[key] for key, value in _counters().items()}
        statistics = StepStatistics(
            seconds=time.perf_counter() - begin,
            data_seconds=clock.data,
            barrier_seconds=clock.barrier,
            **used,
        )
        return StepDone(loss, num_samples, statistics)

    def _outcome(self) -> Any:
        outcome = self._shared.outcomes.get()
        if isinstance(outcome, Failed):
            raise GroupFailed(outcome)
        return outcome


class _DeviceWorker:
    """The thread of one device: its replica, its batches, its part of every step."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        shared: _Shared,
        synchronizer: TPUSynchronizer,
        data_manager: TPUDataManager,
        options: WorkerOptions,
    ):
        self.index, self.device, self.options = index, device, options
        self._shared, self._synchronizer, self._data_manager = shared, synchronizer, data_manager
        self._clock = _Clock()

    def run(self, requests: queue.SimpleQueue) -> None:
        """Take the requested steps until one fails."""
        try:
            with torch.enable_grad():
                self._replica, self._batches = self._initialise()
                self._shared.outcomes.put(None)
                while True:
                    self._shared.outcomes.put(self._step(requests.get()))
        except threading.BrokenBarrierError:
            return  # another device failed first, and has reported it
        except DataError as error:
            message = f"Device {self.index} of {self._shared.barrier.parties}: {error}"
            self._shared.outcomes.put(Failed(message, error.end.traceback))
        except BaseException as error:
            message = (
                f"Device {self.index} of {self._shared.barrier.parties} failed: {describe(error)}"
            )
            self._shared.outcomes.put(Failed(message, traceback.format_exc()))
        # The others wait at the barrier before every collective; this ends their wait.
        self._shared.barrier.abort()

    def _initialise(self) -> tuple[nn.Module, Iterator[Any]]:
        runtime.bind(self.device)
        torch_xla.manual_seed(self.options.seed_base + self.index, self.device)
        replica = self._synchronizer.get_device_model_replica(self.device)
        runtime.run_pending(self.device)
        double = any(p.dtype == torch.float64 for p in replica.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32
        batches = self._data_manager.get_device_dataloader(
            index=self.index,
            device=self.device,
            batch_size=self.options.batch_size_per_device,
            collate_fn=self.options.collate_fn,
        )
        return replica, batches

    def _step(self, request: Step) -> tuple[float, int, _Clock] | None:
        self._clock = _Clock()
        request.changes.apply(self._replica)
        if request.load_parameters:
            self._synchronizer.send_params_to_device(self._replica)
            runtime.run_pending(self.device)
            runtime.wait(self.device)  # the device reads the host's memory until then
            self._shared.outcomes.put(None)
        steps, devices = self.options.grad_accumulation_steps, self._shared.barrier.parties
        total = torch.zeros((), device=self.device, dtype=self._loss_dtype)
        runtime.run_pending(self.device)
        for _ in range(steps):
            begin = time.perf_counter()
            batch = next(self._batches)
            self._clock.data += time.perf_counter() - begin
            loss = loss_of(call_model(self._replica, batch)) / steps
            loss.backward()
            # In place, so that all microbatches trace the same graph.
            total += loss.detach()
            del batch, loss
            runtime.run_pending(self.device)
        begin = time.perf_counter()
        # A device that entered the collective alone could not be interrupted.
        self._shared.barrier.wait()
        self._clock.barrier += time.perf_counter() - begin
        losses = self._synchronizer.aggregate_grads_on_host(
            self._replica,
            add=True,
            scale=1.0 / devices,
            extra=[total],
            before_write=self._shared.wait_to_commit,
        )
        if self.index != 0:
            return None
        self._synchronizer.fetch_buffers(self._replica)
        samples = self.options.batch_size_per_device * devices * steps
        return float(losses[0]), samples, self._clock


def _counters() -> dict[Literal["compilations", "bytes_to_device", "bytes_to_host"], int]:
    def total(metric: str) -> int:
        data = met.metric_data(metric)
        return 0 if data is None else int(data[1])

    return {
        "compilations": int(met.counter_value("UncachedCompile") or 0),
        "bytes_to_device": total("OutboundData"),
        "bytes_to_host": total("InboundData"),
    }
