"""Signals in the first seconds, between two starts, and to launchers that cannot pass them on."""

import signal
import time

from faults.registry import fault
from faults.stand import FOR_EVER, Stand

_PROMISE = "ends within 15 s; no restart; nothing left"
_WITHIN = 15


@fault("SIGTERM to launch within the first 4 s, --restarts 3", _PROMISE, signal.SIGTERM)
@fault("SIGINT to launch within the first 4 s, --restarts 3", _PROMISE, signal.SIGINT)
def early(stand: Stand, number: int) -> None:
    run = stand.launch(*FOR_EVER, "--checkpoint-every", "10", restarts=3)
    time.sleep(stand.random.uniform(0, 4))
    run.send(number)
    # 0: so far that it could be saved. Before Python has begun a signal simply ends it.
    run.ends(*((0, 143) if number == signal.SIGTERM else (130,)), within=_WITHIN)
    assert "starting again" not in run.err()
    assert not stand.left_after(2)


@fault("SIGTERM to launch between two starts", "ends within 2 s with 143")
def between_two_starts(stand: Stand) -> None:
    """Of a run that crashes at every start."""
    crash = {"process": 1, "event": "open", "path": r"text/3\.txt", "do": "signal"}
    run = stand.launch(*FOR_EVER, restarts=9, fault={**crash, "signal": int(signal.SIGSEGV)})
    run.until(lambda: "starting" in run.err(), "a restart")
    run.until(lambda: len(stand.processes()) == 1, "a wait")
    starts = run.err().count("starting")
    run.send(signal.SIGTERM)
    run.ends(143, within=2)
    assert "ended by SIGTERM" in run.err()
    assert run.err().count("starting") == starts


@fault("launch is killed by SIGKILL within 2 s", "nothing of it is left 8 s later")
def orphans(stand: Stand) -> None:
    run = stand.launch(*FOR_EVER)
    time.sleep(stand.random.uniform(0, 2))
    run.send(signal.SIGKILL)
    run.ends(137)
    assert not stand.left_after(8)
