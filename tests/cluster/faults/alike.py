"""Data and options that are not those of the other process, or of the run before."""

import shutil
from pathlib import Path

from faults.registry import fault
from faults.stand import Stand, steps_recorded
from small_runs import small_text

_WITHIN = 30
_OTHERS = {
    "algorithm": ("--algorithm", "slowmo"),
    "seed": ("--seed", "9"),
    "learning rate": ("--learning-rate", "0.5"),
    "slow period": ("--slow-every", "6"),
}


def _refused(stand: Stand, other: tuple[str, ...], word: str) -> None:
    run = stand.train("--steps", "20", other=other)
    run.ends(2, within=_WITHIN)
    for index in range(2):
        lines = [line for line in run.err(index).splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, run.err(index)
        assert word in lines[0], lines
    assert "Traceback" not in run.err()
    assert steps_recorded(stand.out) == []


def _others(stand: Stand, what: str) -> None:
    _refused(stand, _OTHERS[what], _OTHERS[what][0])


for _what in _OTHERS:
    _promise = "code 2 for all; one line names the option"
    fault(f"process 1 has another {_what}", _promise, _what)(_others)


@fault("process 1 has other data", "code 2 for all; one line names the file")
def other_data(stand: Stand) -> None:
    data = small_text(stand.folder / "other")
    (data / "3.txt").write_text("Something else, of the same use to nobody.\n" * 60)
    _refused(stand, ("--data", str(data)), "3.txt")


@fault("process 1 has other files in --out", "code 2 for all; one line says so")
def other_out(stand: Stand) -> None:
    (stand.folder / "elsewhere").mkdir()
    _refused(stand, ("--out", str(stand.folder / "elsewhere")), "--out")


def _change(data: Path, how: str) -> None:
    file = data / "3.txt"
    if how == "removed":
        file.unlink()
    elif how == "added":
        (data / "new.txt").write_text("Something that was not there.\n" * 60)
    elif how == "replaced":
        file.write_text("Something else instead.\n" * 60)
    else:
        file.write_bytes(bytes(range(256)) * 20)


@fault(
    "a file of the data removed, added, replaced, made binary; then --resume",
    "each time code 2 and one line that names the file",
)
def changed_data(stand: Stand) -> None:
    stand.launch("--steps", "12", "--checkpoint-every", "6").ends(0)
    for how in ("removed", "added", "replaced", "binary"):
        data = stand.folder / how
        shutil.copytree(stand.text, data)
        _change(data, how)
        run = stand.launch("--steps", "18", "--resume", "--data", data)
        run.ends(2, within=_WITHIN)
        assert ("new.txt" if how == "added" else "3.txt") in run.err(), how
    assert steps_recorded(stand.out) == list(range(1, 13))


@fault("the data moved to another path, then --resume", "goes on; code 0")
def moved_data(stand: Stand) -> None:
    stand.launch("--steps", "12", "--checkpoint-every", "6").ends(0)
    stand.text.rename(stand.folder / "moved")
    run = stand.launch("--steps", "18", "--resume", "--data", stand.folder / "moved")
    run.ends(0)
    assert steps_recorded(stand.out) == list(range(1, 19))
