"""The backends that drive the devices: torch_xla, or jax by torchax."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

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
      is_started: function that returns whether this process has touched a device.
      make_master: class of the model in shared memory.
      make_reader: class of the reader of samples.
      open_group: function that opens all devices, in the device process.
    """

    name, extra, needs = "torch_xla", "torch", ("torch_xla",)

    def __init__(self):
        from .. import runtime
        from ..xla_worker import DeviceGroup, TPUDataManager, TPUSynchronizer

        self.is_started = runtime.is_started
        self.make_master, self.make_reader = TPUSynchronizer, TPUDataManager
        self.open_group: Callable[..., Group] = DeviceGroup


class Torchax:
    """The backend torchax: one jax program over all devices.

    Only the device process imports jax.
    """

    name, extra = "torchax", "torchax"
    needs = ("torchax", "jax")  # torch_xla contains a package torchax, but no jax
    make_master, make_reader = MasterModel, SampleReader

    @staticmethod
    def is_started() -> bool:
        """Return whether the program has imported and started jax."""
        if "jax" not in sys.modules:
            return False
        from ..on_jax.device_process import has_devices

        return has_devices()

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
        raise ValueError(f"`backend` must be one of {[*BACKENDS]}, or None, got {name!r}.")
    missing = {
        backend: [module for module in kind.needs if find_spec(module) is None]
        for backend, kind in BACKENDS.items()
    }
    name = name or next((backend for backend in BACKENDS if not missing[backend]), "torch_xla")
    if missing[name]:
        raise not_installed(missing[name][0], BACKENDS[name].extra, f"TPUManager over {name}")
    return BACKENDS[name]()
