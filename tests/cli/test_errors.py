"""Wrong usage: one line on stderr that names the option, exit code 2, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Outcome
from jaxslowmo._support.extras import INSTALL
from jaxslowmo.topology import GRAPHS
from support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
ONE = "--num-processes 2 --process-id"
# Rules between options, and of what options name; `option_rows.py` has those of single values.
# A call, and what its line must contain.
REFUSED: dict[str, tuple[str, ...]] = {
    "train --bogus": ("--bogus",),
    "train --batch 6 --accumulate 4": ("--batch", "--accumulate", "6"),
    "train --steps 5 --warmup 5": ("--warmup", "--steps", "5 and 5"),
    "train --steps 40 --schedule-steps 10 --warmup 20": ("--schedule-steps", "20 and 10"),
    "train --schedule cosine": ("--rate-schedule", "cosine"),
    "train --overwrite --resume --out x": ("--overwrite", "--resume"),
    "train --resume": ("--resume", "--out"),
    "train --data /no/such/path": ("/no/such/path",),
    "train --replicas 9 --execution devices": ("9 devices", "8"),
    "train --preset tiny --batch 4 --mesh stage=4": ("--mesh", "3 layers", "4"),
    "train --mesh replica=2 --replicas 4": ("--mesh", "--replicas"),
    "train --mesh device=2 --devices-per-replica 4": ("--mesh", "--devices-per-replica"),
    "train --mesh fsdp=3": ("--batch", "fsdp"),
    "train --mesh stage=2 --microbatches 3": ("--microbatches", "8"),
    "train --mesh fsdp=2 --microbatches 2": ("--microbatches", "stage", "2"),
    "train --mesh stage=2 --dtype float16": ("--dtype float16", "stage"),
    "train --preset tiny --dtype bfloat16 --attention cudnn": ("--attention cudnn", "CPU device"),
    "train --algorithm sgp --graph ring --peers-per-step 3": ("--peers-per-step", "2"),
    "train --algorithm sgp --graph bipartite_linear --replicas 3": ("--replicas", "even"),
    # Options without an effect beside the others.
    "train --graph ring": ("--graph", "sgp or slowmo_sgp", "slowmo", "ring"),
    "train --no-nesterov --algorithm local_sgd": ("--no-nesterov", "slowmo", "local_sgd"),
    "train --weight-decay 0.1 --optimizer sgd": ("--weight-decay", "adamw", "0.1"),
    "train --schedule-steps 40 --rate-schedule constant": ("--schedule-steps", "cosine"),
    "train --statistics-rate 9": ("--statistics-rate", "--statistics", "9"),
    "train --max-rollbacks 1": ("--max-rollbacks", "rollback", "1"),
    "train --on-nan rollback": ("--on-nan rollback", "--checkpoint-every"),
    "train --shard-state --no-exact-average": ("--shard-state", "--no-exact-average"),
    "train --codec int4 --algorithm slowmo_sgp": ("--codec int4", "slowmo_sgp", "bfloat16"),
    "train --shard-state --codec top_k:0.1": ("--shard-state", "--codec top_k:0.1"),
    "train --codec top_k:0": ("--codec", "top_k:FRACTION", "top_k:0"),
    "train --check-parameters --algorithm all_reduce --preset tiny": ("--check-parameters",),
    "train --num-processes 2": ("--coordinator", "--process-id"),
    f"train --coordinator h:1 {ONE} 2": ("--process-id", "--num-processes", "2 and 2"),
    "compare --algorithms local_sgd,all_reduce --graph ring": ("--graph", "all_reduce, local_sgd"),
    "launch --processes 2 -- compare": ("train",),
    "launch --processes 2": ("train", "nothing"),
    "launch --processes 2 -- train": ("--out",),
    "launch --processes 2 -- train --out x --process-id=1 --restarts 2": (
        "--process-id, --restarts",
    ),
    "launch --processes 2 -- train --out x --coordinator-bind 0.0.0.0": ("--coordinator-bind",),
    "launch --processes 2 -- train --out x --executor host --mesh replica=2,stage=2 --batch 4": (
        "--executor host", "2",
    ),
    "tune buckets --replicas 1": ("--replicas", "2"),
    "tune outer --algorithm local_sgd": ("--algorithm", "diloco", "local_sgd"),
    "inspect nothing": ("nothing",),
    "inspect graph": ("NAME", *GRAPHS),
    "inspect graph rnig --nodes 4": ("rnig", *GRAPHS),
    "inspect graph ring": ("--nodes",),
    "inspect graph star --nodes 1024 --peers-per-step 1": ("--nodes", "1024", "1023"),
    "inspect graph ring --nodes 4 --rows 2": ("--rows", "--peers-per-step, --dedupe"),
    "inspect graph ring --nodes 4 --parameters 1 --model-bytes 4": ("--model-bytes", "--param"),
    "inspect graph --phone-book x.json --nodes 4": ("--nodes", "--phone-book"),
    "inspect graphs --page /no/such/page.md": ("--page", "/no/such/page.md"),
    "inspect graphs --page README.md": ("--page", "README.md"),
    "inspect schedule": ("KIND", "gpipe", "zbv"),
    "inspect schedule gpipe --stages 4": ("--stages", "--microbatches"),
    "inspect schedule zbbv --stages 4 --microbatches 8": ("zbbv", "zbv"),
    "inspect schedule gpipe --stages 128 --microbatches 129": ("16384",),
    "inspect schedule gpipe --stages 4 --microbatches 8 --memory 2": ("--memory",),
    "inspect schedule zbv --stages 4 --microbatches 8 --chunks 3": ("--chunks", "2", "3"),
    "inspect schedule interleaved --stages 4 --microbatches 6": ("--microbatches", "4", "6"),
    "inspect schedule lockstep --stages 4 --microbatches 6 --chunks 2 --most-stash 1": (
        "--most-stash", "2", "1",
    ),
    "inspect schedule gpipe --stages 4 --microbatches 8 --forward 0 --backward-input 0"
    " --backward-weight 0": ("--forward", "--backward-input", "--backward-weight"),
    "inspect schedule --table x.csv --stages 2": ("--stages", "--table"),
    "inspect schedule --table /no/such/file": ("--table", "/no/such/file"),
    "inspect schedule --table README.md": ("column 0", "stage 0"),
    "inspect schedule gpipe --stages 4 --microbatches 8 --json --orders": ("--orders", "--json"),
    "inspect schedule gpipe --stages 2 --microbatches 2 --out a.xyz": ("--out", "a.xyz"),
}  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_usage_is_one_line(call, monkeypatch, arguments):
    monkeypatch.chdir(ROOT)
    call(arguments).is_refused(*REFUSED[arguments])


def test_what_has_an_effect_is_not_refused(call, monkeypatch):
    """What a preset brings, and what one algorithm of a comparison uses."""
    for name in ("train", "compare"):
        monkeypatch.setattr(f"jaxslowmo.cli._{name}.{name}", lambda *_: 0)
    for arguments in (
        "train --preset demo --algorithm local_sgd",  # with a slow momentum
        "train --on-nan rollback --resume --out x",
        "train --no-shard-state --no-exact-average",
        "train --no-check-parameters --algorithm all_reduce",
        "train --mesh replica=2,fsdp=2 --replicas 2",  # the same, said twice
        "compare --algorithms all_reduce,sgp --graph ring --bucket-mib 1",
    ):
        assert call(arguments)[0::2] == (0, ""), arguments


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("small.txt", "a few words", "one batch per replica"),
        ("hollow.txt", "", "hollow.txt"),
        ("text", None, "text file"),
    ],
)
def test_text_that_does_not_suffice_is_refused(call, tmp_path, name, content, part):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_text(content)
    call("train --preset tiny --data", path, "--out", tmp_path / "new").is_refused(part)
    assert not (tmp_path / "new").exists()


def test_replicas_without_a_file_each_and_a_folder_that_cannot_be_made(call, tmp_path, text):
    call("train --preset tiny --replicas 10 --data", text).is_refused("10", "9")
    (tmp_path / "taken").touch()
    refused = call("train --preset tiny --data", text, "--out", tmp_path / "taken")
    refused.is_refused("--out", tmp_path / "taken")


def program(*arguments: object, folder: Path | None = None) -> Outcome:
    """In a process of its own: modules imported twice would stay behind for the tests after it."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=folder
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("tyro", "train", "train"),
        ("rich", "train", "train"),
        ("tensorboardX", "train --tensorboard --preset tiny --data .", "train"),
        ("matplotlib", "compare", "train"),
        ("obstore", "islands status run", "islands"),
    ],
)
def test_a_missing_extra_is_named(text, package, command, extra):
    code = (
        f"import sys\nsys.modules[{package!r}] = None\n"  # as if it were not installed
        "from jaxslowmo.cli._app import main\nmain(sys.argv[1:])"
    )
    program("-c", code, *command.split(), folder=text).is_refused(package, INSTALL.format(extra))


def test_training_needs_no_store_of_islands(text):
    code = (
        "import sys\nsys.modules['obstore'] = None\n"
        "from jaxslowmo.cli._app import main\nmain(sys.argv[1:])"
    )
    words = "train --preset tiny --steps 1 --replicas 2 --eval-every 1 --warmup 0 --data ."
    done = program("-c", code, *words.split(), "--out", "run", folder=text)
    assert done.code == 0, done.err


def test_the_module_runs_as_a_program_and_inspecting_loads_no_jax():
    program("-m", "jaxslowmo", "train", "--steps", 0).is_refused("--steps", 0)
    code = (
        "import sys\nfrom jaxslowmo.cli import main\n"
        "try:\n    main(['inspect', 'graph', 'ring', '--nodes', '4'])\n"
        "except SystemExit as exit:\n    print(exit.code, 'jax' in sys.modules)"
    )
    assert program("-c", code).out.splitlines()[-1] == "0 False"


def test_a_reader_that_ends_early_is_no_error_of_the_program():
    """`jaxslowmo train --help | head` closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxslowmo", "train", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
