"""When a run is started again, how often, after which waits, and with which arguments."""

import json
import os
import shutil
import signal
import threading
import time
from typing import Any

import pytest

from jaxslowmo.cli.processes import _restarts
from jaxslowmo.cli.processes._restarts import Children, EndOfStart, keep_running
from jaxslowmo.cli.run._run_folder import RunFolder
from support.waiting import PATIENCE_SECONDS

LOST = EndOfStart(75, "process 1 died")
DONE = EndOfStart(0, "", is_reported=True)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between starts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr(Children, "pause", lambda self, seconds: found.append(seconds))
    return found


@pytest.fixture
def out(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def run(out, *ends, restarts=100, argv=("train",)) -> tuple[int, list[list[str]]]:
    """The code, and the arguments of every start; an end may be a function that returns it."""
    given: list[list[str]] = []
    left: list[Any] = list(ends)

    def attempt(children, arguments) -> EndOfStart:
        given.append(arguments)
        end = left.pop(0)
        return end if isinstance(end, EndOfStart) else end()

    code = keep_running(attempt, argv, out, restarts=restarts, speaker="error")
    assert not left
    return code, given


def save(out, step):
    (out / "checkpoints" / str(step)).mkdir()


def record(out, *lines):
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_waits_double_up_to_a_minute_and_begin_anew_after_a_checkpoint(out, waits):
    def moves(step, saves=False):
        def end():
            record(out, {"step": step})
            if saves:
                save(out, step)
            return LOST

        return end

    ends = [moves(step) for step in range(8)] + [moves(8, saves=True), moves(9), DONE]
    code, given = run(out, *ends, restarts=8)
    assert code == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]
    assert given[0] == ["train"]
    assert all(arguments == ["train", "--resume"] for arguments in given[1:])


def test_the_count_is_of_starts_without_a_newer_checkpoint(out, waits, capsys):
    ends = [lambda step=step: (save(out, step), LOST)[1] for step in (5, 10, 15)]
    assert run(out, *ends, LOST, LOST, restarts=2)[0] == 75
    said = capsys.readouterr().err.splitlines()
    where = f"in {out}/checkpoints"
    assert said[0] == (
        f"error: process 1 died; the last saved step is 5, {where}; starting again in 1 s "
        f"(restarts left: 1)"
    )
    assert [line.rpartition("; ")[2] for line in said[1:]] == [
        "starting again in 1 s (restarts left: 1)",
        "starting again in 1 s (restarts left: 1)",
        "starting again in 2 s (restarts left: 0)",
        "no restarts left",
    ]


def test_without_restarts_the_line_says_what_happened(out, capsys):
    assert run(out, EndOfStart(137, "this process was killed by SIGKILL"), restarts=0)[0] == 137
    line = f"error: this process was killed by SIGKILL; no checkpoint in {out}/checkpoints\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("prepare", "where"),
    [
        (lambda out: None, "before the first step"),
        (lambda out: save(out, 30), "at step 30"),
        (lambda out: (save(out, 30), record(out, {"step": 36}, {"step": 37})), "at step 37"),
    ],
)
def test_five_failures_in_a_row_at_one_step_are_enough(out, waits, capsys, prepare, where):
    prepare(out)
    code, given = run(out, *[LOST] * 5)
    assert (code, len(given)) == (75, 5)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"; not started again after 5 failures in a row {where}")


def test_failures_at_other_steps_and_late_processes_do_not_count_as_in_a_row(out, waits):
    late = EndOfStart(75, "not all processes came together", is_late=True)
    further = [lambda step=step: (record(out, {"step": step}), LOST)[1] for step in (3, 4)]
    assert run(out, *[LOST] * 4, *[late] * 10, *further, *[LOST] * 3, DONE)[0] == 0
    assert len(waits) == 19


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
@pytest.mark.parametrize("is_reported", [True, False])
def test_what_would_only_come_back_is_not_started_again(out, capsys, code, is_reported):
    assert run(out, EndOfStart(code, "it ended", is_reported=is_reported))[0] == code
    said = "" if is_reported else f"error: it ended; no checkpoint in {out}/checkpoints\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("number", "ended", "code", "line"),
    [
        (signal.SIGTERM, DONE, 0, ""),
        (
            signal.SIGTERM,
            EndOfStart(143, "killed"),
            143,
            "error: ended by SIGTERM; no checkpoint in ",
        ),
        (signal.SIGTERM, EndOfStart(143, "ended", is_reported=True), 143, ""),
        (signal.SIGTERM, LOST, 143, "error: ended by SIGTERM; no checkpoint in "),
        (signal.SIGTERM, EndOfStart(1, "ended", is_reported=True), 1, ""),
        (signal.SIGINT, DONE, 130, ""),
        (signal.SIGINT, EndOfStart(137, "killed"), 130, ""),
    ],
)
def test_nothing_is_started_after_a_signal(out, capsys, number, ended, code, line):
    def attempt():
        signal.raise_signal(number)
        return ended

    before = signal.getsignal(number)
    assert run(out, attempt)[0] == code
    assert capsys.readouterr().err.startswith(line)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_the_next_start(out, monkeypatch, capsys, number, code):
    monkeypatch.setattr(_restarts, "_FIRST_WAIT", 1000)

    def attempt():
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        return LOST

    begin = time.monotonic()
    assert run(out, attempt)[0] == code
    assert time.monotonic() - begin < PATIENCE_SECONDS
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("; starting again in 1000 s (restarts left: 99)")
    assert [line.partition(";")[0] for line in lines[1:]] == (
        ["error: ended by SIGTERM"] if number == signal.SIGTERM else []
    )


def test_an_old_run_is_overwritten_once(out, waits):
    """A start that failed before it had deleted the old run must not go on with it."""
    save(out, 30)
    argv = ("train", "--overwrite", "--steps", "5")

    def overwrites():
        shutil.rmtree(out / "checkpoints" / "30")
        save(out, 30)
        # A new folder may get the number of the old one, but not its time.
        os.utime(out / "checkpoints" / "30", ns=(1, 1))
        return LOST

    _, given = run(out, LOST, overwrites, LOST, DONE, argv=argv)
    assert given[:2] == [list(argv), list(argv)]
    assert given[2:] == [["train", "--steps", "5", "--resume"]] * 2


def test_resume_is_given_once(out, waits):
    assert run(out, LOST, LOST, DONE, argv=("train", "--resume"))[1] == [["train", "--resume"]] * 3


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "no checkpoint in "),
        (["5", "40", "300.tmp", "notes"], "the last saved step is 40, in "),
        (["0"], "the last saved step is 0, in "),
        (["2147483647", "5"], "the last saved step is 2147483647, in "),
        (["5", "2147483648", "99999999999999999999", "007", "²", "٣", "-1"], "step is 5, in "),
    ],
)
def test_only_a_number_that_a_step_can_have_is_a_checkpoint(out, names, words):
    for name in names:
        (out / "checkpoints" / name).mkdir()
    assert words in RunFolder(out).last_saved()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (b"", None),
        (b'{"step": 4}\n{"step": 5}\n', 5),
        (b'{"step": 4}\n{"step": 5}\n{"st', 5),
        (b'{"step": 4}\n\0\0\0\0\n[1]\n\xff\xfe\n{"loss": 3}\n{"step": null}\n', 4),
        (b'{"step": 1}\n' * 20000 + b'{"step": 2}\n', 2),
    ],
)
def test_the_last_recorded_step_is_read_off_damaged_records(tmp_path, text, step):
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert RunFolder(tmp_path).last_recorded() == step


def test_the_last_recorded_step_without_records(tmp_path):
    assert RunFolder(tmp_path).last_recorded() is None
