"""Options that only `jaxslowmo train` has: the processes that train together."""

import dataclasses
import ipaddress
import re
from typing import Annotated

from ._options import Count, Natural, OneOf, Options, Range


def bare_host(name: str, host: str) -> str:
    """Return the name or the address of a host without brackets.

    Raises:
      ValueError: `host` can be neither; the message names the option `name`.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        is_six = ":" in host and bool(ipaddress.IPv6Address(bare))
    except ValueError:
        is_six = False
    if not is_six and not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"{name} must be a host's name or address, got {host or 'nothing'}")
    return bare


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """Return host and port of a text like "node0:1234" or "[::1]:1234", the host without brackets.

    Raises:
      ValueError: the text is neither; the message names the option `name`.
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon):
        raise ValueError(f"{name} must be HOST:PORT, got {text}")
    if ":" in host and not host.startswith("["):
        raise ValueError(f"{name} must be HOST:PORT, an IPv6 address in brackets, got {text}")
    return bare_host(name, host), parse_port(name, port)


def parse_port(name: str, text: str) -> int:
    """Return the number of a port that is given as text.

    Raises:
      ValueError: it is not from 1 to 65535; the message names the option `name`.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 2**16):
        raise ValueError(f"the port of {name} must be 1 to 65535, got {text or 'nothing'}")
    return int(text)


@dataclasses.dataclass(frozen=True)
class ClusterOptions(Options):
    """The processes that train together, and how they find each other."""

    HEADING = "Cluster"

    coordinator: Annotated[str | None, host_and_port] = None
    """HOST:PORT at which process 0 waits for the others; needs --num-processes and --process-id.
    Under a launcher that jax knows, none of the three is needed."""
    coordinator_bind: Annotated[str | None, bare_host] = None
    """Address at which process 0 listens (default: that of --coordinator); 0.0.0.0 for all of its
    host."""
    num_processes: Count | None = None
    """Processes that train together."""
    process_id: Natural | None = None
    """Number of this process, from 0."""
    cluster: Annotated[
        str, OneOf("auto", "none", "slurm", "ompi", "mpi4py", "k8s", "gcetpu", "gketpu")
    ] = "auto"
    """Launcher that tells a process its number: detected from the environment (auto), none, or a
    launcher that jax.distributed knows."""
    heartbeat_timeout: Annotated[int, Range(2)] = 10
    """Treat a process as lost after this many seconds of silence. Pauses of up to half of it are
    always tolerated."""
    startup_timeout: Count = 300
    """Seconds to wait at the start for the other processes."""
    stall_timeout: Natural = 1800
    """End all processes, with code 75, after this many seconds in which no step ended and nothing
    was saved; 0: never."""
    process_logs: bool = False
    """Write the output of every process to OUT/logs/process-ID.txt."""
    restarts: Natural = 0
    """With several processes: start this process again up to so many times without a newer
    checkpoint, when another process was lost, this one was killed, or a disk was full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        place = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [name for name, value in place.items() if value is None]
        if 0 < len(missing) < len(place):
            raise ValueError(
                f"{', '.join(place)} go together; {', '.join(missing)} must be given too"
            )
        if self.process_id is not None and not self.process_id < (self.num_processes or 0):
            raise ValueError(
                f"--process-id must be < --num-processes, got {self.process_id} and "
                f"{self.num_processes}"
            )
