"""The address at which process 0 listens for the others, checked before jax uses it. No jax.

The runtime of jax ends with a segmentation fault where it cannot listen, and keeps looking for a
host without an address until the startup timeout.
"""

import errno
import ipaddress
import os
import socket
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from .._errors import CommandError, usage_errors
from ..config._cluster import ClusterConfig, bare_host, host_and_port, parse_port

# Environment variables that jax reads: HOST:PORT where process 0 listens, and the port that
# launchers set.
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PORT = "JAX_COORDINATOR_PORT"
_COORDINATOR, _COORDINATOR_BIND = "--coordinator", "--coordinator-bind"
# Process 0 is a gRPC server, which sends first: a SETTINGS frame of HTTP/2. Other programs may wait
# for the client, so the probe sends the greeting of a client and an empty SETTINGS frame.
_SETTINGS = 4
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_CONNECT_SECONDS = 1.0
# The threads of the server send the frame as soon as a client connects. Only a machine on which no
# thread runs for that long is slower.
_ANSWER_SECONDS = 5.0


def bind_address(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the HOST:PORT at which process 0 listens; None: jax decides.

    Returns:
      In process 0, with `--coordinator`: the address of `--coordinator-bind`, else of
      `JAX_COORDINATOR_BIND_ADDRESS`, else of the host of `--coordinator`. Under a launcher, which
      names the coordinator: `--coordinator-bind` with the port of the launcher. Else None.

    Raises:
      CommandError: a host has no address, an address is not of this host, or a port is taken.
    """
    if config.coordinator is None:
        return _under_a_launcher(config.coordinator_bind, environ)
    host, port = host_and_port(_COORDINATOR, config.coordinator)
    addresses = _addresses(_COORDINATOR, host, port)
    if config.process_id != 0:
        return None
    if config.coordinator_bind is not None:
        bare = bare_host(_COORDINATOR_BIND, config.coordinator_bind)
        return _listening(_COORDINATOR_BIND, _addresses(_COORDINATOR_BIND, bare, port)).joined
    if _BIND in environ:
        with usage_errors():
            bind = host_and_port(_BIND, environ[_BIND])
        return _listening(_BIND, _addresses(_BIND, *bind)).joined
    chosen = _listening(_COORDINATOR, addresses)
    _warn_of_loopback(host, chosen)
    return chosen.joined


def refuse_taken_port(config: ClusterConfig) -> None:
    """Raise `CommandError` if another program has the coordinator's port, before jax is imported.

    Process 0 tries to listen there. The other processes try to connect, since they would look for
    process 0 at that port alone, and look at what answers. Call it at the first start only: when a
    run starts again, its own ending process 0 may still have the port.
    """
    if config.coordinator is None:
        return
    if config.process_id == 0:
        with warnings.catch_warnings(action="ignore"):  # the process that listens warns later
            bind_address(config)
    else:
        _check_answer(_addresses(_COORDINATOR, *host_and_port(_COORDINATOR, config.coordinator))[0])


class _Address(NamedTuple):
    family: socket.AddressFamily
    sockaddr: tuple

    @property
    def host(self) -> str:
        return self.sockaddr[0]

    @property
    def joined(self) -> str:
        return _joined(*self.sockaddr[:2])

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def _under_a_launcher(bind: str | None, environ: Mapping[str, str]) -> str | None:
    if bind is None:
        return None
    if _PORT not in environ:
        raise CommandError(
            f"{_COORDINATOR_BIND} needs {_COORDINATOR}, or {_PORT} in the environment of all "
            f"processes, where a launcher tells the coordinator"
        )
    with usage_errors():
        return _joined(bare_host(_COORDINATOR_BIND, bind), parse_port(_PORT, environ[_PORT]))


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(name: str, host: str, port: int) -> list[_Address]:
    """Return the addresses of a host: those on a network first, loopback addresses last."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: the text cannot be a name.
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise CommandError(f"{name}: {host} has no address: {reason}") from error
    addresses = [_Address(family, sockaddr) for family, _, _, _, sockaddr in infos]
    return sorted(addresses, key=lambda address: address.is_loopback)


def _listening(name: str, addresses: list[_Address]) -> _Address:
    """Return the first address at which this process can listen, or raise `CommandError`.

    Args:
      name: option or environment variable that gave the addresses, for messages.
      addresses: one or more addresses to try.
    """
    refused = OSError()
    for address in addresses:
        try:
            with socket.socket(address.family, socket.SOCK_STREAM) as probe:
                # The runtime sets this, too: connections of an earlier run do not block the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address.sockaddr)
            return address
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    where = addresses[0].joined
    if refused.errno == errno.EADDRINUSE:
        what = f"port {addresses[0].sockaddr[1]} of this host is taken by another program"
    elif refused.errno == errno.EADDRNOTAVAIL:
        what = (
            f"{where} is not an address of this host, where process 0 runs; {_COORDINATOR_BIND} "
            f"(0.0.0.0: at all) says where it listens instead"
        )
    else:
        what = f"process 0 cannot listen at {where}: {refused.strerror}"
    raise CommandError(f"{name}: {what}") from refused


def _check_answer(address: _Address) -> None:
    """Raise `CommandError` if a program that is no gRPC server accepts connections at an address.

    It is no error if no program accepts them, since process 0 may start later. Nor is it one if the
    connection is closed without an answer: the proxy of a container that has not started does so.
    """
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(address.sockaddr)
            probe.settimeout(_ANSWER_SECONDS)
            try:
                probe.sendall(_GREETING)
                answer = probe.recv(9)
            except TimeoutError:
                what = "does not answer as process 0 would"
            else:
                # One frame of HTTP/2: length (3 bytes), type, flags, stream (4 bytes).
                if not answer or answer[3:4] == bytes((_SETTINGS,)):
                    return
                what = f"answers {answer!r}, as process 0 would not"
    except OSError:
        return
    raise CommandError(f"{_COORDINATOR}: {address.joined} is taken by another program: it {what}")


def _warn_of_loopback(host: str, address: _Address) -> None:
    """Warn if a host has a loopback address for its own name (127.0.1.1 in Debian's /etc/hosts)."""
    if not address.is_loopback or host == address.host or "localhost" in host:
        return
    warnings.warn(
        f"{host} is {address.host} on this host, where no other host reaches it: mend /etc/hosts, "
        f"or give {_COORDINATOR_BIND} an address of the network",
        stacklevel=2,
    )
