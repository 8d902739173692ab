"""Processes that are killed, stopped, cut off or told to leave, and what the others make of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kills import PROCESSES, compare
from processes import running
from small_runs import LIGHT, quick, small_text

HEARTBEAT = 10
TRAIN = (
    *(sys.executable, "-m", "jaxslowmo", "train", "--preset", "tiny", *LIGHT),
    *("--steps", "1000000", "--checkpoint-every", "10", "--log-every", "1"),
    *("--heartbeat-timeout", str(HEARTBEAT)),
)


def test_a_run_whose_processes_are_killed_ends_as_if_none_had_been(tmp_path):
    """Four times, one at a time; `python tests/cluster/kills.py 50` does it more often."""
    found = compare(tmp_path, 4, seed=0)
    assert len(found) == 4
    assert sum(kill.while_saving for kill in found) == 1
    assert {kill.victim.split()[0] for kill in found} == {"trainer", "parent"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What one start has compiled, for the others."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def trained(request, four_hosts, programs, tmp_path):
    """Processes on as many hosts, four or as many as asked for, past their first checkpoint."""
    text, out = small_text(tmp_path / "text"), tmp_path / "out"
    count = getattr(request, "param", PROCESSES)
    commands = [
        [
            *TRAIN,
            *("--replicas", str(count), "--num-processes", str(count), "--process-id", str(rank)),
            *("--data", str(text), "--out", str(out)),
            *("--coordinator", f"{four_hosts[0].address}:9000"),
        ]
        for rank in range(count)
    ]
    with running(four_hosts, commands, tmp_path / "printed", quick(programs)) as started:
        deadline = time.monotonic() + 300
        while not steps_saved(out):
            assert all(process.poll() is None for process in started.processes), started.err(0)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield started, out


def trainer_of(process: subprocess.Popen) -> int:
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}")
    (child,) = (tasks / "children").read_text().split()
    return int(child)


def steps_saved(out):
    # Others are being written.
    return [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]


def ends_of_survivors(started, lost: int) -> list[str]:
    """What each survivor said, when all have left with 75; their last lines name the process."""
    begin = time.monotonic()
    others = [i for i in range(len(started.processes)) if i != lost]
    for i in others:
        # The heartbeat, some seconds to notice and to leave; several times that beside other work.
        left = 10 * (HEARTBEAT + 15) - (time.monotonic() - begin)
        assert started.processes[i].wait(max(0.01, left)) == 75
    return [started.err(i) for i in others]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_that_is_killed_or_stopped(trained, number):
    """Others that are killed: above; that are as silent as one that is stopped: below."""
    started, out = trained
    os.kill(trainer_of(started.processes[0]), number)
    name = "process 0 (the coordinator)"
    for said in ends_of_survivors(started, 0):
        assert said.count("\n") == 1, said
        assert said.startswith(f"error: {name} died or cannot be reached; the last saved step is ")
        assert any(f"step is {step}, in {out}" in said for step in steps_saved(out))
    if number == signal.SIGKILL:
        assert started.processes[0].wait(60) == 128 + 9
        assert "error: this process was killed by SIGKILL; the last saved" in started.err(0)


# Fewer start sooner.
two_processes = pytest.mark.parametrize("trained", [2], indirect=True)


@two_processes
def test_one_that_cannot_be_reached(trained, four_hosts):
    started, _ = trained
    subprocess.run([*four_hosts[1].command, "ip", "link", "set", "eth0", "down"], check=True)
    for said in ends_of_survivors(started, 1):
        assert said.startswith("error: process 1 died or cannot be reached; ")
    # That one sees no more than that the coordinator does not answer.
    assert started.processes[1].wait(10 * (HEARTBEAT + 15)) == 75
    assert "error: process 0 (the coordinator) died or cannot be reached" in started.err(1)
    subprocess.run([*four_hosts[1].command, "ip", "link", "set", "eth0", "up"], check=True)


@two_processes
def test_one_that_is_preempted_stops_all_at_one_step(trained):
    started, out = trained
    started.processes[1].terminate()
    started.wait(300)  # all with code 0
    assert [started.err(0), started.err(1)] == ["", ""]
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert max(steps_saved(out)) == last
    assert f"Saved at step {last}; --resume goes on from there." in started.out(0)
