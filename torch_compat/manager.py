"""`TPUManager`: a model in shared host memory, trained by the devices of another process."""

import math
import multiprocessing as mp
import operator
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import nn

from . import runtime
from .data import TPUDataManager
from .errors import TPUWorkerError
from .messages import Failed, Ready, Step, StepDone, StepStatistics, Stop
from .synchronizer import TPUSynchronizer
from .worker import WorkerOptions, serve


class TPUManager(mp.Process):
    """Trains a model with all XLA devices of this machine, from a process that has none.

    The model stays in the main process, in shared host memory, where an optimizer of any kind can
    work on it. A forked process drives the devices, one thread and one replica each. A `step` runs
    forward and backward on all of them and adds the mean gradient to the master's `.grad`.

    Communication per step: one all-reduce of the gradients over the devices (half precision as
    float32) and one transfer of them from device 0 to the host; and the parameters once to every
    device in the first step after `update_model_parameters`.

    Same names and meaning as hivemind's `TPUManager` (dalle-hivemind, `lib/training/tpu.py`).
    Beyond it: a failure anywhere is raised by `step` instead of a hang, `shutdown`, use as a
    context manager.

    Args:
      model: on the CPU; its `forward` returns the loss as a tensor, as the first of a tuple, as
        `outputs["loss"]` or `outputs.loss`, a mean over the batch. It becomes the master.
      dataset: iterable of samples, read once, in this process. Sample i goes to device
        i % nprocs.
      collate_fn: list of samples -> batch, as in `torch.utils.data.DataLoader`. A dict is passed
        to the model as keywords, a tuple or list as positional arguments, else as the argument.
      nprocs: the number of devices, None for all there are. On CPU devices it says how many there
        shall be, unless `torch_compat.runtime.configure_cpu_devices` has said so.
      prefetch: samples per device read ahead.
      batch_size_per_device: samples per device and forward pass.
      grad_accumulation_steps: forward passes per device and step.
      seed_base: device i's random numbers start from seed_base + i.
      start: start the device process at once; else call `start()`.
      step_timeout: seconds that a step may take, None for any time. A process that ends is
        noticed at once, whatever the time-out.
      init_timeout: seconds until the devices must be ready, which the first step waits for; None
        for any time.

    Raises:
      ValueError: for arguments outside their range, naming them.
      RuntimeError: if this process has touched an XLA device; a fork cannot take one over.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Iterable[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nprocs: int | None = None,
        prefetch: int = 16,
        batch_size_per_device: int = 1,
        grad_accumulation_steps: int = 1,
        seed_base: int = 42,
        start: bool,
        step_timeout: float | None = None,
        init_timeout: float | None = 300,
    ):
        super().__init__(name="TPUManager", daemon=True)  # ends with the main process
        self.prefetch = _as_count("prefetch", prefetch)
        self.batch_size_per_device = _as_count("batch_size_per_device", batch_size_per_device)
        self.grad_accumulation_steps = _as_count("grad_accumulation_steps", grad_accumulation_steps)
        self.step_timeout = _as_seconds("step_timeout", step_timeout)
        self.init_timeout = _as_seconds("init_timeout", init_timeout)
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
        if collate_fn is not None and not callable(collate_fn):
            raise ValueError(f"`collate_fn` must be callable, got {collate_fn!r}.")
        self.collate_fn = collate_fn
        self.nprocs = _as_devices(nprocs)
        self.seed_base = _as_int("seed_base", seed_base)
        self.statistics: StepStatistics | None = None
        self._synchronizer = TPUSynchronizer(model)
        self._data_manager = TPUDataManager(dataset, self.nprocs, self.prefetch, start=False)
        # Of this process alone: a lock shared with a process that dies would be held for ever.
        self.lock = threading.RLock()
        self._should_load_parameters = False
        self._step_number = 0
        self._outstanding: int | None = None  # a step whose answer has not been read
        self._ready = False
        self._failure: TPUWorkerError | None = None
        if start:
            self.start()

    # Nothing that the device process needs could be pickled: it must be forked, whatever the
    # program's start method is.
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: mp.Process) -> Any:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork of a process with threads. This one takes no lock that
            # another thread may have held, and torch's own threads are not used after it.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            return mp.get_context("fork").Process._Popen(process_obj)

    def start(self) -> None:
        """Fork the device process and begin to read the dataset; does not wait for the devices.

        Raises:
          RuntimeError: if this process has touched an XLA device, or the manager was started.
        """
        if self.pid is not None:
            raise RuntimeError("This TPUManager has been started already.")
        _check_untouched()
        self._connection, self._worker_end = mp.Pipe()
        super().start()
        self._worker_end.close()
        self._data_manager.release_receivers()
        self._data_manager.start()
        self._start_time = time.monotonic()

    def run(self) -> None:
        """The device process."""
        _forget_signal_handlers()
        self._connection.close()
        torch.set_num_threads(1)  # OpenMP does not survive a fork; XLA has threads of its own
        options = WorkerOptions(
            self.nprocs,
            self.batch_size_per_device,
            self.grad_accumulation_steps,
            self.collate_fn,
            self.seed_base,
        )
        serve(self._worker_end, self._synchronizer, self._data_manager, options)

    def step(self) -> tuple[float, int]:
        """Run forward and backward on all devices and add the mean gradient to the master's.

        Returns:
          The mean loss, and the number of samples: batch_size_per_device *
          grad_accumulation_steps * nprocs. Both losses and gradients are means over all of them.

        Raises:
          TPUWorkerError: if the dataset has ended or failed, or the device process has; with the
            traceback from there, or its exit code. Every later call raises the same.
        """
        with self.lock:
            self._check_running()
            self._wait_until_ready()
            self._settle()
            self._synchronizer.attach_gradients()
            self._step_number += 1
            self._send(Step(self._step_number, self._should_load_parameters))
            self._outstanding = self._step_number
            self._should_load_parameters = False
            answer = self._answer()
            self.statistics = answer.statistics
            return answer.loss, answer.num_samples

    def _settle(self) -> None:
        """Wait for a step that was interrupted before its answer came: it still adds gradients."""
        if self._outstanding is not None and self._failure is None:
            self._answer()

    def _answer(self) -> StepDone:
        limit = self.step_timeout
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            answer = self._receive(deadline, f"`step_timeout` = {limit} s")
            if isinstance(answer, StepDone) and answer.number == self._outstanding:
                self._outstanding = None
                return answer

    def update_model_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copy parameters into the master; the devices load them at the start of the next step.

        Args:
          new_host_parameters: as `model.parameters()`; the master's own are fine.

        Raises:
          ValueError: if their number, shapes or dtypes are not the model's.
          TPUWorkerError: if the device process has failed.
        """
        with self.lock:
            self._check_running()
            self._settle()
            self._synchronizer.set_host_parameters(new_host_parameters)
            self._should_load_parameters = True

    def get_aggregated_gradients(self, *, copy: bool = True) -> list[torch.Tensor]:
        """The gradients added up since the last `zero_grad`, as `model.parameters()`.

        Args:
          copy: False for the shared tensors themselves, to which the next step adds.
        """
        with self.lock:
            self._settle()
            return self._synchronizer.get_aggregated_gradients(copy=copy)

    def zero_grad(self) -> None:
        """Set the master's gradients to zero."""
        with self.lock:
            self._settle()
            self._synchronizer.zero_grad()

    def shutdown(self) -> None:
        """End the device process and the loader thread, in less than 2 seconds; may be repeated.

        A step that runs meanwhile, in another thread, ends with a `TPUWorkerError`.
        """
        self._fail(TPUWorkerError("This TPUManager has been shut down."))
        if self.pid is None:
            return
        idle = self.lock.acquire(timeout=0.1)  # or a step holds it, perhaps for ever
        try:
            ends = [(self.terminate, 0.3), (self.kill, 0.2)]
            if idle:
                ends.insert(0, (lambda: self._send_quietly(Stop()), 1.0))
            for end, seconds in ends:
                end()
                self.join(seconds)
                if not self.is_alive():
                    break
        finally:
            if idle:
                self.lock.release()
        self._data_manager.stop()

    def __enter__(self) -> "TPUManager":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self.pid is None:
            raise RuntimeError("This TPUManager has not been started: call start().")

    def _wait_until_ready(self) -> None:
        if not self._ready:
            limit = self.init_timeout
            deadline = None if limit is None else self._start_time + limit
            answer = self._receive(deadline, f"`init_timeout` = {limit} s")
            assert isinstance(answer, Ready)
            self.nprocs, self._ready = answer.num_devices, True

    def _send(self, request: Step) -> None:
        try:
            self._connection.send(request)
        except OSError:
            # Raises, with what the process has left, or with its exit code.
            self._receive(time.monotonic() + 1, "a second")

    def _send_quietly(self, request: Stop) -> None:
        with suppress(OSError):
            self._connection.send(request)

    def _receive(self, deadline: float | None, limit: str) -> Ready | StepDone:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = wait([self._connection, self.sentinel], left)
        if self._connection in ready:
            try:
                answer = self._connection.recv()
            except (EOFError, OSError):
                self.join(1.0)
            else:
                if not isinstance(answer, Failed):
                    return answer
                raise self._fail(TPUWorkerError(answer.message, worker_traceback=answer.traceback))
        if not ready:
            self.kill()
            self.join(1.0)
            message = f"The device process gave no answer within {limit} and was killed."
            raise self._fail(TPUWorkerError(message, exitcode=self.exitcode))
        self.join(1.0)
        raise self._fail(
            TPUWorkerError(
                f"The device process ended with {_describe(self.exitcode)}.", exitcode=self.exitcode
            )
        )

    def _fail(self, failure: TPUWorkerError) -> TPUWorkerError:
        """The first failure stays, for all later calls."""
        self._failure = self._failure or failure
        return self._failure


def _describe(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    return f"exit code {exitcode} ({signal.Signals(-exitcode).name})"


def _forget_signal_handlers() -> None:
    """In the device process: the program's handlers are for the main process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches both; the main process stops this one when it wants to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_int(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` must be an int, got {value!r}.") from None


def _as_count(name: str, value: Any) -> int:
    count = _as_int(name, value)
    if count < 1:
        raise ValueError(f"`{name}` must be >= 1, got {count}.")
    return count


def _as_seconds(name: str, value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):
        raise ValueError(f"`{name}` must be a number of seconds > 0, or None, got {value!r}.")
    return value


def _as_devices(nprocs: Any) -> int | None:
    _check_untouched()
    if nprocs is None:
        # Elsewhere only the process that starts the runtime can count them.
        return (runtime.configured_cpu_devices() or 1) if runtime.on_cpu() else None
    nprocs = _as_count("nprocs", nprocs)
    if runtime.on_cpu():
        runtime.check_cpu_devices(nprocs)
        configured = runtime.configured_cpu_devices()
        if configured not in (None, nprocs):
            raise ValueError(
                f"`nprocs` must be the number of XLA devices there are, {configured} CPU devices "
                f"(CPU_NUM_DEVICES), got {nprocs}. Leave it out to use them all."
            )
    return nprocs


def _check_untouched() -> None:
    if runtime.is_started():
        raise RuntimeError(
            "This process has touched an XLA device, and a forked process cannot take its runtime "
            "over. Start TPUManager before anything calls torch_xla.device() or moves a tensor "
            "to a device (in a notebook: restart the kernel)."
        )
