"""Hosts are joined by shaped links and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time

import namespaces
import pytest
from namespaces import hosts, remove_leftovers, set_rate


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def there() -> set[str]:
    """The namespaces of such hosts, and the folders of their files."""
    etc = namespaces._ETC
    folders = {path.name for path in etc.iterdir()} if etc.exists() else set()
    return {*namespaces._names()} | {x for x in folders if x.startswith(namespaces.PREFIX)}


def test_hosts_reach_each_other_under_their_own_names_over_shaped_links():
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    talk = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.sendto(bytes(1000), (sys.argv[1], 9))"
    )
    with hosts(2, "200mbit") as found:
        for host, other in zip(found, found[::-1], strict=True):
            assert shown(*host.command, sys.executable, "-c", ask).strip() == host.address
            sent = host.sent()
            shown(*host.command, sys.executable, "-c", talk, other.address)
            assert 1000 <= host.sent() - sent < 3000
        hub = found[0].name.rpartition("-")[0] + "-hub"
        ends = [(h.name, "eth0") for h in found] + [(hub, "port0"), (hub, "port1")]
        for rate in (200, 50):
            set_rate(found, f"{rate}mbit")
            for name, interface in ends:
                qdisc = shown("tc", "-n", name, "qdisc", "show", "dev", interface)
                assert f"rate {rate}Mbit" in qdisc


def test_nothing_is_left_after_an_error_nor_by_the_run_after_one_that_was_killed():
    before, left = there(), []

    def work() -> None:
        with hosts(2) as found:
            left.append(subprocess.Popen([*found[1].command, "sleep", "100"]))
            time.sleep(0.2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert left[0].wait(timeout=120) == -signal.SIGKILL
    assert there() == before
    program = (
        "import time, namespaces\n"
        "with namespaces.hosts(2) as found:\n"
        "    print(*[h.name for h in found], flush=True)\n"
        "    time.sleep(100)\n"
    )
    command, here = [sys.executable, "-c", program], os.path.dirname(namespaces.__file__)
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        names = {*killed.stdout.readline().split()}
        remove_leftovers()  # of a run that goes on: they stay
        assert names <= there()
        killed.kill()
    remove_leftovers()
    assert not names & there()
