"""Folders that are used twice, or hold what nobody has put there."""

import json

from faults.registry import fault
from faults.stand import Stand, records, steps_recorded


@fault("a second run in the folder of one that runs", "code 2 and one line; the first goes on")
def twice(stand: Stand) -> None:
    first = stand.launch("--steps", "900", "--checkpoint-every", "100")
    first.until_step(5)
    second = stand.launch("--steps", "20")
    second.ends(2, within=30)
    assert "is in use by process" in second.err()
    assert first.is_running(), "the first has ended"
    first.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 901))


@fault(
    "--overwrite of a finished run, killed before its first checkpoint",
    "restarts from step 1, not from the old run's checkpoint",
)
def overwritten(stand: Stand) -> None:
    stand.launch("--steps", "30", "--checkpoint-every", "10").ends(0)
    once = str(stand.folder / "once")
    fault_ = {"process": 1, "step": 5, "do": "signal", "signal": 9, "once": once}
    run = stand.launch(
        *("--overwrite", "--steps", "40", "--checkpoint-every", "40"), restarts=1, fault=fault_
    )
    run.ends(0)
    assert "starting again" in run.err()
    assert steps_recorded(stand.out) == list(range(1, 41))
    assert not any("resumed" in record for record in records(stand.out))
    assert isinstance(json.loads((stand.out / "summary.json").read_text())["loss"], float)
