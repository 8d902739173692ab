"""torch_xla in the device process of a `TPUManager`: a thread, a replica and batches per device."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Literal

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch import nn

from . import runtime
from .autograd_threads import ensure_autograd_threads
from .master import MasterModel
from .messages import Failed, Loaded, Step, StepDone, StepStatistics
from .reader import SampleReader
from .tensors import call_model, loss_of, map_tensors
from .worker import GroupFailed, Link, WorkerOptions, failure_of_device


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


class TPUSynchronizer(MasterModel):
    """The master model in shared memory, and transfers between it and its replicas.

    Args:
      model: module on the CPU; it becomes the master.
      post_init: function that is called with every replica once it is on its device, instead of the
        replica's `tie_weights()`.
      compress_grads: whether summed gradients are sent to the host as bfloat16.

    Raises:
      ValueError: the model has no parameters, or a tensor that is not on the CPU.
      OSError: shared memory, or the limit of open files, is exhausted.
    """

    def get_device_model_replica(self, device: torch.device, tie_weights: bool = True) -> nn.Module:
        """Copy the master to `device`, with zero gradients and without a second copy on the host.

        Parameters that share a tensor in the master share one in the replica.

        Args:
          device: device of the replica.
          tie_weights: whether to call `post_init`, or the replica's `tie_weights()` if it has one.
        """
        with torch.no_grad():
            hosts = [*self.master_model.parameters(), *self.master_model.buffers()]
            memo: dict[int, torch.Tensor] = {}
            for host, on_device in zip(hosts, runtime.to_device(hosts, device), strict=True):
                if isinstance(host, nn.Parameter):
                    on_device = nn.Parameter(on_device, requires_grad=host.requires_grad)
                memo[id(host)] = on_device
            # deepcopy uses the tensors in its memo instead of copying them.
            replica = deepcopy(self.master_model, memo)
            if tie_weights:
                self.finish_replica(replica)
            for parameter in replica.parameters():
                parameter.grad = torch.zeros_like(parameter)
        ensure_autograd_threads(device)
        return replica

    def send_params_to_device(self, replica: nn.Module) -> None:
        """Copy the master's parameters and buffers to this device's replica.

        It is one transfer of their size; copies inside the device are part of its next graph.
        """
        with torch.no_grad():
            targets = [*replica.parameters(), *replica.buffers()]
            sources = runtime.to_device(self.host_tensors(), targets[0].device)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def aggregate_grads_on_host(
        self,
        replica: nn.Module,
        *,
        add: bool,
        scale: float = 1.0,
        extra: Iterable[torch.Tensor] = (),
        before_write: Callable[[], object] | None = None,
    ) -> list[torch.Tensor]:
        """Sum gradients over all devices into the master's, and zero those of the replica.

        Call it for every device, each from its thread, after all of them have finished their
        previous graphs. It makes one all-reduce of the size of the gradients (half precision as
        float32), then one transfer to the host, by ordinal 0 only.

        Args:
          replica: replica of this device.
          add: whether to add to the master's gradients instead of replacing them.
          scale: factor of the sums.
          extra: further tensors on the device to sum and scale.
          before_write: function that ordinal 0 calls between the transfer and the writing.

        Returns:
          The sums of `extra` on the host, at ordinal 0; an empty list at other ordinals.
        """
        with torch.no_grad():
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in replica.parameters()
            ]
            runtime.run_pending()
            # Clones: the all-reduce overwrites its tensors, and the replica keeps its gradients.
            sums = [_wide(tensor).clone() for tensor in [*gradients, *extra]]
            xm.all_reduce(xm.REDUCE_SUM, sums, scale=scale, pin_layout=False)
            # With one device torch_xla skips the all-reduce, and the scale with it.
            if scale != 1.0 and xr.world_size() == 1:
                sums = [tensor * scale for tensor in sums]
            for gradient in gradients:
                gradient.zero_()
            if self.compress_grads:
                sums[: len(gradients)] = [g.bfloat16() for g in sums[: len(gradients)]]
            runtime.run_pending()
            if xr.global_ordinal() != 0:
                return []
            on_host = runtime.to_host(sums)
            if before_write is not None:
                before_write()
            self.write_gradients(on_host[: len(gradients)], add=add)
            return on_host[len(gradients) :]

    def fetch_buffers(self, replica: nn.Module) -> None:
        """Copy the replica's persistent buffers into the master's, as after its last step."""
        buffers = dict(replica.named_buffers())
        if self.persistent_buffers:
            self.write_buffers(runtime.to_host([buffers[n] for n in self.persistent_buffers]))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return half precision as float32, so that sums over devices lose nothing."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


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
