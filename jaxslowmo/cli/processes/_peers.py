"""This process among those of its run: its place, and what makes it stop; without jax."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

from ..config._cluster import ClusterConfig

Stop = Literal["interrupted", "preempted"]
Handler = Callable[[int, FrameType | None], None] | signal.Handlers

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
      watch: a `Watch`, which ends this one when another has failed; None for one that is alone.
    """

    index: int = 0
    count: int = 1
    watch: Any = None  # whose module loads jax

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


@contextlib.contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Within it the signals have these handlers; only for the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopOnSignal(contextlib.ExitStack):
    """Context in which Ctrl-C and SIGTERM only ask for an end after the step in progress.

    An exception in the middle of a step would leave a state whose buffers are given away. A second
    Ctrl-C raises as usual. Where a run has several processes, all must stop after the same step:
    SIGTERM goes to the runtime, which agrees on one, and Ctrl-C is left to the process's parent.

    Attributes:
      asked: why to stop, as far as this process knows.
    """

    def __init__(self, cluster: Cluster = ALONE) -> None:
        super().__init__()
        self.asked: Stop | None = None
        self._calls = 0
        self._has_peers, self._watch = cluster.count > 1, cluster.watch

    def after_step(self, kind: Hashable = ()) -> Stop | None:
        """Why to stop after this step; None to go on. To be asked after every step.

        Args:
          kind: of the step; those of one kind take about as long as each other.

        Communication: none between devices; between processes messages through the coordinator once
          one of them got SIGTERM, to agree on a step that none has passed.
        """
        if self._watch is not None:
            self._watch.step_done(kind)
        if self._has_peers:
            from jax.experimental import multihost_utils

            # Processes agree on the number of a call, which is 1 where none was made yet: a run
            # that goes on at step 20 would never come by it, were these its steps.
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self.asked = "preempted"
        return self.asked

    def besides_steps(self) -> contextlib.AbstractContextManager[None]:
        """To be around what takes longer than a step."""
        return contextlib.nullcontext() if self._watch is None else self._watch.besides_steps()

    def __enter__(self) -> "StopOnSignal":
        own: Mapping[int, Handler]
        own = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._terminate}
        if threading.current_thread() is threading.main_thread():
            self.enter_context(
                handling({signal.SIGINT: signal.SIG_IGN} if self._has_peers else own)
            )
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked == "interrupted":
            raise KeyboardInterrupt
        self.asked = "interrupted"

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or "preempted"
