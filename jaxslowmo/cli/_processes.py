"""The place of this process in its run, and the signals that stop it. No jax."""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping
from types import FrameType
from typing import Any

from ._config import ClusterConfig
from ._errors import CommandError

# The environment variable of a supervised process that holds the process id of its parent.
CHILD = "JAXSLOWMO_CHILD"
# And that which holds the descriptor of a file for what its runtime writes to stderr.
RUNTIME_LOG = "JAXSLOWMO_RUNTIME_LOG"
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


def is_one_of_several(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> bool:
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


def known_processes(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes from options or environment; None if only joining tells it."""
    if config.num_processes is not None:
        return config.num_processes
    counts = (environ.get(count, "") for mark, count in _COUNTS.items() if mark in environ)
    return next((int(count) for count in counts if count.isdigit() and int(count) > 1), None)


def bind_address(config: ClusterConfig) -> str | None:
    """Return the HOST:PORT at which process 0 listens; None: jax decides.

    Checked before jax uses it: its runtime ends with a segmentation fault where it cannot listen,
    and looks for a host without an address until the startup timeout.

    Raises:
      CommandError: a host has no address, an address is not of this host, or a port is taken.
    """
    if config.coordinator is None:
        return None
    host, _, port = config.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise CommandError(f"--coordinator must be HOST:PORT, got {config.coordinator}")
    addresses = _addresses(host, int(port))
    if config.process_id != 0:
        return None
    if config.coordinator_bind is not None:
        addresses = _addresses(config.coordinator_bind, int(port))
    refused = OSError()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            # As the runtime does: connections of an earlier run do not block the port.
            socket.create_server(address, family=family).close()
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
            continue
        bare = address[0]
        if ipaddress.ip_address(bare).is_loopback and bare != host and "localhost" not in host:
            # As of its own name in Debian's /etc/hosts.
            warnings.warn(
                f"{host} is {bare} on this host, where no other host reaches it: mend /etc/hosts, "
                "or set coordinator_bind to an address of the network",
                stacklevel=2,
            )
        return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
    why = os.strerror(refused.errno or 0)
    raise CommandError(f"--coordinator: process 0 cannot listen at {host}:{port}: {why}")


def _addresses(host: str, port: int) -> list[tuple]:
    """Return the socket addresses of a host: those on a network first, loopback addresses last."""
    try:
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a name
        raise CommandError(f"--coordinator: {host} has no address: {error}") from error
    addresses: list[tuple] = [info[4] for info in infos]
    return sorted(addresses, key=lambda address: ipaddress.ip_address(address[0]).is_loopback)


def write_stderr(text: str) -> None:
    """Write to stderr at once; ignore the error of a pipe that is no longer read."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def separate_runtime_output() -> None:
    """Separate what Python writes from what C++ writes.

    The parent keeps what C++ writes to stderr. To stdout gloo writes that it is connected, and no
    errors: nobody needs that.
    """
    if RUNTIME_LOG in os.environ:
        sys.stdout.flush()
        sys.stdout = os.fdopen(
            os.dup(1), "w", 1, encoding=sys.stdout.encoding, errors=sys.stdout.errors
        )
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(int(os.environ[RUNTIME_LOG]), 2)


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
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
      reason: "interrupted" or "preempted"; None while this process knows of no reason to stop.
    """

    def __init__(self, cluster: Cluster = ALONE) -> None:
        super().__init__()
        self.reason: str | None = None
        self._calls, self._is_waiting = 0, False
        self._has_handlers = threading.current_thread() is threading.main_thread()
        self._has_peers, self._watch = cluster.count > 1, cluster.watch

    def after_step(self, kind: Hashable = ()) -> str | None:
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

    def outside_steps(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for work that takes longer than a step."""
        return contextlib.nullcontext() if self._watch is None else self._watch.outside_steps()

    @contextlib.contextmanager
    def interruptible_wait(self) -> Iterator[None]:
        """Run the block, which changes no state and waits for others, until it or a signal ends it.

        A signal may come just before the block waits, and its exception may be lost in a callback:
        a timer looks for it every second. With several processes signals are not Python's, and
        `Watch` ends what takes too long.
        """

        def look(number: int, frame: FrameType | None) -> None:
            if self.reason is not None:
                raise KeyboardInterrupt

        has_timer = self._has_handlers and not self._has_peers and hasattr(signal, "setitimer")
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_is_waiting", False)
            if has_timer:
                stack.enter_context(signal_handlers({signal.SIGALRM: look}))
                stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
                signal.setitimer(signal.ITIMER_REAL, 1, 1)
            self._is_waiting = True
            yield

    def __enter__(self) -> "StopOnSignal":
        handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._signal)
        if self._has_peers:
            handlers = {signal.SIGINT: signal.SIG_IGN}
        if self._has_handlers:
            self.enter_context(signal_handlers(handlers))
        return self

    def _signal(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self.reason == "interrupted"
        if number == signal.SIGINT:
            self.reason = "interrupted"
        self.reason = self.reason or "preempted"
        if is_second or self._is_waiting:
            raise KeyboardInterrupt
