"""The device process of a `TPUManager` with all devices of jax as one mesh."""

import os
import time
import traceback
from copy import deepcopy
from typing import Any

import jax
import torch

from jaxslowmo._support.private_jax import has_devices as has_devices
from jaxslowmo._support.private_jax import leave_out_missing_tpu

from ..errors import describe
from ..master import MasterModel
from ..messages import Failed, Loaded, Step, StepDone, StepStatistics
from ..reader import SampleReader
from ..worker import GroupFailed, Link, WorkerOptions, failure_of_device
from ._mesh_program import MeshProgram

_compilations = 0


def _count_compilations(event: str, duration_secs: float, **_: Any) -> None:
    global _compilations
    del duration_secs
    _compilations += event == "/jax/core/compile/backend_compile_duration"


def open_devices(num_devices: int | None) -> list[Any]:
    """Start jax and return the devices of its platform.

    Args:
      num_devices: required number of devices, also the number of CPU devices to make; None for all.

    Raises:
      ValueError: there are not exactly `num_devices` devices.
    """
    if jax.config.values["jax_platforms"] is None:
        leave_out_missing_tpu()  # it would only print long warnings
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if num_devices is not None and not is_set and jax.config.values["jax_num_cpu_devices"] < 0:
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.local_devices()
    if num_devices not in (None, len(devices)):
        raise ValueError(
            f"`nprocs` must be the number of devices that jax has, {len(devices)} "
            f"({', '.join(map(str, devices))}), got {num_devices}."
        )
    return devices


class MeshGroup:
    """All devices of jax in this process, and the program that runs on them."""

    def __init__(self, master: MasterModel, reader: SampleReader, options: WorkerOptions):
        self._master, self._options = master, options
        if any(tensor.dtype == torch.float64 for tensor in master.host_tensors()):
            jax.config.update("jax_enable_x64", True)
        devices = open_devices(options.nprocs)
        self.num_devices = reader.nprocs = len(devices)
        replica = deepcopy(master.master_model)
        master.finish_replica(replica)
        self._program = MeshProgram(
            replica,
            devices,
            seed_base=options.seed_base,
            micro_batches=options.grad_accumulation_steps,
            compress=master.compress_grads,
        )
        size, collate_fn = options.batch_size_per_device, options.collate_fn
        self._batches = [
            reader.get_batches(index, batch_size=size, collate_fn=collate_fn)
            for index in range(self.num_devices)
        ]
        jax.monitoring.register_event_duration_secs_listener(_count_compilations)

    def step(self, request: Step, link: Link) -> StepDone:
        """Take a step on all devices; raise `GroupFailed` with the first failure."""
        program, options = self._program, self._options
        begin, compiled, sent = time.perf_counter(), _compilations, program.bytes_to_device
        data_seconds = 0.0
        if request.changes:
            self._on_devices(program.change, request.changes)
        if request.load_parameters:
            program.load(self._master.host_tensors())
            link.send(Loaded())
        for _ in range(options.grad_accumulation_steps):
            before = time.perf_counter()
            batches = [self._next_batch(index) for index in range(self.num_devices)]
            data_seconds += time.perf_counter() - before
            self._on_devices(program.add, batches)
        loss, gradients = self._on_devices(program.exchange)
        buffers = program.buffers(self._master.persistent_buffers)
        link.wait_to_commit()
        self._master.write_gradients(gradients, add=True)
        self._master.write_buffers(buffers)
        statistics = StepStatistics(
            seconds=time.perf_counter() - begin,
            data_seconds=data_seconds,
            barrier_seconds=0.0,  # one program: the devices wait for each other inside of it
            compilations=_compilations - compiled,
            bytes_to_device=program.bytes_to_device - sent,
            bytes_to_host=program.gradient_bytes + sum(buffer.nbytes for buffer in buffers),
        )
        return StepDone(loss, options.samples_per_step(self.num_devices), statistics)

    def _next_batch(self, index: int) -> Any:
        try:
            return next(self._batches[index])
        except BaseException as error:
            raise GroupFailed(failure_of_device(index, self.num_devices, error)) from error

    def _on_devices(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            # One program runs on all devices, so no device failed before the others.
            message = f"The program of {self.num_devices} devices failed: {describe(error)}"
            raise GroupFailed(Failed(message, traceback.format_exc())) from error
