"""Options of `jaxslowmo train` alone: processes, checkpoints, and what to do about faults."""

import dataclasses

from ._fields import Checked, option

CLUSTERS = ("auto", "none", "slurm", "ompi", "mpi4py", "k8s", "gcetpu", "gketpu")
ON_NAN = ("stop", "rollback")
_CLUSTER, _CHECKPOINTS = "Cluster", "Checkpoints"


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


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """What a run keeps of itself, and what it does when its numbers are no longer finite."""

    checkpoint_every: int = option(
        0,
        "Steps between checkpoints in OUT/checkpoints; 0: only when SIGTERM or Ctrl-C ends the "
        "run early.",
        panel=_CHECKPOINTS,
        least=0,
    )
    keep: int = option(3, "Checkpoints to keep, the newest.", panel=_CHECKPOINTS, least=1)
    resume: bool = option(
        False,
        "Go on from the newest checkpoint in --out; from scratch where there is none.",
        panel=_CHECKPOINTS,
    )
    fallback: bool = option(
        False,
        "With --resume: where the newest checkpoint is damaged, take the one before.",
        panel=_CHECKPOINTS,
    )
    export: bool = option(
        False, "Write the consensus model to OUT/model at the end.", panel=_CHECKPOINTS
    )
    check_parameters: bool = option(
        False,
        "Before every exchange of parameters ask all replicas whether theirs are finite (4 bytes), "
        "and do not exchange where one's are not, but do as --on-nan says.",
        panel=_CHECKPOINTS,
    )
    on_nan: str = option(
        "stop",
        "When the loss is not finite: stop, or go back to the last checkpoint and leave out the "
        "batches since then.",
        panel=_CHECKPOINTS,
        choices=ON_NAN,
    )
    max_rollbacks: int = option(
        3, "Of --on-nan rollback: after so many, stop.", panel=_CHECKPOINTS, least=1
    )
