"""The place of this process in its run, and the signals that stop it. No jax."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

from ..config._cluster import ClusterOptions

Stop = Literal["interrupted", "preempted"]
Handler = Callable[[int, FrameType | None], None] | signal.Handlers

# The environment variable of a supervised process that holds the process id of its parent.
CHILD = "JAXSLOWMO_CHILD"
# And that which holds the descriptor of a file for what its runtime writes to stderr.
RUNTIME_LOG = "JAXSLOWMO_RUNTIME_LOG"
# The code with which it tells its parent that not all processes came together in time.
TOO_LATE = 76
# Variables of launchers that number the processes: one that every process has, and their number.
_COUNTS = {"SLURM_PROCID": "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The place of this process among the processes of a run.

    Attributes:
      index: index of this process, 0 <= index < count; process 0 writes the files of the run.
      count: number of processes.
      watch: `Watch` that ends this process when another has failed; None for a single process.
    """

    index: int = 0
    count: int = 1
    watch: Any = None  # not typed, because the module of `Watch` loads jax

    @property
    def is_first(self) -> bool:
        """True if this is process 0, which writes and prints for all."""
        return self.index == 0


ALONE = Cluster()


def supervisor() -> int | None:
    """Return the process id of the parent that supervises this process; None without one."""
    return int(os.environ[CHILD]) if CHILD in os.environ else None


def is_one_of_several(config: ClusterOptions, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the run of this process has further processes.

    It detects a launcher by the environment variables that `jax.distributed.initialize` reads. A
    Cloud TPU VM outside of Kubernetes sets none, and needs `--cluster gcetpu`.
    """
    if config.num_processes is not None:
        return config.num_processes > 1
    if config.cluster != "auto":
        return config.cluster != "none"
    is_job = {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"} <= environ.keys()
    has_hosts = "," in environ.get("TPU_WORKER_HOSTNAMES", "")
    return is_job or has_hosts or known_processes(config, environ) is not None


def known_processes(config: ClusterOptions, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes from options or environment; None if only joining tells it."""
    if config.num_processes is not None:
        return config.num_processes
    counts = (environ.get(count, "") for mark, count in _COUNTS.items() if mark in environ)
    return next((int(count) for count in counts if count.isdigit() and int(count) > 1), None)


@contextlib.contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Run the block with these handlers for signals; only in the main thread."""
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopOnSignal(contextlib.ExitStack):
    """A context in which Ctrl-C and SIGTERM end the training after the step in progress.

    An exception in the middle of a step would leave a state whose buffers are donated. A second
    Ctrl-C raises as usual. With several processes all must stop after the same step: the runtime
    handles SIGTERM and agrees on a step, and the parent of the process handles Ctrl-C.

    Attributes:
      reason: reason to stop; None while this process knows of none.
    """

    def __init__(self, cluster: Cluster = ALONE) -> None:
        super().__init__()
        self.reason: Stop | None = None
        self._calls, self._is_waiting = 0, False
        self._has_peers, self._watch = cluster.count > 1, cluster.watch

    def after_step(self, kind: Hashable = ()) -> Stop | None:
        """Return the reason to stop after this step, or None to go on; call it after every step.

        Args:
          kind: kind of the step; steps of one kind take about the same time.

        Communication: none between devices. After SIGTERM to one of several processes, messages
          through the coordinator, to agree on a step that none has passed.
        """
        if self._watch is not None:
            self._watch.step_done(kind)
        if self._has_peers:
            from jax.experimental import multihost_utils

            # jax agrees on the number of a call, and assumes 1 before the first call. With numbers
            # of steps a run that resumes at step 20 would never reach the agreed number.
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self.reason = "preempted"
        return self.reason

    def besides_steps(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for work that takes longer than a step."""
        return contextlib.nullcontext() if self._watch is None else self._watch.besides_steps()

    @contextlib.contextmanager
    def ends_wait(self) -> Iterator[None]:
        """Run the block, which changes no state and waits for others, until it or a signal ends it.

        With several processes signals are not Python's, and `Watch` ends what takes too long.
        """
        self._is_waiting = True
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            self._is_waiting = False

    def __enter__(self) -> "StopOnSignal":
        handlers: Mapping[int, Handler]
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._terminate}
        if threading.current_thread() is threading.main_thread():
            self.enter_context(
                handling({signal.SIGINT: signal.SIG_IGN} if self._has_peers else handlers)
            )
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        is_second, self.reason = self.reason == "interrupted", "interrupted"
        if is_second or self._is_waiting:
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or "preempted"
        if self._is_waiting:
            raise KeyboardInterrupt
