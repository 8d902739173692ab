"""Hosts are joined by shaped links."""

import subprocess
import sys

from namespaces import hosts, set_rate


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
