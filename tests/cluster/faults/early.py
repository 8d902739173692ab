"""Signals in the first seconds, between two starts, and to launchers that cannot pass them on."""

import signal
import time

from faults.registry import fault
from faults.stand import FOR_EVER, Run, Stand, last_step

_FIRST_SECONDS = 4.0
_PROMISE = "ends within 15 s; no restart; nothing left"
_WITHIN = 15


def _early(stand: Stand, number: int, how: str) -> None:
    options = (*FOR_EVER, "--checkpoint-every", "10")
    if how == "launch":
        run = stand.launch(*options, restarts=3)
    else:
        run = stand.train(*options, "--restarts", "3")
    time.sleep(stand.random.uniform(0, _FIRST_SECONDS))
    run.send(number)
    # 0: so far that it could be saved. Before Python has begun a signal simply ends it.
    run.ends(*((0, 143) if number == signal.SIGTERM else (130,)), within=_WITHIN)
    assert "starting again" not in run.err()
    assert not stand.left_after(2)


for _number, _how in (
    (signal.SIGTERM, "launch"),
    (signal.SIGINT, "launch"),
    (signal.SIGTERM, "both parents"),
):
    _name = f"{_number.name} to {_how} within the first 4 s, --restarts 3"
    fault(_name, _PROMISE, _number, _how)(_early)


def _crashing(stand: Stand) -> Run:
    """A run that crashes at every start."""
    fault_ = {"process": 1, "event": "open", "path": r"text/3\.txt"}
    fault_ |= {"do": "signal", "signal": int(signal.SIGSEGV)}
    run = stand.launch(*FOR_EVER, restarts=9, fault=fault_)
    run.until(lambda: "starting" in run.err(), "a restart")
    return run


@fault("SIGTERM to launch during a crash loop", "ends within 15 s with 143; no further start")
def in_a_crash_loop(stand: Stand) -> None:
    run = _crashing(stand)
    time.sleep(stand.random.uniform(0, 6))
    starts = run.err().count("starting")
    run.send(signal.SIGTERM)
    run.ends(143, within=_WITHIN)
    assert run.err().count("starting") == starts


@fault("SIGTERM to launch between two starts", "ends within 2 s with 143")
def between_two_starts(stand: Stand) -> None:
    run = _crashing(stand)
    run.until(lambda: len(stand.processes()) == 1, "a wait")
    run.send(signal.SIGTERM)
    run.ends(143, within=2)
    assert "ended by SIGTERM" in run.err()


@fault("launch is killed by SIGKILL within 2 s", "nothing of it is left 8 s later")
def orphans(stand: Stand) -> None:
    run = stand.launch(*FOR_EVER)
    time.sleep(stand.random.uniform(0, 2))
    run.send(signal.SIGKILL)
    run.ends(137)
    assert not stand.left_after(8)
    before = last_step(stand.out)
    time.sleep(1)
    assert last_step(stand.out) == before


@fault("a parent of `train` is killed by SIGKILL within 2 s", "its trainer is gone 8 s later")
def orphans_of_train(stand: Stand) -> None:
    run = stand.one(
        *FOR_EVER, "--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "1"
    )
    time.sleep(stand.random.uniform(0, 2))
    run.send(signal.SIGKILL)
    run.ends(137)
    assert not stand.left_after(8)
