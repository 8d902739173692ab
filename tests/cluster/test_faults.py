"""Hosts whose process is killed or cut off, and what the others make of it.

Several deaths in one run are among the faults of `test_failures.py`.
"""

import os
import signal
import subprocess

import pytest
from faults.stand import FOR_EVER, OF_THREE, Stand, steps_saved

HEARTBEAT = 10  # the default
# The heartbeat, some seconds to notice and to leave; several times that beside other work.
WITHIN = 10 * (HEARTBEAT + 15)
LOST = "error: another process died or cannot be reached (details: "


@pytest.fixture
def trained(request, four_hosts, programs, tmp_path):
    """A run on as many hosts as asked for, past its first checkpoint."""
    with Stand(tmp_path / "try", programs, hosts=four_hosts[: request.param]) as stand:
        stand.settings |= OF_THREE if request.param == 3 else {}
        run = stand.train(*FOR_EVER, "--checkpoint-every", "10")
        run.until(lambda: steps_saved(stand.out), "a checkpoint")
        run.strike()
        yield stand, run


@pytest.mark.parametrize("trained", [3], indirect=True)
def test_a_coordinator_that_is_killed(trained):
    stand, run = trained
    os.kill(stand.trainers()[0], signal.SIGKILL)
    run.ends(137, 75, within=WITHIN)
    assert run.codes == (137, 75, 75)
    assert "error: this process was killed by SIGKILL; the last saved" in run.err(0)
    for said in map(run.err, (1, 2)):
        assert said.count("\n") == 1, said
        assert said.startswith(LOST)
        assert any(f"step is {step}, in {stand.out}" in said for step in steps_saved(stand.out))


# Fewer start sooner.
@pytest.mark.parametrize("trained", [2], indirect=True)
def test_one_that_cannot_be_reached(trained, four_hosts):
    """That one, too, sees no more than that the coordinator does not answer."""
    stand, run = trained
    link = [*four_hosts[1].command, "ip", "link", "set", "eth0"]
    subprocess.run([*link, "down"], check=True)
    run.ends(75, within=WITHIN)
    subprocess.run([*link, "up"], check=True)
    assert run.err(0).startswith(LOST)
    assert run.err(1).startswith(LOST)
    assert len([*stand.out.glob("logs/killed-*.txt")]) == 2
