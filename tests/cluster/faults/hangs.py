"""Processes that wait in vain, and are asked to stop; others that advance, and are."""

import json
import os
import signal
import time

from faults.registry import fault
from faults.stand import FOR_EVER, Fault, Stand, is_saving, last_step, steps_saved

_STILL_SECONDS = 2
_PROMISE = "all end within 10 s with 143; the last saved step is named"
# Late: what follows upon a step that took some seconds, as the first do, may take as long.
# Where the second save hangs, or a step after the first.
_UNFINISHED = r"checkpoints/50\..*/ocdbt\.process_1"
_SAVE: Fault = {"process": 1, "event": "os.scandir", "path": _UNFINISHED}
_STEP: Fault = {"process": 1, "step": 48}


@fault("a save hangs where process 1 writes; SIGTERM to trainer 0", _PROMISE, _SAVE, 0)
@fault("process 1 hangs between two steps; SIGTERM to trainer 1", _PROMISE, _STEP, 1)
def hangs(stand: Stand, what: Fault, target: int) -> None:
    run = stand.train(*FOR_EVER, "--checkpoint-every", "10", fault={**what, "do": "hang"})
    run.until_step(40)
    state = [(-1, 0.0)]

    def is_still() -> bool:
        step, now = last_step(stand.out), time.monotonic()
        if step != state[0][0]:
            state[0] = (step, now)
        return now - state[0][1] > _STILL_SECONDS

    run.until(is_still, "the hang")
    run.strike()
    os.kill(stand.trainer(target), signal.SIGTERM)
    run.ends(143, within=10)
    newest = max(steps_saved(stand.out))
    for index in range(len(run.commands)):
        assert f"the last saved step is {newest}, in {stand.out}" in run.err(index)


@fault("SIGTERM while a save advances", "code 0; the last step is saved")
def advances(stand: Stand) -> None:
    run = stand.launch(*FOR_EVER, "--checkpoint-every", "10")
    run.until_step(20)
    run.until(lambda: is_saving(stand.out), "a save")
    run.send(signal.SIGTERM)
    run.ends(0)
    assert max(steps_saved(stand.out)) == last_step(stand.out)
    summary = json.loads((stand.out / "summary.json").read_text())
    assert summary["status"] == "preempted", summary["status"]
