"""Hosts are joined by shaped links and leave nothing behind."""

import os
import shutil
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


def runs(pid: str) -> bool:
    """One that has ended stays in the table until its parent asks."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_hosts_reach_each_other_under_their_own_names_over_shaped_links():
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    talk = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.sendto(bytes(1000), (sys.argv[1], 9))"
    )
    with hosts(2, "200mbit") as found:
        assert [h.address for h in found] == ["192.0.2.1", "192.0.2.2"]
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


def test_nothing_is_left_after_an_error_or_when_building_fails():
    before = of_this_process()
    left = []

    def work() -> None:
        with hosts(2) as found:
            left.append(subprocess.Popen([*found[1].command, "sleep", "100"]))
            time.sleep(0.2)
            assert of_this_process() > before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert left[0].wait(timeout=120) == -signal.SIGKILL
    assert of_this_process() == before
    with pytest.raises(RuntimeError, match=r"tc .* rate"), hosts(2, "fast"):
        pass
    assert of_this_process() == before


def test_the_next_run_removes_what_a_killed_one_left():
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
    assert runs(pid)
    remove_leftovers()
    assert not set(names) & set(shown("ip", "netns", "list").split())
    assert not any((namespaces._ETC / name).exists() for name in names)
    deadline = time.monotonic() + 120
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_with(tools: Path, *command: str) -> tuple[int, str]:
    """With a folder as all of PATH."""
    env = {**os.environ, "PATH": str(tools)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *command], cwd=HERE, env=env, **pipes)
    return done.returncode, done.stdout


def test_what_is_missing_is_said_and_is_no_success(tmp_path):
    """`make test-cluster` asks this program first."""
    code, said = run_with(tmp_path, "namespaces.py")
    assert code == 1
    assert "not run, and not passed: missing here: `ip` (iproute2), `tc` (iproute2)" in said
    ask = "import os, namespaces; os.seteuid(65534); print(namespaces.missing())"
    assert run_with(Path(shutil.which("ip") or "").parent, "-c", ask) == (0, "['root']\n")


def test_without_mpirun_only_its_test_is_left_out_and_the_last_line_says_so(tmp_path):
    for name in ("ip", "tc"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    line = "test-cluster: test_mpirun.py was left out, and not passed: `mpirun` (openmpi-bin) is "
    assert run_with(tmp_path, "namespaces.py") == (0, f"{line}missing.\n")
    collect = ("-m", "pytest", "--collect-only", "-q", "test_mpirun.py", "test_equal.py")
    code, said = run_with(tmp_path, *collect)
    assert (code, said.splitlines()[-1]) == (0, f"{line}missing.")
    assert "(1 deselected)" in said
    assert "test_mpirun.py::" not in said
