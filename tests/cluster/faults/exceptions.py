"""Python exceptions in one process, and crashes that come again."""

import signal

from faults.registry import fault
from faults.stand import FOR_EVER, Stand, last_step, records, steps_recorded

_PROMISE = "its traceback at once; code 1 for all within 15 s; no restart"


@fault("exception in process 0, --restarts 3", _PROMISE, 0)
@fault("exception in process 1, --restarts 3", _PROMISE, 1)
def raised(stand: Stand, process: int) -> None:
    fault_ = {"process": process, "step": stand.random.randint(5, 50), "do": "raise"}
    run = stand.train(*FOR_EVER, "--restarts", "3", "--checkpoint-every", "10", fault=fault_)
    run.until_step(5)
    run.until(lambda: "Traceback" in run.err(), "a traceback")
    run.strike()
    run.ends(1, within=15)
    assert "starting" not in run.err()
    assert "RuntimeError: of this test" in run.err(process)
    assert f"process {process} has ended: RuntimeError: of this test" in run.err(1 - process)


@fault(
    "SIGKILL between writing and renaming metrics.jsonl on resume",
    "no line is lost; started again, code 0",
)
def killed_on_resume(stand: Stand) -> None:
    stand.launch("--steps", "30", "--checkpoint-every", "10").ends(0)
    before = records(stand.out)
    once = stand.folder / "once"
    fault_ = {"process": 0, "event": "os.rename", "path": r"out/metrics\.jsonl", "do": "signal"}
    fault_ |= {"signal": int(signal.SIGKILL), "once": str(once)}
    run = stand.launch("--steps", "40", "--resume", restarts=1, fault=fault_)
    run.until(once.exists, "the kill")
    assert records(stand.out) == before
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 41))
    assert last_step(stand.out) == 40
