"""Where the coordinator listens, and addresses that cannot be right."""

import os
import re
import socket
from pathlib import Path

from faults.registry import fault
from faults.stand import FOR_EVER, Stand

_LISTENS = "0A"  # linux/tcp_states.h, as in /proc/net/tcp
_LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
_WITHIN = 10


@fault("where does the coordinator of launch listen", "on the loopback address alone")
def listens(stand: Stand) -> None:
    run = stand.launch(*FOR_EVER)
    run.until_step(3)
    trainer = stand.trainers()[0]
    place = trainer.arguments[trainer.arguments.index("--coordinator") + 1]
    sockets = _sockets(trainer.pid)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == _LISTENS and int(port, 16) == int(place.rpartition(":")[2]):
                assert fields[9] in sockets
                found.append(host)
    assert found
    assert set(found) <= _LOOPBACK, found
    run.commands[0].kill()
    run.ends(137)


def _sockets(pid: int) -> set[str]:
    names = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {found[1] for name in names if (found := re.fullmatch(r"socket:\[(\d+)\]", name))}


def _refused(stand: Stand, coordinator: str, process: int = 0) -> None:
    place = ("--num-processes", "2", "--process-id", str(process))
    run = stand.one(*FOR_EVER, "--coordinator", coordinator, *place, "--restarts", "3")
    run.ends(2, within=_WITHIN)
    (line,) = run.err().splitlines()
    assert line.startswith("error: ")
    assert "--coordinator" in line, line


for _coordinator in ("127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:port", "no-such-host.invalid:1"):
    _promise = f"one line and code 2 within {_WITHIN} s"
    fault(f"--coordinator {_coordinator}", _promise, _coordinator)(_refused)
fault("an unknown host, process 1", _promise, "no-such-host.invalid:1", 1)(_refused)


@fault("the coordinator's port is taken", _promise, 0)
@fault("the coordinator's port is taken, process 1", _promise, 1)
def taken(stand: Stand, process: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _refused(stand, f"127.0.0.1:{other.getsockname()[1]}", process)
