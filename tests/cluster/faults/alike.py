"""Data and options that are not those of the other process."""

from faults.registry import fault
from faults.stand import Stand, steps_recorded
from small_runs import small_text


@fault(
    "process 1 has another algorithm",
    "code 2 for all; one line names the option",
    "algorithm",
    "slowmo",
)
@fault(
    "process 1 has another learning rate",
    "code 2 for all; one line names the option",
    "learning-rate",
    "1",
)
@fault("process 1 has other data", "code 2 for all; one line says so", "data", "3.txt")
@fault("process 1 has other files in --out", "code 2 for all; one line says so", "out", "elsewhere")
def differs(stand: Stand, option: str, value: str) -> None:
    word = f"--{option}"
    if option == "data":
        data = small_text(stand.folder / "other")
        (data / value).write_text("Something else, of the same use to nobody.\n" * 60)
        value = str(data)
    elif option == "out":
        value = str(stand.folder / value)
        (stand.folder / "elsewhere").mkdir()
    run = stand.train("--steps", "20", other=(f"--{option}", value))
    run.ends(2, within=30)
    for index in range(2):
        (line,) = [line for line in run.err(index).splitlines() if line.startswith("error: ")]
        assert word in line, line
    assert "Traceback" not in run.err()
    assert steps_recorded(stand.out) == []
