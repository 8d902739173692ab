"""Hosts are joined by shaped links and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from namespaces import hosts, remove_leftovers, set_rate

HERE = Path(__file__).parent


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_this_process() -> set[str]:
    names = {line.split()[0] for line in shown("ip", "netns", "list").splitlines()}
    etc = namespaces._ETC
    names |= {path.name for path in etc.iterdir()} if etc.exists() else set()
    return {name for name in names if name.startswith(f"{namespaces.PREFIX}-{os.getpid()}-")}


def exists(process: int) -> bool:
    """Whether it runs: one that has ended stays in the table until its parent asks."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_hosts_reach_each_other_under_their_own_names():
    before = of_this_process()
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    with hosts(2) as found:
        assert [h.address for h in found] == ["192.0.2.1", "192.0.2.2"]
        for host, other in zip(found, found[::-1], strict=True):
            assert shown(*host.command, sys.executable, "-c", ask).strip() == host.address
            sent = host.sent()
            talk = (
                "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
                "s.sendto(bytes(1000), (sys.argv[1], 9))"
            )
            shown(*host.command, sys.executable, "-c", talk, other.address)
            assert 1000 <= host.sent() - sent < 3000
    assert of_this_process() == before


def test_both_ends_of_every_link_are_shaped():
    with hosts(2, "200mbit") as found:
        hub = found[0].name.rpartition("-")[0] + "-hub"
        ends = [(h.name, "eth0") for h in found] + [(hub, "port0"), (hub, "port1")]
        for name, interface in ends:
            assert "rate 200Mbit" in shown("tc", "-n", name, "qdisc", "show", "dev", interface)
        set_rate(found, "50mbit")
        for name, interface in ends:
            assert "rate 50Mbit" in shown("tc", "-n", name, "qdisc", "show", "dev", interface)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error):
    before = of_this_process()
    left = []

    def work() -> None:
        with hosts(2) as found:
            left.append(subprocess.Popen([*found[1].command, "sleep", "100"]))
            time.sleep(0.2)
            assert of_this_process() > before
            raise error

    with pytest.raises(error):
        work()
    assert left[0].wait(timeout=120) == -signal.SIGKILL
    assert of_this_process() == before


def test_nothing_is_left_when_building_fails():
    before = of_this_process()
    with pytest.raises(RuntimeError, match=r"tc .* rate"), hosts(2, "fast"):
        pass
    assert of_this_process() == before


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    program = (
        "import subprocess, time, namespaces\n"
        "with namespaces.hosts(2) as found:\n"
        "    p = subprocess.Popen([*found[0].command, 'sleep', '100'], stdout=-3)\n"
        "    time.sleep(0.3)\n"
        "    print(p.pid, *[h.name for h in found], flush=True)\n"
        "    time.sleep(100)\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    pid, *names = killed.stdout.readline().split()
    remove_leftovers()  # of a run that goes on: they stay
    assert set(names) <= set(shown("ip", "netns", "list").split())
    killed.kill()
    killed.communicate()
    assert exists(int(pid))
    remove_leftovers()
    assert not set(names) & set(shown("ip", "netns", "list").split())
    assert not any((namespaces._ETC / name).exists() for name in names)
    deadline = time.monotonic() + 120
    while exists(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not exists(int(pid))


def test_what_is_missing_is_said_and_is_no_success(tmp_path):
    """`make test-cluster` asks this program first."""
    script = str(HERE / "namespaces.py")
    bare = subprocess.run(
        [sys.executable, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert bare.returncode == 1
    assert "not run, and not passed: missing here: `ip` (iproute2), `tc` (iproute2)" in bare.stderr
    ask = "import os, namespaces; os.seteuid(65534); print(namespaces.missing())"
    nobody = subprocess.run([sys.executable, "-c", ask], cwd=HERE, capture_output=True, text=True)
    assert nobody.stdout == "['root']\n"
