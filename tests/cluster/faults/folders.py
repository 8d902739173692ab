"""Folders that are used twice, or hold what nobody has put there."""

import json

from faults.registry import fault
from faults.stand import Stand, records, steps_recorded, steps_saved

_FORMAT = "jaxslowmo_checkpoint"  # of the record: the number of its format


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


@fault("two runs begin in one folder at once", "one ends with 2, the other with 0")
def at_once(stand: Stand) -> None:
    runs = [stand.launch("--steps", "300", "--checkpoint-every", "50") for _ in range(2)]
    for run in runs:
        run.ends(0, 2)
    assert sorted(run.codes for run in runs) == [(0,), (2,)]
    assert steps_recorded(stand.out) == list(range(1, 301))


@fault("a fresh run in the folder of a finished one", "code 2; one line names three ways out")
def fresh(stand: Stand) -> None:
    stand.launch("--steps", "12", "--checkpoint-every", "6").ends(0)
    run = stand.launch("--steps", "20")
    run.ends(2, within=30)
    assert all(word in run.err() for word in ("--resume", "another folder", "--overwrite"))
    assert steps_recorded(stand.out) == list(range(1, 13))


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


@fault("folders 99999999999999999999, 007 and \u00b2 among the checkpoints", "passed over; code 0")
def odd_names(stand: Stand) -> None:
    stand.launch("--steps", "12", "--checkpoint-every", "6").ends(0)
    for name in ("99999999999999999999", "007", "\u00b2"):
        (stand.out / "checkpoints" / name).mkdir()
    run = stand.launch("--steps", "18", "--checkpoint-every", "6", "--resume", restarts=1)
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 19))
    assert 18 in steps_saved(stand.out)


@fault("the format digit of the newest checkpoint damaged", "refused; with --fallback code 0")
def damaged_format(stand: Stand) -> None:
    stand.launch("--steps", "18", "--checkpoint-every", "6").ends(0)
    record = stand.out / "checkpoints" / "18" / "record" / "metadata"
    told = json.loads(record.read_text())
    assert told[_FORMAT] < 7
    record.write_text(json.dumps({**told, _FORMAT: 7}))
    refused = stand.launch("--steps", "24", "--resume", restarts=1)
    refused.ends(1, 2, within=30)
    assert "Traceback" not in refused.err()
    assert "--fallback" in refused.err()
    run = stand.launch("--steps", "24", "--resume", "--fallback")
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 25))
