"""The machine that a benchmark ran on, for its results."""

import os
import platform


def host() -> dict[str, str | int]:
    """Return processor, cores of this process and Python; it needs neither jax nor torch."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 0,
        "python": platform.python_version(),
    }


def describe() -> dict[str, str | int]:
    """Return what `host` does, the devices of jax and its versions."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    return host() | {
        "devices": f"{len(jax.devices())} x {device.platform} {device.device_kind}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }
