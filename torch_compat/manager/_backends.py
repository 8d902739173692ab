"""What drives the devices: torch_xla, or jax by torchax."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

from torch import nn

from ..master import MasterModel
from ..reader import SampleReader
from ..worker import Group, WorkerOptions
from ._arguments import as_count


class Backend(Protocol):
    """The parts of a `TPUManager` that differ between what drives the devices."""

    def check_untouched(self) -> None:
        """Raise `RuntimeError` if this process has started devices; a fork cannot take them."""

    def as_devices(self, nprocs: Any) -> int | None:
        """`nprocs`, checked; None where only the device process can count the devices."""
        ...

    def make_master(
        self, model: nn.Module, post_init: Callable[[nn.Module], object] | None, compress: bool
    ) -> MasterModel:
        """The model in shared memory."""
        ...

    def make_reader(self, dataset: Any, nprocs: int | None, prefetch: int) -> SampleReader:
        """The samples; not started."""
        ...

    def open_group(self, master: Any, reader: Any, options: WorkerOptions) -> Group:
        """In the device process: its devices."""
        ...


class TorchXla:
    """torch_xla: a replica and a thread for each device."""

    def __init__(self):
        from .. import runtime

        self._runtime = runtime

    def check_untouched(self) -> None:
        """Whether an XLA device has been touched."""
        if self._runtime.is_started():
            raise RuntimeError(
                "This process has touched an XLA device, and a forked process cannot take its "
                "runtime over. Start TPUManager before anything calls torch_xla.device() or moves "
                "a tensor to a device (in a notebook: restart the kernel)."
            )

    def as_devices(self, nprocs: Any) -> int | None:
        """Known here on CPU devices."""
        runtime = self._runtime
        configured = runtime.configured_cpu_devices()
        if nprocs is None:
            # Elsewhere only the process that starts the runtime can count them.
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

    def make_master(
        self, model: nn.Module, post_init: Callable[[nn.Module], object] | None, compress: bool
    ) -> MasterModel:
        """A `TPUSynchronizer`."""
        from ..synchronizer import TPUSynchronizer

        return TPUSynchronizer(model, post_init, compress)

    def make_reader(self, dataset: Any, nprocs: int | None, prefetch: int) -> SampleReader:
        """A `TPUDataManager`."""
        from ..data import TPUDataManager

        return TPUDataManager(dataset, nprocs, prefetch, start=False)

    def open_group(self, master: Any, reader: Any, options: WorkerOptions) -> Group:
        """All XLA devices."""
        from ..xla_worker import DeviceGroup

        return DeviceGroup(master, reader, options)


class Torchax:
    """jax by torchax: one program over all devices.

    jax is imported in the device process alone.
    """

    def check_untouched(self) -> None:
        """Whether a jax that the program has imported has started."""
        if "jax" in sys.modules:
            from ..on_jax.device_process import is_started

            if is_started():
                raise RuntimeError(
                    "This process has started jax, whose devices a forked process cannot take "
                    "over. Start TPUManager before anything asks jax for a device or computes "
                    "with it (in a notebook: restart the kernel)."
                )

    def as_devices(self, nprocs: Any) -> int | None:
        """The device process counts the devices."""
        return None if nprocs is None else as_count("nprocs", nprocs)

    def make_master(
        self, model: nn.Module, post_init: Callable[[nn.Module], object] | None, compress: bool
    ) -> MasterModel:
        """A plain `MasterModel`."""
        return MasterModel(model, post_init, compress)

    def make_reader(self, dataset: Any, nprocs: int | None, prefetch: int) -> SampleReader:
        """A plain `SampleReader`."""
        return SampleReader(dataset, nprocs, prefetch, start=False)

    def open_group(self, master: Any, reader: Any, options: WorkerOptions) -> Group:
        """All devices of jax's platform."""
        from ..on_jax.device_process import MeshGroup

        return MeshGroup(master, reader, options)


BACKENDS: dict[str, Callable[[], Backend]] = {"torch_xla": TorchXla, "torchax": Torchax}
# torch_xla brings a torchax of its own along, but no jax.
_NEEDS = {"torch_xla": ("torch_xla",), "torchax": ("torchax", "jax")}


def choose_backend(name: str | None) -> tuple[str, Backend]:
    """The backend of that name; None for torch_xla where it is installed, else torchax.

    Raises:
      ValueError: for any other name.
      ModuleNotFoundError: if it is not installed, or none is.
    """
    if name not in (None, *BACKENDS):
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"`backend` must be one of {names}, or None, got {name!r}.")
    missing = {
        backend: [module for module in modules if find_spec(module) is None]
        for backend, modules in _NEEDS.items()
    }
    wanted = name or next((backend for backend in BACKENDS if not missing[backend]), None)
    if wanted is None:
        raise ModuleNotFoundError(
            "TPUManager needs torch_xla, or torchax and jax, and neither is installed; the extras "
            "`torch` and `torchax` have them: pip install 'jaxslowmo[torch]' (in a checkout: "
            "'.[torch]')",
            name="torch_xla",
        )
    if missing[wanted]:
        extra = {"torch_xla": "torch", "torchax": "torchax"}[wanted]
        raise ModuleNotFoundError(
            f"TPUManager(backend={wanted!r}) needs {' and '.join(missing[wanted])}, which is not "
            f"installed; the extra `{extra}` has it: pip install 'jaxslowmo[{extra}]' (in a "
            f"checkout: '.[{extra}]')",
            name=missing[wanted][0],
        )
    return wanted, BACKENDS[wanted]()
