"""Options of `jaxslowmo train` alone: the processes that train together."""

import dataclasses

from ._fields import Checked, option

CLUSTERS = ("auto", "none", "slurm", "ompi", "mpi4py", "k8s", "gcetpu", "gketpu")
_CLUSTER = "Cluster"


@dataclasses.dataclass(frozen=True)
class ClusterConfig(Checked):
    """Which processes train together."""

    coordinator: str | None = option(
        None,
        "HOST:PORT at which process 0 waits for the others; with --num-processes and "
        "--process-id. Under a launcher that jax knows none of the three is needed.",
        panel=_CLUSTER,
    )
    num_processes: int | None = option(
        None, "Processes that train together.", panel=_CLUSTER, least=1
    )
    process_id: int | None = option(None, "Which of them this is, from 0.", panel=_CLUSTER, least=0)
    cluster: str = option(
        "auto",
        "The launcher that tells a process its place: found by its environment (auto), none, or "
        "the one of jax.distributed that is named.",
        panel=_CLUSTER,
        choices=CLUSTERS,
    )
    heartbeat_timeout: int = option(
        10, "Seconds after which a silent process is given up.", panel=_CLUSTER, least=2
    )
    startup_timeout: int = option(
        300, "Seconds to wait at the start for the other processes.", panel=_CLUSTER, least=1
    )
    stall_timeout: int = option(
        1800,
        "Seconds in which no step ends and nothing is saved after which all processes end, with "
        "code 75; 0: wait for ever.",
        panel=_CLUSTER,
        least=0,
    )
    process_logs: bool = option(
        False, "Every process writes OUT/logs/process-ID.txt.", panel=_CLUSTER
    )
    restarts: int = option(
        0,
        "With several processes: how often each starts again from the last checkpoint when "
        "another was lost, or itself was killed.",
        panel=_CLUSTER,
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            raise ValueError(
                f"{', '.join(given)} go together; {', '.join(missing)} must be given too"
            )
        if self.coordinator is None:
            return
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"--coordinator must be HOST:PORT, got {self.coordinator}")
        if self.process_id is not None and not self.process_id < (self.num_processes or 0):
            raise ValueError(
                f"--process-id must be < --num-processes, got {self.process_id} and "
                f"{self.num_processes}"
            )
