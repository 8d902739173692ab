"""Processes of a run that are killed again and again."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from faults.registry import fault
from faults.stand import OF_THREE, Stand, is_saving, last_step

_PROCESSES = 3
_STEPS_PER_KILL = 6


@fault("a process of three is killed", "code 0; every number as if none had been", 1)
@fault("a process of three is killed, 20 times", "code 0; every number as if none had been", 20)
def killed(stand: Stand, kills: int) -> None:
    """By turns while a checkpoint is written, and at any time."""
    last = _STEPS_PER_KILL * (kills + 1)
    options = ("--replicas", str(_PROCESSES), "--steps", str(last), "--checkpoint-every", "4")
    stand.settings |= {**OF_THREE, "heartbeat_timeout": 2}
    launch: Any = {"processes": _PROCESSES}
    stand.launch(*options, **launch).ends(0)
    calm = _trajectory(stand.out)
    assert calm[-1]["step"] == last

    stand.out = stand.folder / "disturbed"
    run, gone = stand.launch(*options, restarts=kills, **launch), set[int]()

    def all_there() -> dict[int | None, int] | None:
        """By their numbers; none of them from the start before."""
        own = {process.index: process.pid for process in stand.trainers()}
        return own if len(own) == _PROCESSES and not gone & {*own.values()} else None

    for number in range(kills):
        there = run.until(all_there, "its processes")
        # Never so late that the run could end before.
        begun = last_step(stand.out)
        run.until_step(min(begun + stand.random.randint(1, _STEPS_PER_KILL), last - 2))
        if number % 2 == 0:
            run.until(lambda: is_saving(stand.out), "a checkpoint")
        else:
            time.sleep(stand.random.uniform(0, 0.05))
        os.kill(there[stand.random.randrange(_PROCESSES)], signal.SIGKILL)
        gone = {*there.values()}
    run.strike()
    run.ends(0)
    said = run.err().splitlines()
    assert sum(line.startswith("launch: process ") for line in said) == kills, said
    assert len(said) == kills, said
    assert _trajectory(stand.out) == calm


def _trajectory(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of every step, without the clock and notes of resumptions."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = "tokens_per_second"
    return [{k: v for k, v in one.items() if k != timed} for one in lines if "resumed" not in one]
