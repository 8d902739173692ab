"""The XLA devices of a process: how many, which thread drives which, and when their graphs run.

Several CPU devices in one process stand in for TPU cores, so that scripts can be tried and tested
without a TPU. torch_xla deadlocks on them unless launches are ordered as `run_pending` orders them;
on a TPU `run_pending` is `torch_xla.sync()`.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

from .errors import not_installed

try:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
except ModuleNotFoundError as error:
    if error.name not in ("torch", "torch_xla"):
        raise
    raise not_installed(error.name) from error

from .autograd_threads import ensure_autograd_threads
from .meeting import Meeting

MAX_CPU_DEVICES = 64
# torch_xla has no public names for some of what a runtime needs.
_XLAC: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]
# Two threads that compile the same collective at once would run two executables that wait for each
# other: the second must find the first's in the cache.
_LAUNCH = threading.Lock()
_meeting: Meeting | None = None


def is_started() -> bool:
    """Whether this process has touched an XLA device, after which nothing can be configured."""
    return _XLAC._xla_runtime_is_initialized()


def on_cpu() -> bool:
    """Whether the XLA devices of this process are CPU devices (`PJRT_DEVICE`)."""
    return xr.device_type() == "CPU"


def configured_cpu_devices() -> int | None:
    """The number that `CPU_NUM_DEVICES` asks for, None where it is not set."""
    value = os.environ.get("CPU_NUM_DEVICES")
    return None if value is None else int(value)


def check_cpu_devices(num_devices: int) -> None:
    """Raise `ValueError` unless that many CPU devices can be configured."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise ValueError(f"`num_devices` must be an int, got {num_devices!r}.")
    if not 1 <= num_devices <= MAX_CPU_DEVICES:
        raise ValueError(
            f"`num_devices` must be between 1 and {MAX_CPU_DEVICES}, got {num_devices}."
        )


def configure_cpu_devices(num_devices: int) -> None:
    """Make the XLA runtime of this process, and of those it starts, `num_devices` CPU devices.

    For `xmp.spawn(fn)` and `TPUManager` on a machine without a TPU. Sets `PJRT_DEVICE`,
    `CPU_NUM_DEVICES` and what keeps several CPU devices from deadlocks: a client that launches from
    the calling thread (`PJRT_CPU_ASYNC_CLIENT=0`), and threads enough for devices that block in a
    collective, in torch_xla's pool (`XLA_THREAD_POOL_SIZE`) and in those of XLA itself (`NPROC`),
    which by default have as many as there are devices.

    Raises:
      ValueError: unless 1 <= num_devices <= 64.
      RuntimeError: if this process has touched an XLA device already.
    """
    check_cpu_devices(num_devices)
    if is_started():
        raise RuntimeError(
            f"configure_cpu_devices({num_devices}) comes too late: this process has touched an XLA "
            "device, and the number of devices is fixed from then on. Call it first."
        )
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(num_devices)
    os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"
    os.environ["XLA_THREAD_POOL_SIZE"] = str(max(16, num_devices))
    # Twice as many as can be blocked at a time; many more than cores would slow the arithmetic.
    os.environ["NPROC"] = str(max(os.cpu_count() or 1, 2 * num_devices))


def open_devices(num_devices: int | None = None) -> list[torch.device]:
    """Start the runtime and return this process's devices, which form one group for collectives.

    For a process that drives all its devices itself, one thread each (`bind`), instead of leaving
    that to `xmp.spawn`.

    Args:
      num_devices: the number wanted; None for all there are.

    Raises:
      ValueError: if there are not exactly `num_devices` devices.
    """
    if on_cpu() and not is_started():
        configure_cpu_devices(num_devices or configured_cpu_devices() or 1)
    devices = [torch.device(name) for name in xm.get_xla_supported_devices()]
    if num_devices not in (None, len(devices)):
        raise ValueError(
            f"`nprocs` must be the number of XLA devices there are, {len(devices)} "
            f"({', '.join(map(_real_name, devices))}), got {num_devices}."
        )
    # Without this every device takes itself for the only one and a collective silently does
    # nothing. torch_xla keeps the size it was first asked for, before a fork too.
    xr._WORLD_SIZE = xr._ORDINAL = None
    xm.set_replication(devices[0], devices if len(devices) > 1 else [])
    if xr.world_size() != len(devices):
        raise RuntimeError(
            f"torch_xla counts {xr.world_size()} replicas for {len(devices)} devices."
        )
    ensure_autograd_threads(devices[0])
    return devices


def bind(device: torch.device) -> None:
    """From now on the calling thread drives `device`: its default device and its ordinal."""
    _XLAC._xla_set_default_device(str(device))


def bound() -> torch.device:
    """The device that the calling thread drives."""
    return torch_xla.device()


def run_pending(device: torch.device | None = None) -> None:
    """Compile and launch what `device` has traced so far; the next operation starts a new graph.

    Around every collective of several CPU devices there must be one of these before, which leaves
    the collective alone in its graph, the same for all devices, and one after. Launches are then
    ordered by a lock, and the calling thread waits until its device (and no other) has finished;
    outside of the lock, or it would keep out the devices that it waits for.

    Args:
      device: the device that the calling thread drives (None: its default device).
    """
    device = device or torch_xla.device()
    if not (on_cpu() and xr.addressable_device_count() > 1):
        torch_xla.sync()
        return
    with _LAUNCH:
        torch_xla.sync()
    xm.wait_device_ops([_real_name(device)])


def may_launch() -> bool:
    """Whether graphs may be launched: not inside of `torch_xla.compile(full_graph=True)`.

    Raises:
      RuntimeError: inside of it with several CPU devices, which torch_xla cannot compile so.
    """
    allowed = _XLAC._get_allow_execution()
    if not allowed and shares_a_process():
        raise RuntimeError(
            "torch_xla.compile(full_graph=True) cannot be used on several CPU devices: it forbids "
            "the whole process to launch graphs, whose other threads do. Leave full_graph out; on "
            "one device per process it works."
        )
    return allowed


def shares_a_process() -> bool:
    """Whether the devices are several CPU devices, each driven by a thread of one process."""
    return on_cpu() and xr.addressable_device_count() > 1 and xr.world_size() > 1


def introduce() -> None:
    """The calling thread drives its device; `meet` then tells the others if its function ends.

    It starts no devices: a process without any may fork later.
    """
    if is_started() and shares_a_process():
        _the_meeting().introduce(xr.global_ordinal())


def meet(call: str = "an exchange of its own") -> None:
    """Wait until all devices of this process have come here; for several CPU devices alone.

    To be called before a graph with a collective of one's own is launched by `run_pending`, in all
    threads: XLA's CPU runtime aborts the process where one device comes to a collective 15 seconds
    after another. The wait is said after 30 seconds, with the number of who is awaited.

    Args:
      call: what this device does next, for the error where another does something else.

    Raises:
      UnlikeCallsError: devices have come with different `call`.
      PeerLostError: another device's function has ended, by an exception that is told, or has not
        come for half an hour.
    """
    if shares_a_process():
        _the_meeting().wait(xr.global_ordinal(), call)


def _the_meeting() -> Meeting:
    global _meeting
    with _LAUNCH:
        if _meeting is None or _meeting.parties != xr.world_size():
            _meeting = Meeting(xr.world_size())
        return _meeting


def _real_name(device: torch.device) -> str:
    """Such as "TPU:0" for xla:0."""
    return xm.xla_real_devices([str(device)])[0]  # pyright: ignore[reportArgumentType]


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """CPU tensors on `device`, in one transfer."""
    if not tensors:
        return []
    # Plain tensors: torch_xla moves nothing of a subclass, such as nn.Parameter.
    plain = [tensor.detach() for tensor in tensors]
    return xm.send_cpu_data_to_device(plain, device)  # pyright: ignore[reportReturnType]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of a device on the CPU, in one transfer; what they wait for should have run."""
    return _XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])


def wait(device: torch.device) -> None:
    """Wait until `device` has run what was launched on it."""
    xm.wait_device_ops([_real_name(device)])
