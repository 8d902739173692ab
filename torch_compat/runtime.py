"""The XLA devices of a process: their number, their threads, and when their graphs run.

Several CPU devices in one process replace TPU cores, so that scripts can be tried and tested
without a TPU. torch_xla deadlocks on them unless launches are ordered as in `run_pending`; on a TPU
`run_pending` is `torch_xla.sync()`.
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
from .checks import as_int
from .meeting import Meeting

MAX_CPU_DEVICES = 64
# Some functions that a runtime needs have no public names in torch_xla.
_XLAC: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]
# If two threads compile the same collective at once, two executables run and wait for each other:
# the second thread must find the first one's executable in the cache.
_LAUNCH = threading.Lock()
_meeting: Meeting | None = None


def is_started() -> bool:
    """Return whether this process has touched an XLA device, which fixes the configuration."""
    return _XLAC._xla_runtime_is_initialized()


def on_cpu() -> bool:
    """Return whether the XLA devices of this process are CPU devices (`PJRT_DEVICE`)."""
    return xr.device_type() == "CPU"


def configure_cpu_devices(num_devices: int) -> None:
    """Give the XLA runtime of this process, and of processes it starts, `num_devices` CPU devices.

    It is for `xmp.spawn(fn)` and `TPUManager` on a machine without a TPU. It sets `PJRT_DEVICE`,
    `CPU_NUM_DEVICES` and variables that prevent deadlocks of several CPU devices: a client that
    launches from the calling thread (`PJRT_CPU_ASYNC_CLIENT=0`), and enough threads for devices
    that block in a collective, in torch_xla's pool (`XLA_THREAD_POOL_SIZE`) and in XLA's own pools
    (`NPROC`), which by default have one thread per device.

    Raises:
      ValueError: not 1 <= num_devices <= 64.
      RuntimeError: this process has touched an XLA device already.
    """
    if not 1 <= as_int("num_devices", num_devices) <= MAX_CPU_DEVICES:
        raise ValueError(
            f"`num_devices` must be between 1 and {MAX_CPU_DEVICES}, got {num_devices}."
        )
    if is_started():
        raise RuntimeError(
            f"configure_cpu_devices({num_devices}) comes too late, after this process has touched "
            "an XLA device: call it first."
        )
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(num_devices)
    os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"
    os.environ["XLA_THREAD_POOL_SIZE"] = str(max(16, num_devices))
    # Twice the number that can block at a time; many more than cores would slow the arithmetic.
    os.environ["NPROC"] = str(max(os.cpu_count() or 1, 2 * num_devices))


def open_devices(num_devices: int | None = None) -> list[torch.device]:
    """Start the runtime and return this process's devices, which form one group for collectives.

    It is for a process that drives all its devices itself, one thread each (`bind`), instead of
    with `xmp.spawn`.

    Args:
      num_devices: required number of devices; None for all.

    Raises:
      ValueError: there are not exactly `num_devices` devices.
    """
    if on_cpu() and not is_started():
        configure_cpu_devices(int(os.environ.get("CPU_NUM_DEVICES", num_devices or 1)))
    devices = [torch.device(name) for name in xm.get_xla_supported_devices()]
    if num_devices not in (None, len(devices)):
        raise ValueError(
            f"`nprocs` must be the number of XLA devices there are, {len(devices)} "
            f"({', '.join(map(_real_name, devices))}), got {num_devices}."
        )
    # Without this every device counts as the only one, and a collective silently does nothing.
    # torch_xla caches the size at the first query, which may have been before a fork.
    xr._WORLD_SIZE = xr._ORDINAL = None
    xm.set_replication(devices[0], devices if len(devices) > 1 else [])
    assert xr.world_size() == len(devices)
    ensure_autograd_threads(devices[0])
    return devices


def bind(device: torch.device) -> None:
    """Make `device` the calling thread's default device and set its ordinal."""
    _XLAC._xla_set_default_device(str(device))


def run_pending(device: torch.device | None = None) -> None:
    """Compile and launch what `device` has traced so far; the next operation starts a new graph.

    Every collective of several CPU devices needs a call before it, so that the collective is alone
    in its graph, which is then equal for all devices, and a call after it. A lock orders launches.
    The calling thread waits until its device (and no other) has finished; it does so outside of the
    lock, which the devices that it waits for need.

    Args:
      device: device that the calling thread drives; None: its default device.
    """
    device = device or torch_xla.device()
    if not (on_cpu() and xr.addressable_device_count() > 1):
        torch_xla.sync()
        return
    with _LAUNCH:
        torch_xla.sync()
    wait(device)


def may_launch() -> bool:
    """Return whether graphs may be launched: not in `torch_xla.compile(full_graph=True)`.

    Raises:
      RuntimeError: inside of it with several CPU devices, for which torch_xla cannot compile.
    """
    allowed = _XLAC._get_allow_execution()
    if not allowed and shares_a_process():
        raise RuntimeError(
            "torch_xla.compile(full_graph=True) cannot be used on several CPU devices, whose other "
            "threads launch graphs: leave full_graph out."
        )
    return allowed


def shares_a_process() -> bool:
    """Return whether the devices are several CPU devices, driven by threads of one process."""
    return on_cpu() and xr.addressable_device_count() > 1 and xr.world_size() > 1


def introduce() -> None:
    """Register the calling thread for its device, so that `meet` notices the end of its function.

    It starts no devices, so that a process without devices may fork later.
    """
    if is_started() and shares_a_process():
        _the_meeting().introduce(xr.global_ordinal())


def meet(call: str = "an exchange of its own") -> None:
    """Wait until all devices of this process have called this; only for several CPU devices.

    Call it in all threads before `run_pending` launches a graph with your own collective: XLA's CPU
    runtime aborts the process if one device comes to a collective 15 seconds after another. After
    30 seconds a warning names the devices that are missing.

    Args:
      call: description of what this device does next, for the error if another does otherwise.

    Raises:
      UnlikeCallsError: `call` differs between devices.
      PeerLostError: another device's function has ended (the error names its exception), or has not
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
    """Return the device's name in XLA, such as "TPU:0" for xla:0."""
    return xm.xla_real_devices([str(device)])[0]  # pyright: ignore[reportArgumentType]


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy CPU tensors to `device` in one transfer."""
    if not tensors:
        return []
    # Plain tensors: torch_xla does not move tensors of a subclass, such as nn.Parameter.
    plain = [tensor.detach() for tensor in tensors]
    return xm.send_cpu_data_to_device(plain, device)  # pyright: ignore[reportReturnType]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of a device to the CPU in one transfer; their graphs should have run."""
    return _XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])


def wait(device: torch.device) -> None:
    """Wait until `device` has run all launched graphs."""
    xm.wait_device_ops([_real_name(device)])
