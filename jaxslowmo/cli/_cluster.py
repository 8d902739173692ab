"""Joining the other processes of a run."""

import dataclasses

import jax

from ._cluster_config import ClusterConfig
from ._errors import CommandError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
        index: which one this is; process 0 writes what there is one of.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.index == 0

    def reached_stop(self, step: int) -> bool:
        """Whether all processes are to stop after this step, because one of them got SIGTERM.

        To be asked after every step by all: they agree on a step that none has passed.

        Communication: none between devices; messages through the coordinator once one is asked.
        """
        if self.count == 1:
            return False
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)


ALONE = Cluster()


def join_cluster(config: ClusterConfig) -> Cluster:
    """Connects to the other processes: before anything else touches a device.

    Raises:
        CommandError: where they cannot be found or do not come in time.
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
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "found by the launcher"
        raise CommandError(
            f"the processes did not come together within --startup-timeout "
            f"{config.startup_timeout} s (coordinator {where}): {str(error).splitlines()[0]}"
        ) from error
    return Cluster(jax.process_index(), jax.process_count())
