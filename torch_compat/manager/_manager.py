"""`TPUManager`: a model in shared host memory, trained by the devices of another process."""

import multiprocessing as mp
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..checks import as_batch_size, as_count, as_int, as_seconds
from ..errors import TPUWorkerError
from ..messages import StepStatistics
from ..settings import Settings
from ..worker import WorkerOptions, serve
from ._backends import choose_backend
from ._exchange import StepExchange

# How long `shutdown` waits for the device process after a request, after SIGTERM, after SIGKILL.
_END_SECONDS = (1.0, 0.3, 0.2)

# Steps with old parameters after which `step` warns; some programs let the devices lag a little.
_OLD_STEPS = 10


class TPUManager(mp.Process):
    """A process that trains a model with all XLA devices of this machine.

    The process that makes the manager needs no device. The model stays there, in shared host
    memory, where an optimizer of any kind can update it. A forked process drives the devices. A
    `step` runs forward and backward on all of them and adds the mean gradient to the master's
    `.grad`.

    Communication per step: one all-reduce of the gradients over the devices (half precision as
    float32) and one transfer of them from device 0 to the host; and the parameters once to every
    device in the first step after `update_model_parameters`.

    Names and meaning are those of hivemind's `TPUManager` (dalle-hivemind,
    `lib/training/tpu.py`) and its descendants. In addition, `step` raises any failure instead of
    hanging, and there are `shutdown` and use as a context manager.

    Other threads may call every method while a step runs: they see the master before the step or
    after it. `lock` is held only while the devices read its parameters, at the start of a step that
    loads them, and while gradients and buffers are written, at the end; a thread that accesses the
    model's tensors at the same time must take it, too.

    These settings of the model, changed between two steps, apply from the next one on in all
    replicas: `requires_grad_()`, `train()` and `eval()`, and attributes of its modules that are
    numbers, strings, None, or tuples of at most 16 of these.

    Args:
      model: module on the CPU; its `forward` returns the loss as a tensor, as the first of a tuple,
        as `outputs["loss"]` or `outputs.loss`, a mean over the batch. It becomes the master.
      dataset: iterable of samples, read once, in this process. Sample i goes to device
        i % nprocs.
      collate_fn: function from a list of samples to a batch, as in `torch.utils.data.DataLoader`. A
        dict is passed to the model as keywords, a tuple or list as positional arguments, any other
        batch as the only argument.
      nprocs: number of devices, None for all. On CPU devices this many are made, unless
        `torch_compat.runtime.configure_cpu_devices` has set their number.
      prefetch: number of samples per device to read ahead.
      batch_size_per_device: samples per device and forward pass; the default is 1.
      grad_accumulation_steps: forward passes per device and step.
      seed_base: device i's random numbers start from seed_base + i.
      start: whether to start the device process now; otherwise call `start()`.
      step_timeout: seconds that a step may take, None for any time. The end of the device process
        is noticed at once, independent of the time-out.
      init_timeout: seconds from the start until the devices must be ready; the first step waits for
        them. None for any time.
      batch_size: another name of `batch_size_per_device`, as in sahajBERT.
      post_init: function that is called with every replica in the device process, instead of the
        replica's `tie_weights()`, if there is one.
      compress_grads: whether device 0 sends mean gradients to the host as bfloat16: half the bytes,
        rounded to 8 bits. Sums before and after are in float32.
      backend: "torch_xla" or "torchax", which runs torch's operations on jax; None for torch_xla
        if it is installed, else torchax.

    Attributes:
      lock: the lock that is held while this or the device process accesses shared memory, a
        `threading.RLock`.
      step_timeout: the seconds that a step may take, or None; it may be changed between steps.

    Raises:
      ValueError: an argument is outside its range; the text names it.
      RuntimeError: this process has touched a device of the backend; a fork cannot use it.
      ModuleNotFoundError: the backend is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Iterable[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nprocs: int | None = None,
        prefetch: int = 16,
        batch_size_per_device: int | None = None,
        grad_accumulation_steps: int = 1,
        seed_base: int = 42,
        start: bool,
        step_timeout: float | None = None,
        init_timeout: float | None = 300,
        batch_size: int | None = None,
        post_init: Callable[[nn.Module], object] | None = None,
        compress_grads: bool = False,
        backend: str | None = None,
    ):
        super().__init__(name="TPUManager", daemon=True)  # ends with the main process
        self.prefetch = as_count("prefetch", prefetch)
        self.batch_size_per_device = as_batch_size(batch_size_per_device, batch_size)
        self.grad_accumulation_steps = as_count("grad_accumulation_steps", grad_accumulation_steps)
        self.step_timeout = as_seconds("step_timeout", step_timeout)
        self._exchange = StepExchange(self)
        self.lock = self._exchange.lock
        self.init_timeout = as_seconds("init_timeout", init_timeout)
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
        self.collate_fn = collate_fn
        self._backend = choose_backend(backend)
        self.backend = self._backend.name
        self._check_untouched()
        self.nprocs = None if nprocs is None else as_count("nprocs", nprocs)
        self.seed_base = as_int("seed_base", seed_base)
        self.statistics: StepStatistics | None = None
        self._synchronizer = self._backend.make_master(model, post_init, compress_grads)
        self._data_manager = self._backend.make_reader(
            dataset, self.nprocs, self.prefetch, start=False
        )
        self._should_load_parameters = False
        self._sample: list[bytes] | None = None
        self._num_old = 0
        if start:
            self.start()

    # The arguments of the device process cannot be pickled: it must be forked, independent of the
    # program's start method.
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: mp.Process) -> Any:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork of a process with threads. This one takes no lock that
            # another thread may have held, and torch's own threads are not used after it.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            return mp.get_context("fork").Process._Popen(process_obj)

    def start(self) -> None:
        """Fork the device process and begin to read the dataset, without waiting for the devices.

        Raises:
          RuntimeError: this process has touched a device, or the manager was started before.
        """
        if self.pid is not None:
            raise RuntimeError("This TPUManager has been started already.")
        self._check_untouched()
        connection, self._worker_end = mp.Pipe()
        self._host_end = connection
        self._settings = Settings.from_module(self._synchronizer.master_model)
        super().start()
        self._worker_end.close()
        self._data_manager.release_receivers()
        self._data_manager.start()
        self._exchange.open(connection)

    def _check_untouched(self) -> None:
        if self._backend.is_started():
            raise RuntimeError(
                f"This process has touched a device of {self._backend.needs[-1]}, which a fork "
                "cannot use: start TPUManager first (in a notebook: restart the kernel)."
            )

    def run(self) -> None:
        """Run the device process."""
        _forget_signal_handlers()
        self._host_end.close()
        torch.set_num_threads(1)  # OpenMP does not survive a fork; devices have threads
        options = WorkerOptions(
            self.nprocs,
            self.batch_size_per_device,
            self.grad_accumulation_steps,
            self.collate_fn,
            self.seed_base,
        )
        open_group = self._backend.open_group
        serve(self._worker_end, lambda: open_group(self._synchronizer, self._data_manager, options))

    def step(self) -> tuple[float, int]:
        """Run forward and backward on all devices and add the mean gradient to the master's.

        Returns:
          The mean loss, and the number of samples: batch_size_per_device *
          grad_accumulation_steps * nprocs. Loss and gradients are means over all of them.

        Raises:
          TPUWorkerError: the dataset or the device process has ended or failed; the error has its
            traceback or exit code. Every later call raises the same error.
          UserWarning: once, before 10 steps the model's parameters had changed, and
            `update_model_parameters` was not called. Steps that accumulate change none.
        """
        exchange = self._exchange
        with exchange.turn():
            exchange.wait_until_ready(self.init_timeout)
            self.nprocs = exchange.num_devices
            # A gradient may be dropped or replaced while the devices compute.
            answer = exchange.step(self._prepare, self._synchronizer.attach_gradients)
            self.statistics = answer.statistics
            if self._num_old == _OLD_STEPS:
                self._num_old = -sys.maxsize  # warn once
                warnings.warn(
                    f"The model's parameters have changed before {_OLD_STEPS} steps without "
                    "update_model_parameters(), so the devices compute with old ones. Call "
                    "manager.update_model_parameters(model.parameters()) after optimizer.step().",
                    stacklevel=2,
                )
            return answer.loss, answer.num_samples

    def _prepare(self) -> tuple[bool, Settings]:
        self._synchronizer.attach_gradients()
        load, self._should_load_parameters = self._should_load_parameters, False
        before, self._sample = self._sample, self._synchronizer.sample_parameters()
        if load:
            self._num_old = min(self._num_old, 0)
        elif before not in (None, self._sample):
            self._num_old += 1
        before = self._settings
        self._settings = Settings.from_module(self._synchronizer.master_model)
        return load, self._settings.changes_since(before)

    def compute_grads(self) -> tuple[float, int]:
        """Call `step`; CALM's manager has this name for it."""
        return self.step()

    def update_model_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copy parameters into the master; the devices load them at the start of the next step.

        Args:
          new_host_parameters: tensors like `model.parameters()`; the master's own are valid.

        Raises:
          ValueError: number, shapes or dtypes are not those of the model.
          TPUWorkerError: the device process has failed.
        """
        self._exchange.check_running()
        with self._exchange.settled_memory():
            self._exchange.check_running()
            self._synchronizer.set_host_parameters(new_host_parameters)
            self._should_load_parameters = True

    def get_aggregated_gradients(self, *, copy: bool = True) -> list[torch.Tensor]:
        """Return the gradients added up since the last `zero_grad`, like `model.parameters()`.

        Args:
          copy: whether to copy; False returns the shared tensors, to which the next step adds.
        """
        with self._exchange.settled_memory():
            return self._synchronizer.get_aggregated_gradients(copy=copy)

    def zero_grad(self) -> None:
        """Set the master's gradients to zero."""
        with self._exchange.settled_memory():
            self._synchronizer.zero_grad()

    def shutdown(self) -> None:
        """End the device process and the loader thread, waiting less than 2 seconds.

        It may be called more than once. A step that runs at the same time in another thread ends
        with a `TPUWorkerError`.
        """
        self._exchange.fail(TPUWorkerError("This TPUManager has been shut down."))
        if self.pid is None:
            return
        with self._exchange.idle(timeout=0.1) as idle:
            ends = (self._exchange.stop, self.terminate, self.kill)
            # During a step the process does not read requests.
            for end, seconds in list(zip(ends, _END_SECONDS, strict=True))[0 if idle else 1 :]:
                end()
                self.join(seconds)
                if not self.is_alive():
                    break
        self._data_manager.stop()

    def __enter__(self) -> "TPUManager":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _forget_signal_handlers() -> None:
    """Reset the program's signal handlers in the device process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches both processes; the main process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
