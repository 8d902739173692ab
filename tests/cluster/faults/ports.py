"""Addresses at which the coordinator cannot be."""

import socket

from faults.registry import fault
from faults.stand import FOR_EVER, Stand

_WITHIN = 10
_REFUSED = f"one line and code 2 within {_WITHIN} s"


@fault("the coordinator's port is taken", _REFUSED, "127.0.0.1", 0)
@fault("an unknown host, process 1", _REFUSED, "no-such-host.invalid", 1)
def refused(stand: Stand, host: str, process: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"{host}:{other.getsockname()[1]}"
        number = ("--num-processes", "2", "--process-id", str(process))
        run = stand.one(*FOR_EVER, "--coordinator", place, *number, "--restarts", "3")
        run.ends(2, within=_WITHIN)
    (line,) = run.err().splitlines()
    assert line.startswith("error: ")
    assert "--coordinator" in line, line
