"""Wrong usage: one line on stderr that says what to do, exit code 2, no traceback."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxslowmo._support.extras import INSTALL
from jaxslowmo.cli._errors import CommandError
from support.waiting import PATIENCE_SECONDS


def assert_one_line(outcome, *parts):
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--algorithm sgd", "--algorithm must be one of all_reduce, local_sgd, sgp, slowmo"),
        ("--steps -3", "--steps must be >= 1, got -3"),
        ("--steps ten", "Invalid value for '--steps'"),
        ("--preset 3m", "--preset must be one of tiny, demo, 1m, 10m, 124m, 7b, got 3m"),
        ("--batch 0", "--batch must be >= 1, got 0"),
        ("--batch 6 --accumulate 4", "--batch must be a multiple of --accumulate"),
        ("--slow-momentum 1", "--slow-momentum must be < 1, got 1.0"),
        ("--learning-rate nan", "--learning-rate must be >= 0, got nan"),
        ("--steps 5 --warmup 5", "--warmup must be < --steps, got 5 and 5"),
        ("--execution gpu", "--execution must be one of auto, devices, virtual, got gpu"),
        ("--bogus", "No such option: --bogus"),
        ("--data /no/such/path", "must be an existing file or folder, got '/no/such/path'"),
        ("--replicas 9 --execution devices", "need 9 devices, found 8"),
        ("--replicas 100 --execution devices", "need 100 devices, found 8"),
        ("--algorithm sgp --graph clique", "--graph must be one of npeer_directed_exponential, "),
        ("--algorithm sgp --peers-per-step 0", "--peers-per-step must be >= 1, got 0"),
        ("--algorithm sgp --graph ring --peers-per-step 3", "must be at most 2, the peers in"),
        ("--algorithm sgp --graph bipartite_linear --replicas 3", "must be even"),
        ("--algorithm sgp --overlap=-1", "--overlap must be >= 0, got -1"),
        ("--mixing self_weighted:1.5", "with a share between 0 and 1"),
        ("--mixing even", "--mixing must be uniform, or self_weighted:SHARE"),
    ],
)
def test_train_refuses(call, arguments, message):
    assert_one_line(call("train", *arguments.split()), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--algorithms all_reduce,sgd", "--algorithms must be of all_reduce, local_sgd"),
        ("--algorithms sgp+overlap", "settings are written name+SETTING=VALUE with"),
        ("--algorithms sgp+speed=1", "got 'speed=1'"),
        ("--algorithms sgp+algorithm=diloco", "got 'algorithm=diloco'"),
        ("--algorithms sgp+overlap=x", "overlap must be of type int, got 'x'"),
        ("--algorithms slowmo+nesterov=1", "nesterov must be of type bool, got '1'"),
        ("--algorithms sgp+overlap=-1", "--overlap must be >= 0, got -1"),
        ("--algorithms slowmo,slowmo", "must list one or more different values"),
        ("--seeds ,", "--seeds must list one or more different values, got nothing"),
        ("--seeds a", "--seeds must be integers separated by commas, got a"),
        ("--seeds=-1", "--seeds must be >= 0, got -1"),
    ],
)
def test_compare_refuses(call, arguments, message):
    assert_one_line(call("compare", *arguments.split()), message)


def test_data_that_does_not_suffice_is_refused(call, tmp_path, text):
    small = tmp_path / "small.txt"
    small.write_text("a few words")
    empty = tmp_path / "empty"
    empty.mkdir()
    hollow = tmp_path / "hollow.txt"
    hollow.touch()
    for path, message in (
        (small, "at least one batch per replica"),
        (empty, "at least one text file; found no file"),
        (hollow, "is empty"),
        ("", "--data must not be empty"),
    ):
        outcome = call("train", "--preset", "demo", "--data", path)
        assert_one_line(outcome, message)
    assert_one_line(
        call("train", "--preset", "demo", "--data", text, "--replicas", 10),
        "got 10 replicas for 10 text files",
        "use at most 9 replicas",
    )


def test_a_folder_for_results_that_cannot_be_made_is_refused(call, tmp_path, text):
    taken = tmp_path / "taken"
    taken.touch()
    outcome = call("train", "--preset", "demo", "--data", text, "--out", taken)
    assert_one_line(outcome, f"--out must be a folder to write to, {taken}")


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("typer", "train"),
        ("rich", "train"),
        ("flax", "train"),
        ("tensorboardX", "train --tensorboard --preset tiny --data {text}"),
        ("matplotlib", "compare"),
    ],
)
def test_a_missing_extra_is_named(text, package, command):
    # In a process of its own: modules imported twice would stay behind for the tests after it.
    code = (
        f"import sys\nsys.modules[{package!r}] = None\n"  # as if it were not installed
        "from jaxslowmo.cli._main import main\nmain(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.format(text=text).split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        cwd=text,
    )
    outcome = SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)
    assert_one_line(outcome, f"the command line needs {package}", INSTALL)


def test_messages_are_one_line():
    assert str(CommandError("two\n  lines")) == "two lines"


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "jaxslowmo", "train", "--steps", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --steps must be >= 1, got 0\n"
