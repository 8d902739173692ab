"""How the device process ends when the main process does."""

import itertools
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from models import TRACED_ONCE, samples
from torch import nn

from support.waiting import PATIENCE_SECONDS, wait_until
from torch_compat import TPUManager

DATA = samples(8)
ROOT = Path(__file__).parents[3]


# A program's handlers are not for the device process, which is ended by that signal.
FORGETFUL = """
import signal, sys, torch
from torch_compat import TPUManager
signal.signal(signal.SIGTERM, lambda *_: None)
def data():
    while True:
        yield torch.ones(2)
class Model(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x).sum(),)
manager = TPUManager(Model(2, 2), data(), nprocs=2, start=True)
print(manager.step()[1], manager.pid, flush=True)
assert "jax" not in sys.modules  # it is the device process' alone
"""


def test_a_fresh_program_that_forgets_shutdown_ends_and_prints_what_it_prints():
    """On a machine without TPU, with no setting that says so to jax."""
    here = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL],
        cwd=ROOT,
        env=here | {"PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    count, pid = done.stdout.split()
    assert count == "2"
    assert not Path(f"/proc/{pid}").exists()


SLEEPS_AT = 1 if TRACED_ONCE else 2
IN_A_STEP = mp.get_context("fork").Event()


class Sleeps(nn.Linear):
    """A forward pass does not return: the second one where there is one."""

    def __init__(self):
        super().__init__(64, 1)
        self.calls = 0

    def forward(self, x, y):
        self.calls += 1
        if self.calls == SLEEPS_AT:
            IN_A_STEP.set()
            time.sleep(2 * PATIENCE_SECONDS)
        return (super().forward(x).sum(),)


def _hold_manager(connection) -> None:
    manager = TPUManager(Sleeps(), itertools.cycle(DATA), nprocs=1, start=True)
    connection.send(manager.pid)
    for _ in range(SLEEPS_AT):
        manager.step()


def test_the_device_process_ends_when_the_main_process_is_killed_in_a_step():
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold_manager, args=(theirs,))
    holder.start()
    theirs.close()  # or a holder that fails would be waited for
    pid = ours.recv()
    assert IN_A_STEP.wait(PATIENCE_SECONDS)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    wait_until(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
