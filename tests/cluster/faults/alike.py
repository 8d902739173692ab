"""Data and options that are not those of the other process."""

from faults.registry import fault
from faults.stand import Stand, steps_recorded
from small_runs import small_text

_PROMISE = "code 2 for all; one line names the option"


@fault("process 1 has another learning rate", _PROMISE, "learning-rate")
@fault("process 1 has other data", _PROMISE, "data")
def differs(stand: Stand, option: str) -> None:
    value = "1"
    if option == "data":
        data = small_text(stand.folder / "other")
        (data / "3.txt").write_text("Something else, of the same use to nobody.\n" * 60)
        value = str(data)
    run = stand.train("--steps", "20", other=(f"--{option}", value))
    run.ends(2, within=30)
    for index in range(2):
        (line,) = [line for line in run.err(index).splitlines() if line.startswith("error: ")]
        assert f"--{option}" in line, line
    assert "Traceback" not in run.err()
    assert steps_recorded(stand.out) == []
