"""The address at which process 0 listens for the others, checked before jax uses it.

The runtime of jax ends with a segmentation fault where it cannot listen, and keeps looking for a
host without an address until the startup timeout.
"""

import errno
import ipaddress
import os
import socket
import warnings
from collections.abc import Mapping

from .._errors import CommandError, usage_errors
from ..config._cluster import ClusterOptions, bare_host, host_and_port, parse_port

# Environment variables that jax reads: HOST:PORT where process 0 listens, and the port that
# launchers set.
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PORT = "JAX_COORDINATOR_PORT"
_COORDINATOR, _COORDINATOR_BIND = "--coordinator", "--coordinator-bind"


def bind_address(config: ClusterOptions, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the HOST:PORT at which process 0 listens; None: jax decides.

    Returns:
      In process 0, with `--coordinator`: the address of `--coordinator-bind`, else of
      `JAX_COORDINATOR_BIND_ADDRESS`, else of the host of `--coordinator`. Under a launcher, which
      names the coordinator: `--coordinator-bind` with the port of the launcher. Else None.

    Raises:
      CommandError: a host has no address, an address is not of this host, or a port is taken.
    """
    with usage_errors():
        if config.coordinator is None:
            return _under_a_launcher(config.coordinator_bind, environ)
        name, (host, port) = _COORDINATOR, host_and_port(_COORDINATOR, config.coordinator)
        addresses = _addresses(name, host, port)
        if config.process_id != 0:
            return None
        if config.coordinator_bind is not None:
            name, host = _COORDINATOR_BIND, bare_host(_COORDINATOR_BIND, config.coordinator_bind)
            addresses = _addresses(name, host, port)
        elif _BIND in environ:
            name, (host, port) = _BIND, host_and_port(_BIND, environ[_BIND])
            addresses = _addresses(name, host, port)
    chosen = _listening(name, addresses)
    if name == _COORDINATOR:
        _warn_of_loopback(host, chosen)
    return _joined(chosen, port)


def _under_a_launcher(bind: str | None, environ: Mapping[str, str]) -> str | None:
    if bind is None:
        return None
    if _PORT not in environ:
        raise CommandError(
            f"{_COORDINATOR_BIND} needs {_COORDINATOR}, or {_PORT} in the environment of all "
            f"processes, where a launcher tells the coordinator"
        )
    return _joined(bare_host(_COORDINATOR_BIND, bind), parse_port(_PORT, environ[_PORT]))


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(name: str, host: str, port: int) -> list[tuple]:
    """Return the socket addresses of a host: those on a network first, loopback addresses last."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: the text cannot be a name.
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise CommandError(f"{name}: {host} has no address: {reason}") from error
    addresses: list[tuple] = [info[4] for info in infos]
    return sorted(addresses, key=lambda address: _is_loopback(address[0]))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _listening(name: str, addresses: list[tuple]) -> str:
    """Return the first host at which this process can listen, or raise `CommandError`.

    Args:
      name: option or environment variable that gave the addresses, for messages.
      addresses: one or more socket addresses to try.
    """
    refused = OSError()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # The runtime sets this, too: connections of an earlier run do not block the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            return address[0]
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    where = _joined(*addresses[0][:2])
    what = f"process 0 cannot listen at {where}: {refused.strerror}"
    if refused.errno == errno.EADDRINUSE:
        what = f"port {addresses[0][1]} of this host is taken by another program"
    elif refused.errno == errno.EADDRNOTAVAIL:
        what = (
            f"{where} is not an address of this host, where process 0 runs; {_COORDINATOR_BIND} "
            f"(0.0.0.0: at all) says where it listens instead"
        )
    raise CommandError(f"{name}: {what}") from refused


def _warn_of_loopback(host: str, address: str) -> None:
    """Warn if a host has a loopback address for its own name (127.0.1.1 in Debian's /etc/hosts)."""
    if _is_loopback(address) and host != address and "localhost" not in host:
        warnings.warn(
            f"{host} is {address} on this host, where no other host reaches it: mend /etc/hosts, "
            f"or give {_COORDINATOR_BIND} an address of the network",
            stacklevel=3,
        )
