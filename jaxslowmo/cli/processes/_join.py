"""Joining the other processes of a run, and what an exchange that fails has to do with them."""

import contextlib
import os
import time
from collections.abc import Iterator

import jax

from .._errors import LOST_A_PROCESS, CommandError
from ..config._cluster import ClusterConfig
from ._launchers import Cluster
from ._supervise import PEER_FAILED

# Errors of the runtime that no other process can have caused: no memory left on a device, mostly.
_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


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


@contextlib.contextmanager
def peers_may_fail(heartbeat_timeout: int) -> Iterator[None]:
    """A failed exchange waits for the runtime to find out, and abort with, who is gone.

    An exchange of the devices, or a meeting of the processes for a checkpoint, which then fails.
    """
    try:
        yield
    except Exception as error:
        if not lost_a_peer(error):
            raise
        os.write(2, f"{PEER_FAILED}: {error}\n".encode())
        time.sleep(heartbeat_timeout + 5)
        os._exit(LOST_A_PROCESS)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether a lost process may have caused an error, or one that led to it."""
    while error is not None:
        # jax raises a failed exchange as a ValueError, too, where it dispatches it from C++.
        of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if of_runtime and not str(error).startswith(_OWN):
            return True
        error = error.__cause__ or error.__context__
    return False
