"""The machine that a benchmark ran on, for its results."""

import os
import platform

import jax
import jaxlib


def describe() -> dict[str, str | int]:
    """Processor, cores, devices and versions."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    device = jax.devices()[0]
    return {
        "processor": name,
        "cores": os.cpu_count() or 0,
        "devices": f"{len(jax.devices())} x {device.platform} {device.device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }
