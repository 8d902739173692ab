"""Which process of how many this is, as its options or its environment tell; without jax."""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config._cluster import ClusterConfig

if TYPE_CHECKING:
    from ._watch import Watch  # with jax

# In the environment of a process that its parent supervises, and of a parent that
# `jaxslowmo launch` started: the process id of whom started it.
CHILD = "JAXSLOWMO_CHILD"
LAUNCHED = "JAXSLOWMO_LAUNCHED"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
      index: which one this is; process 0 writes what there is one of.
      count: how many there are.
      watch: ends this one when another has failed; None for one that is alone.
    """

    index: int = 0
    count: int = 1
    watch: "Watch | None" = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.index == 0


ALONE = Cluster()


def is_child() -> bool:
    """Whether this process has a parent that supervises it."""
    return CHILD in os.environ


def started_by(environ: Mapping[str, str] = os.environ) -> int | None:
    """Process id of the process of ours that started this one; None if none did."""
    # A supervised process has the variable of its parent, too.
    pid = environ.get(CHILD, environ.get(LAUNCHED, ""))
    return int(pid) if pid.isdecimal() else None


def is_one_of_several(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a run consists of more processes than this one.

    The launchers are those that `jax.distributed.initialize` detects by environment variables. A
    Cloud TPU VM outside of Kubernetes tells only its metadata server: there `--cluster gcetpu`.
    """
    if config.num_processes is not None:
        return config.num_processes > 1
    if config.cluster != "auto":
        return config.cluster != "none"
    return launcher(environ) is not None


def known_processes(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> int | None:
    """How many processes there are, where options or environment say it before they are joined."""
    if config.num_processes is not None:
        return config.num_processes
    counts = {"slurm": "SLURM_NTASKS", "ompi": "OMPI_COMM_WORLD_SIZE"}
    name = launcher(environ)
    return _count(environ, counts[name]) if name in counts else None


def launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher that started this process as one of several; None where there is none."""
    if "SLURM_PROCID" in environ and _count(environ, "SLURM_NTASKS") > 1:
        return "slurm"
    if _count(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        return "ompi"
    if "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ:
        return "gketpu" if "TPU_WORKER_HOSTNAMES" in environ else "k8s"
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "gketpu"
    return None


def _count(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else 0
