"""The backends that drive the devices: torch_xla, or jax by torchax."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..checks import as_count
from ..errors import not_installed
from ..master import MasterModel
from ..reader import SampleReader
from ..worker import Group, WorkerOptions


class TorchXla:
    """The backend torch_xla: a replica and a thread for each device.

    Attributes:
      name: name of the backend.
      extra: the extra of jaxslowmo that installs it.
      needs: modules that it needs.
      make_master: class of the model in shared memory.
      make_reader: class of the reader of samples.
      open_group: function that opens all devices, in the device process.
    """

    name, extra, needs = "torch_xla", "torch", ("torch_xla",)

    def __init__(self):
        from .. import runtime
        from ..xla_worker import DeviceGroup, TPUDataManager, TPUSynchronizer

        self._runtime = runtime
        self.make_master, self.make_reader = TPUSynchronizer, TPUDataManager
        self.open_group: Callable[..., Group] = DeviceGroup

    def check_untouched(self) -> None:
        """Raise `RuntimeError` if an XLA device has been touched."""
        if self._runtime.is_started():
            raise RuntimeError(
                "This process has touched an XLA device, which a forked process cannot take over: "
                "start TPUManager first (in a notebook: restart the kernel)."
            )

    def as_devices(self, nprocs: Any) -> int | None:
        """Check and return `nprocs`, which is known on CPU devices."""
        runtime = self._runtime
        configured = runtime.configured_cpu_devices()
        if nprocs is None:
            # On other devices only the process that starts the runtime can count them.
            return (configured or 1) if runtime.on_cpu() else None
        nprocs = as_count("nprocs", nprocs)
        if runtime.on_cpu():
            runtime.check_cpu_devices(nprocs)
            if configured not in (None, nprocs):
                raise ValueError(
                    f"`nprocs` must be the number of XLA devices there are, {configured} CPU "
                    f"devices (CPU_NUM_DEVICES), got {nprocs}. Leave it out to use them all."
                )
        return nprocs


class Torchax:
    """The backend torchax: one jax program over all devices.

    Only the device process imports jax.
    """

    name, extra = "torchax", "torchax"
    needs = ("torchax", "jax")  # torch_xla contains a package torchax, but no jax
    make_master, make_reader = MasterModel, SampleReader

    def check_untouched(self) -> None:
        """Raise `RuntimeError` if the program has imported and started jax."""
        if "jax" in sys.modules:
            from ..on_jax.device_process import has_devices

            if has_devices():
                raise RuntimeError(
                    "This process has started jax, whose devices a forked process cannot take "
                    "over: start TPUManager first (in a notebook: restart the kernel)."
                )

    def as_devices(self, nprocs: Any) -> int | None:
        """Check and return `nprocs`; the device process counts the devices."""
        return None if nprocs is None else as_count("nprocs", nprocs)

    @staticmethod
    def open_group(master: Any, reader: Any, options: WorkerOptions) -> Group:
        """Open all devices of jax's platform."""
        from ..on_jax.device_process import MeshGroup

        return MeshGroup(master, reader, options)


# Each has the same methods and attributes, documented in `TorchXla`.
Backend = TorchXla | Torchax
BACKENDS: dict[str, type[Backend]] = {"torch_xla": TorchXla, "torchax": Torchax}


def choose_backend(name: str | None) -> Backend:
    """Return the backend of a name; None is torch_xla if installed, else torchax.

    Raises:
      ValueError: an unknown name.
      ModuleNotFoundError: the backend is not installed, or none is.
    """
    if name not in (None, *BACKENDS):
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"`backend` must be one of {names}, or None, got {name!r}.")
    missing = {
        backend: [module for module in kind.needs if find_spec(module) is None]
        for backend, kind in BACKENDS.items()
    }
    name = name or next((backend for backend in BACKENDS if not missing[backend]), "torch_xla")
    if missing[name]:
        raise not_installed(missing[name][0], BACKENDS[name].extra, f"TPUManager over {name}")
    return BACKENDS[name]()
