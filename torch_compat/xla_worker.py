"""XLA devices in the device process of a `TPUManager`, each with a thread and a replica."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

from . import runtime
from .batches import call_model, loss_of
from .data import TPUDataManager
from .messages import Failed, Loaded, Step, StepDone, StepStatistics
from .synchronizer import TPUSynchronizer
from .worker import GroupFailed, Link, WorkerOptions, failure_of_device

_COMPUTED = object()  # an outcome: gradients are on the host, and a commit is needed


class DeviceGroup:
    """All devices of this process, each with a replica and a thread that drives it.

    Attributes:
      synchronizer: the master, which makes the replicas.
      data_manager: the reader of samples.
      options: the manager's arguments.
      num_devices: number of devices.
      barrier: the barrier before every collective.
      outcomes: queue of what the threads have done.
      commits: queue of permissions to write into shared memory.
    """

    def __init__(
        self, synchronizer: TPUSynchronizer, data_manager: TPUDataManager, options: WorkerOptions
    ):
        self.synchronizer, self.data_manager, self.options = synchronizer, data_manager, options
        devices = runtime.open_devices(options.nprocs)
        self.num_devices = data_manager.nprocs = len(devices)
        self.barrier = threading.Barrier(self.num_devices)
        self.outcomes, self.commits = queue.SimpleQueue(), queue.SimpleQueue()
        self._requests = [queue.SimpleQueue() for _ in devices]
        for index, device in enumerate(devices):
            worker = _DeviceWorker(index, device, self)
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
            for _ in self._requests:
                self._outcome()
            link.send(Loaded())
        parts = []
        while len(parts) < self.num_devices:
            outcome = self._outcome()
            if outcome is _COMPUTED:
                link.wait_to_commit()
                self.commits.put(None)
            else:
                parts.append(outcome)
        loss, data_seconds, barrier_seconds = next(part for part in parts if part is not None)
        used = {key: value - before[key] for key, value in _counters().items()}
        statistics = StepStatistics(
            seconds=time.perf_counter() - begin,
            data_seconds=data_seconds,
            barrier_seconds=barrier_seconds,
            **used,
        )
        return StepDone(loss, self.options.samples_per_step(self.num_devices), statistics)

    def _outcome(self) -> Any:
        outcome = self.outcomes.get()
        if isinstance(outcome, Failed):
            raise GroupFailed(outcome)
        return outcome


class _DeviceWorker:
    """The thread of one device: its replica, its batches, its part of every step."""

    def __init__(self, index: int, device: torch.device, group: DeviceGroup):
        self.index, self.device, self._group = index, device, group

    def run(self, requests: queue.SimpleQueue) -> None:
        """Take the requested steps until one fails."""
        group = self._group
        try:
            with torch.enable_grad():
                self._replica, self._batches = self._initialise()
                group.outcomes.put(None)
                while True:
                    group.outcomes.put(self._step(requests.get()))
        except threading.BrokenBarrierError:
            return  # another device failed first, and has reported it
        except BaseException as error:
            group.outcomes.put(failure_of_device(self.index, group.num_devices, error))
        # The others wait at the barrier before every collective; this ends their wait.
        group.barrier.abort()

    def _initialise(self) -> tuple[nn.Module, Iterator[Any]]:
        group, options = self._group, self._group.options
        runtime.bind(self.device)
        torch_xla.manual_seed(options.seed_base + self.index, self.device)
        replica = group.synchronizer.get_device_model_replica(self.device)
        runtime.run_pending(self.device)
        double = any(p.dtype == torch.float64 for p in replica.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32
        batches = group.data_manager.get_device_dataloader(
            index=self.index,
            device=self.device,
            batch_size=options.batch_size_per_device,
            collate_fn=options.collate_fn,
        )
        return replica, batches

    def _step(self, request: Step) -> tuple[float, float, float] | None:
        """Take a step; return the loss, and the seconds spent waiting for data and others."""
        group, steps = self._group, self._group.options.grad_accumulation_steps
        request.changes.apply(self._replica)
        if request.load_parameters:
            group.synchronizer.send_params_to_device(self._replica)
            runtime.run_pending(self.device)
            runtime.wait(self.device)  # the device reads the host's memory until then
            group.outcomes.put(None)
        total = torch.zeros((), device=self.device, dtype=self._loss_dtype)
        runtime.run_pending(self.device)
        data_seconds = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            batch = next(self._batches)
            data_seconds += time.perf_counter() - begin
            loss = loss_of(call_model(self._replica, batch)) / steps
            loss.backward()
            # In place, so that all microbatches trace the same graph.
            total += loss.detach()
            del batch, loss
            runtime.run_pending(self.device)
        begin = time.perf_counter()
        # A device that entered the collective alone could not be interrupted.
        group.barrier.wait()
        barrier_seconds = time.perf_counter() - begin
        losses = group.synchronizer.aggregate_grads_on_host(
            self._replica,
            add=True,
            scale=1.0 / group.num_devices,
            extra=[total],
            before_write=self._wait_to_commit,
        )
        if self.index != 0:
            return None
        group.synchronizer.fetch_buffers(self._replica)
        return float(losses[0]), data_seconds, barrier_seconds

    def _wait_to_commit(self) -> None:
        """Wait until this device may write into shared memory."""
        self._group.outcomes.put(_COMPUTED)
        self._group.commits.get()


def _counters() -> dict[Literal["compilations", "bytes_to_device", "bytes_to_host"], int]:
    def total(metric: str) -> int:
        data = met.metric_data(metric)
        return 0 if data is None else int(data[1])

    return {
        "compilations": int(met.counter_value("UncachedCompile") or 0),
        "bytes_to_device": total("OutboundData"),
        "bytes_to_host": total("InboundData"),
    }
