"""Disks that fail, processes that hang, raise or are killed again and again."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from faults.registry import fault
from faults.stand import (
    FOR_EVER,
    OF_THREE,
    Fault,
    Stand,
    is_saving,
    last_step,
    records,
    steps_saved,
)

# A fault that all processes wait after would take longer.
WITHIN = 120


@fault("disk full, freed after the first warning", "code 0; later steps are saved")
def full_and_freed(stand: Stand) -> None:
    stand.disk("3m")
    filler = stand.out.parent / "filler"
    filler.write_bytes(bytes(2**20 * 5 // 2))
    run = stand.launch("--steps", "400", "--checkpoint-every", "50")
    run.until(lambda: "No space left on device" in run.err(), "a warning")
    failed = last_step(stand.out)
    filler.unlink()
    run.ends(0)
    assert "warning: " in run.err()
    saved = steps_saved(stand.out)
    assert max(saved) == 400
    assert min(saved) > failed, saved


# Late: what follows upon a step that took some seconds, as the first do, may take as long.
_UNFINISHED = r"checkpoints/50\..*/ocdbt\.process_1"
_SAVE: Fault = {"process": 1, "event": "os.scandir", "path": _UNFINISHED}


@fault(
    "a save hangs where process 1 writes; SIGTERM to trainer 0",
    "all end within 10 s with 143; the last saved step is named",
)
def hangs(stand: Stand) -> None:
    run = stand.train(*FOR_EVER, "--checkpoint-every", "10", fault=_SAVE)
    run.until_step(40)
    state = [(-1, 0.0)]

    def is_still() -> bool:
        step, now = last_step(stand.out), time.monotonic()
        if step != state[0][0]:
            state[0] = (step, now)
        return now - state[0][1] > 2

    run.until(is_still, "the hang")
    run.strike()
    os.kill(stand.trainers()[0], signal.SIGTERM)
    run.ends(143, within=10)
    newest = max(steps_saved(stand.out))
    for index in range(len(run.commands)):
        assert f"the last saved step is {newest}, in {stand.out}" in run.err(index)


_TOLD = "its traceback at once; code 1 for all within 15 s; no restart"


@fault("exception in process 0, --restarts 3", _TOLD, 0)
@fault("exception in process 1, --restarts 3", _TOLD, 1)
def raised(stand: Stand, process: int) -> None:
    fault_ = {"process": process, "step": stand.random.randint(5, 50)}
    run = stand.train(*FOR_EVER, "--restarts", "3", "--checkpoint-every", "10", fault=fault_)
    run.until_step(5)
    run.until(lambda: "Traceback" in run.err(), "a traceback")
    run.strike()
    run.ends(1, within=15)
    assert "starting" not in run.err()
    assert "RuntimeError: of this test" in run.err(process)
    assert f"process {process} has ended: RuntimeError: of this test" in run.err(1 - process)


@fault("a process of three is killed", "code 0; every number as if none had been", 1)
@fault("a process of three is killed, 20 times", "code 0; every number as if none had been", 20)
def killed(stand: Stand, kills: int) -> None:
    """Kill processes by turns while a checkpoint is written, and at any time."""
    last = 6 * (kills + 1)
    options = ("--replicas", "3", "--steps", str(last), "--checkpoint-every", "4")
    stand.settings |= {**OF_THREE, "heartbeat_timeout": 2}
    stand.launch(*options, processes=3).ends(0)
    calm = _trajectory(stand.out)
    assert calm[-1]["step"] == last

    stand.out = stand.folder / "disturbed"
    run, gone = stand.launch(*options, restarts=kills, processes=3), set[int]()

    def all_there() -> dict[int, int] | None:
        """Return the trainers by their numbers; none of them is from the start before."""
        own = stand.trainers()
        return own if len(own) == 3 and not gone & {*own.values()} else None

    for number in range(kills):
        there = run.until(all_there, "its processes", WITHIN)
        # Never so late that the run could end before.
        run.until_step(min(last_step(stand.out) + stand.random.randint(1, 6), last - 2))
        if number % 2 == 0:
            run.until(lambda: is_saving(stand.out), "a checkpoint")
        else:
            time.sleep(stand.random.uniform(0, 0.05))
        os.kill(there[stand.random.randrange(3)], signal.SIGKILL)
        gone = {*there.values()}
    run.strike()
    run.ends(0, within=WITHIN)
    said = run.err().splitlines()
    assert sum(line.startswith("launch: process ") for line in said) == kills, said
    assert len(said) == kills, said
    assert _trajectory(stand.out) == calm


def _trajectory(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the clock and the notes of resumptions."""
    lines = [one for one in records(out) if "resumed" not in one]
    return [{k: v for k, v in one.items() if k != "tokens_per_second"} for one in lines]
