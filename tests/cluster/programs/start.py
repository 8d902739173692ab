"""Start jax as one of several processes, or alone; imported before anything touches a device."""

import sys

import jax

PORT = 9911


def start(devices: int) -> tuple[int, int]:
    """Rank and number of processes, the first two arguments of the program; devices are local."""
    rank, count = int(sys.argv[1]), int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"192.0.2.1:{PORT}",
            count,
            rank,
            initialization_timeout=300,
            heartbeat_timeout_seconds=30,
        )
    return rank, count
