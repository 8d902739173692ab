"""Which devices run the replicas."""

import dataclasses
import os

import jax

import jaxslowmo as js

from ._config import TrainConfig
from ._errors import CommandError

# Each CPU device is a thread pool and a copy of everything; more of them help nobody.
MAX_CPU_DEVICES = 64
# The devices of a laptop share its cores, so one may come late to a collective; by default the
# process aborts after 40 seconds of that.
_PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the replicas run.

    Attributes:
        mesh: for the training step, with the axes "replica" and, for two levels, "device".
        description: the same in words.
        is_virtual: replicas are `vmap`ped on one device and nothing is sent.
        is_cpu: the devices are parts of the host.
    """

    mesh: jax.sharding.Mesh | js.VirtualMesh
    description: str
    is_virtual: bool
    is_cpu: bool


def choose_mesh(config: TrainConfig) -> Placement:
    """Devices for the replicas: call it before anything else touches a device.

    "devices" is one device per replica (times `devices_per_replica`), on CPU as many as are
    needed; "virtual" is all replicas on one device; "auto" is devices where there are enough of
    them, else virtual.

    Raises:
        CommandError: if there are fewer devices than "devices" needs.
    """
    axes = {"replica": config.replicas}
    if config.devices_per_replica > 1:
        axes["device"] = config.devices_per_replica
    needed = config.replicas * config.devices_per_replica
    if config.execution != "virtual" and needed <= MAX_CPU_DEVICES:
        _ask_for_cpu_devices(needed)
    devices = jax.devices()
    is_cpu = devices[0].platform == "cpu"
    kind = "CPU device" if is_cpu else devices[0].device_kind
    if config.execution == "virtual" or (config.execution == "auto" and len(devices) < needed):
        each = "" if len(axes) == 1 else f" of {config.devices_per_replica} virtual devices"
        return Placement(
            mesh=js.virtual_mesh(axes),
            description=f"{config.replicas} virtual replicas{each} on one {kind}",
            is_virtual=True,
            is_cpu=is_cpu,
        )
    if len(devices) < needed:
        raise CommandError(
            f"--replicas {config.replicas} with --devices-per-replica "
            f"{config.devices_per_replica} need {needed} devices, found {len(devices)} ({kind}): "
            "use fewer, or --execution virtual"
        )
    each = "" if len(axes) == 1 else f" of {config.devices_per_replica} devices"
    return Placement(
        mesh=js.make_mesh(axes, devices=devices),
        description=f"{config.replicas} replicas{each} on {needed} of {len(devices)} {kind}s",
        is_virtual=False,
        is_cpu=is_cpu,
    )


def _ask_for_cpu_devices(count: int) -> None:
    """As many CPU devices as that, unless the user chose a number or jax has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    new = [flag for flag in _PATIENCE if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0
    if chosen or "xla_force_host_platform_device_count" in flags:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices are in use already: there are as many as there are
        return
