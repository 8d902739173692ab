"""Hosts on one machine: network namespaces joined by shaped links.

Only the standard library: benchmarks and other environments import it too.

    with hosts(4, "200mbit") as (first, *others):
        subprocess.run([*first.command, "ping", "-c", "1", others[0].address])

Every host has one interface, `eth0`, whose other end is on a bridge in a namespace of its own, the
hub. Both ends are shaped, so a host neither sends nor receives faster than its rate. All
interfaces live in namespaces: where these are removed, nothing is left.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "jaxslowmo"
INTERFACE = "eth0"
# A queue of 200 ms; a burst above the 64 KiB that the kernel hands to an interface at once.
SHAPE = ("burst", "256kb", "latency", "200ms")
_NETWORK = "192.0.2"  # TEST-NET-1 of RFC 5737: addresses that nobody else has
_ETC = Path("/etc/netns")


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
      name: of the namespace.
      address: IPv4, of its only interface; what its hostname resolves to.
    """

    name: str
    address: str

    @property
    def command(self) -> list[str]:
        """What to put before a command that shall run on this host."""
        return ["ip", "netns", "exec", self.name]

    def sent(self) -> int:
        """Bytes that the interface has sent, headers included."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_run(*self.command, "cat", counter))


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """`count` hosts, removed at the end whatever happens, with what still runs on them.

    Args:
      count: 1 to 250.
      rate: of every link and direction, as tc writes it, such as "200mbit"; None: unshaped.

    Raises:
      RuntimeError: something that this needs is missing, see `missing`, or `ip` or `tc` failed.
    """
    remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{len(_names())}"
    found = [Host(f"{run}-{i}", f"{_NETWORK}.{i + 1}") for i in range(count)]
    hub = f"{run}-hub"
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge", "mcast_snooping", "0")
        _run("ip", "-n", hub, "link", "set", "hub", "up")
        for i, host in enumerate(found):
            _add(host, hub, f"port{i}", rate)
        yield found
    finally:
        for name in (*(host.name for host in found), hub):
            _remove(name)


def set_rate(found: list[Host], rate: str) -> None:
    """Another rate for the links of hosts that have one."""
    hub = found[0].name.rpartition("-")[0] + "-hub"
    for i, host in enumerate(found):
        for name, interface in ((host.name, INTERFACE), (hub, f"port{i}")):
            _shape(name, interface, rate, "replace")


def missing() -> list[str]:
    """What this machine lacks for `hosts`; nothing is left behind."""
    if sys.platform != "linux":
        return ["Linux"]
    lacks = [f"`{tool}` (iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        lacks.append("root")
    if lacks:
        return lacks
    try:
        with hosts(1, "100mbit"):
            return []
    except (RuntimeError, OSError) as error:
        return [f"network namespaces with shaped links ({error})"]


def remove_leftovers() -> None:
    """Remove the hosts of runs that were killed, and what still runs on them."""
    for name in _names():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-.*", name)
        if owner and _started(int(owner[1])) != int(owner[2]):
            _remove(name)


def _add(host: Host, hub: str, port: str, rate: str | None) -> None:
    _run("ip", "netns", "add", host.name)
    # gloo, in JAX and in torch, binds to the address that the hostname resolves to; `ip netns
    # exec` mounts this over /etc/hosts.
    etc = _ETC / host.name
    etc.mkdir(parents=True)
    names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
    (etc / "hosts").write_text(names)
    ends = ("peer", "name", port, "netns", hub)
    _run("ip", "link", "add", INTERFACE, "netns", host.name, "type", "veth", *ends)
    _run("ip", "-n", hub, "link", "set", port, "master", "hub", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _run("ip", "-n", host.name, "link", "set", interface, "up")
    if rate is not None:
        for name, interface in ((host.name, INTERFACE), (hub, port)):
            _shape(name, interface, rate, "add")


def _shape(name: str, interface: str, rate: str, verb: str) -> None:
    shape = ("root", "tbf", "rate", rate, *SHAPE)
    _run("tc", "-n", name, "qdisc", verb, "dev", interface, *shape)


def _remove(name: str) -> None:
    """End what runs in a namespace and remove it, if it is there."""
    if name in _names():
        # A namespace lives on, unnamed, while a process is in it.
        for process in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
    shutil.rmtree(_ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # other namespaces have files there
        _ETC.rmdir()


def _names() -> list[str]:
    found = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    return [name for name in found if name.startswith(f"{PREFIX}-")]


def _started(process: int) -> int | None:
    """When a process started, in ticks since the machine did: its number may be used again."""
    try:
        # The second field is a name in brackets, which may hold anything.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


if __name__ == "__main__":  # what `make test-cluster` asks first
    if lacks := missing():
        sys.exit(f"test-cluster: not run, and not passed: missing here: {', '.join(lacks)}.")
