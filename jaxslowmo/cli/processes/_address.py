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
    name, bind = _COORDINATOR_BIND, config.coordinator_bind
    with usage_errors():
        if config.coordinator is None:
            if bind is None:
                return None
            if _PORT not in environ:
                raise CommandError(
                    f"{name} needs {_COORDINATOR}, or {_PORT} in the environment of all processes, "
                    f"where a launcher tells the coordinator"
                )
            return _joined(bare_host(name, bind), parse_port(_PORT, environ[_PORT]))
        host, port = host_and_port(_COORDINATOR, config.coordinator)
        addresses = _addresses(_COORDINATOR, host, port)
        if config.process_id != 0:
            return None
        if bind is None and _BIND not in environ:
            address = _listening(_COORDINATOR, addresses)
            _warn_of_loopback(host, address)
            return _joined(address, port)
        if bind is None:
            name, (host, port) = _BIND, host_and_port(_BIND, environ[_BIND])
        else:
            host = bare_host(name, bind)
    return _joined(_listening(name, _addresses(name, host, port)), port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(name: str, host: str, port: int) -> list[tuple]:
    """Return the socket addresses of a host: those on a network first, loopback addresses last."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a name
        raise CommandError(f"{name}: {host} has no address: {error}") from error
    addresses: list[tuple] = [info[4] for info in infos]
    return sorted(addresses, key=lambda address: _is_loopback(address[0]))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _listening(name: str, addresses: list[tuple]) -> str:
    """Return the first host at which this process can listen, or raise `CommandError`."""
    refused = OSError()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            # As the runtime does: connections of an earlier run do not block the port.
            socket.create_server(address, family=family).close()
            return address[0]
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    raise CommandError(
        f"{name}: process 0 cannot listen at {_joined(*addresses[0][:2])} of this host: "
        f"{os.strerror(refused.errno or 0)}; {_COORDINATOR_BIND} (0.0.0.0: all addresses) and "
        f"another port change that"
    ) from refused


def _warn_of_loopback(host: str, address: str) -> None:
    """Warn if a host has a loopback address for its own name (127.0.1.1 in Debian's /etc/hosts)."""
    if _is_loopback(address) and host != address and "localhost" not in host:
        warnings.warn(
            f"{host} is {address} on this host, where no other host reaches it: mend /etc/hosts, "
            f"or give {_COORDINATOR_BIND} an address of the network",
            stacklevel=3,
        )
