"""The threads of torch's autograd engine that serve XLA devices.

The engine counts the devices once, at the first `backward()` of the process, and torch_xla 2.9
reports none before its runtime has started. A process that has differentiated on the host first,
or was forked from such a process, can therefore never run a backward pass on an XLA device:
torch fails with `INTERNAL ASSERT FAILED ... device_ready_queues_`.
"""

import ctypes
import os
import threading
from pathlib import Path

import torch

# Names of C++ functions. torch keeps its ABI within a release; `.venv-torch` pins the release.
_GET_ENGINE = "_ZN5torch8autograd6Engine18get_default_engineEv"
_START_THREADS = "_ZN5torch8autograd6Engine20start_device_threadsEv"
_LOCK = threading.Lock()
_ensured_in: int | None = None  # process id: a fork must check again


def ensure_autograd_threads(device: torch.device) -> None:
    """Make `backward()` work on `device` although autograd was used before the runtime started.

    Call it after the XLA runtime has started and before the first backward pass on a device, in
    every thread that may be first; only the first call in a process has an effect. It runs a
    backward pass over one element. If the engine has no thread for the device, its threads are
    started again, now that the devices can be counted.

    Raises:
      RuntimeError: there is no thread, and this build of torch does not export the engine's
        functions. Then start the devices before the first `backward()` of the process.
    """
    global _ensured_in
    with _LOCK:
        if _ensured_in != os.getpid():
            # torch 2.9 tells nowhere which threads its engine has. A backward pass of one element
            # that has no other reason to fail is the one way to see it.
            try:
                _differentiate(device)
            except RuntimeError:
                _start_threads()
                _differentiate(device)
            _ensured_in = os.getpid()


def _start_threads() -> None:
    try:
        path = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        # A forked process makes a new engine, which needs Python's GIL (PyDLL). The engine's
        # threads take the GIL themselves, so it must be free while they start (CDLL).
        get_engine = getattr(ctypes.PyDLL(path), _GET_ENGINE)
        start_threads = getattr(ctypes.CDLL(path), _START_THREADS)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            "backward() ran in this process, or the one it was forked from, before the XLA runtime "
            "started: start the devices, or TPUManager, before the first backward()."
        ) from error
    get_engine.restype = ctypes.c_void_p
    start_threads.argtypes, start_threads.restype = [ctypes.c_void_p], None
    start_threads(get_engine())


def _differentiate(device: torch.device) -> None:
    torch.zeros((), device=device, requires_grad=True).backward()
