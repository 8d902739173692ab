"""Where process 0 listens for the others, found and tried before the runtime does; without jax.

The runtime ends with a segmentation fault where it cannot listen, and looks for a host that has no
address until the time to start is over.
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

# Read by jax: where process 0 listens, as HOST:PORT; and the port that launchers tell.
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PORT = "JAX_COORDINATOR_PORT"
_COORDINATOR, _COORDINATOR_BIND = "--coordinator", "--coordinator-bind"
# A gRPC server, as process 0 is one, speaks first: with a SETTINGS frame of HTTP/2. The client's
# greeting, and an empty frame of it, is for programs that wait for a word.
_SETTINGS = 4
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_CONNECT_SECONDS = 1.0
# The server's own threads send it as soon as the connection is there: only a machine on which no
# thread gets a turn for as long is slower.
_ANSWER_SECONDS = 5.0


def bind_address(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """HOST:PORT at which process 0 is to listen; None leaves it to jax.

    Returns:
      Of process 0, where `--coordinator` is given: the address of `--coordinator-bind`, of
      `JAX_COORDINATOR_BIND_ADDRESS`, or else the one that the coordinator's host has there. Where a
      launcher tells the coordinator, what `--coordinator-bind` says. Else None.

    Raises:
      CommandError: for a host without an address, an address that is not of this host, or a port
        that is taken.
    """
    if config.coordinator is None:
        return _under_a_launcher(config.coordinator_bind, environ)
    host, port = host_and_port(_COORDINATOR, config.coordinator)
    found = _addresses(_COORDINATOR, host, port)
    if config.process_id != 0:
        return None
    if config.coordinator_bind is not None:
        bare = bare_host(_COORDINATOR_BIND, config.coordinator_bind)
        return _listening(_COORDINATOR_BIND, _addresses(_COORDINATOR_BIND, bare, port)).joined
    if _BIND in environ:
        with usage_errors():
            given = host_and_port(_BIND, environ[_BIND])
        return _listening(_BIND, _addresses(_BIND, *given)).joined
    chosen = _listening(_COORDINATOR, found)
    _warn_of_loopback(host, chosen)
    return chosen.joined


def refuse_taken_port(config: ClusterConfig) -> None:
    """Raise `CommandError` if another program has the coordinator's port, before jax is imported.

    Process 0 finds out by listening there. It cannot tell the others, which would look for it at
    that port alone, so they see by themselves who answers. It is meant for the first start: where a
    run starts again, what has the port may be the end of its own process 0.
    """
    if config.coordinator is None:
        return
    if config.process_id == 0:
        with warnings.catch_warnings(action="ignore"):  # the process that listens will warn
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
    """Those of a host, that of a network before that of this machine alone."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # Not even a name: UnicodeError.
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise CommandError(f"{name}: {host} has no address: {reason}") from error
    addresses = [_Address(family, sockaddr) for family, _, _, _, sockaddr in found]
    return sorted(addresses, key=lambda address: address.is_loopback)


def _listening(name: str, addresses: list[_Address]) -> _Address:
    """The first of some addresses at which this process can listen.

    Args:
      name: of the option, or the variable, that names them.
      addresses: one or more.
    """
    refused = OSError()
    for address in addresses:
        try:
            with socket.socket(address.family, socket.SOCK_STREAM) as probe:
                # As the runtime does: what is left of connections of an earlier run is no obstacle.
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
    """Raise `CommandError` if what accepts connections at an address is no gRPC server.

    That nobody accepts them is no error, since process 0 may come later. Nor is a connection that
    is closed without a word, as by the proxy of a container that has not started.
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
    """Of a name that its host gives to itself, as Debian does in /etc/hosts (127.0.1.1)."""
    if not address.is_loopback or host == address.host or "localhost" in host:
        return
    warnings.warn(
        f"{host} is {address.host} on this host, where no other host reaches it: mend /etc/hosts, "
        f"or give {_COORDINATOR_BIND} an address of the network",
        stacklevel=2,
    )
