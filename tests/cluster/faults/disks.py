"""Disks that are full, do not answer or may not be written, and folders that are deleted."""

import contextlib
import errno
import os

from faults.registry import fault
from faults.stand import FOR_EVER, Stand, last_step, steps_recorded, steps_saved


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


@fault("disk full for metrics.jsonl, freed after the warning", "code 0; no line is lost")
def full_for_metrics(stand: Stand) -> None:
    stand.disk("1m")
    run = stand.launch("--steps", "400")
    run.until_step(5)
    filler = stand.out.parent / "filler"
    file = os.open(filler, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    run.until(lambda: "metrics.jsonl does not grow: No space left" in run.err(), "a warning")
    filler.unlink()
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 401))


@fault("all of --out deleted while running", "code 0; metrics.jsonl complete at the end")
def out_deleted(stand: Stand) -> None:
    run = stand.launch("--steps", "300", "--checkpoint-every", "10")
    run.until_step(stand.random.randint(20, 200))
    stand.clear(stand.out)
    run.strike()
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 301))
    assert (stand.out / "config.json").exists()
    assert (stand.out / "summary.json").exists()
    assert max(steps_saved(stand.out)) == 300


@fault("EIO while process 1 trains", "one line with the reason; code 75 for all, within 15 s")
def fails(stand: Stand) -> None:
    fault_ = {"process": 1, "step": 10, "errno": errno.EIO, "do": "raise"}
    run = stand.train(*FOR_EVER, fault=fault_)
    run.until(lambda: "Input/output error" in run.err(), "the error")
    run.strike()
    run.ends(75, within=15)
    assert "Traceback" not in run.err()


@fault("EIO on reading a checkpoint, once, --restarts 3", "started again; code 0")
def fails_once(stand: Stand) -> None:
    stand.launch("--steps", "10", "--checkpoint-every", "5").ends(0)
    once = {"process": 0, "event": "open", "path": "record/metadata", "do": "raise"}
    once |= {"errno": errno.EIO, "once": str(stand.folder / "once")}
    run = stand.launch("--steps", "20", "--resume", restarts=3, fault=once)
    run.ends(0)
    assert run.err().count("starting again") == 1
    assert steps_recorded(stand.out) == list(range(1, 21))
