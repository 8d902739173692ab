"""Joining the other processes of a run."""

import jax

from .._errors import CommandError
from ..config._cluster import ClusterConfig
from ._address import bind_address
from ._launchers import Cluster


def join_cluster(config: ClusterConfig) -> Cluster:
    """Connects to the other processes: before anything else touches a device.

    Raises:
      CommandError: where they cannot be found or do not come in time, or process 0 cannot listen
        where it should.
    """
    given = {
        "coordinator_address": config.coordinator,
        "num_processes": config.num_processes,
        "process_id": config.process_id,
    }
    try:
        jax.distributed.initialize(
            **given,
            cluster_detection_method=None if config.cluster == "auto" else config.cluster,
            initialization_timeout=config.startup_timeout,
            coordinator_bind_address=bind_address(config),
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "found by the launcher"
        raise CommandError(
            f"the processes did not come together within --startup-timeout "
            f"{config.startup_timeout} s (coordinator {where}): {str(error).splitlines()[0]}"
        ) from error
    return Cluster(jax.process_index(), jax.process_count())
