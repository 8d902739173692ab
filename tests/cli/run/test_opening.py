"""Before the first step: whose the folder is, and whether all processes want the same."""

import gc
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._train import opened
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.processes._peers import ALONE
from jaxslowmo.cli.run._job import Job
from jaxslowmo.cli.run._run_folder import locked_folder
from jaxslowmo.data import Corpus, read_corpus
from support.pairs import two_processes
from support.waiting import PATIENCE_SECONDS

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint_0.1.0"
# Case by case both print what ended them, or with which steps and schedule they go on.
PROGRAM = """
import json
import time
from pathlib import Path
from jaxslowmo._support import coordinator as notes
from jaxslowmo.cli._errors import code_of, describe
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.processes._peers import Cluster
from jaxslowmo.cli._train import opened
from jaxslowmo.cli.run import _agreement
from jaxslowmo.data import read_corpus

root = Path(__file__).parent
_agreement._FILE_SERVER_SECONDS = 1.0
version = _agreement.version

def meet(name):
    notes.tell(f"{name}/{rank}", "")
    notes.wait_for(f"{name}/{1 - rank}", 300)

for i, case in enumerate(json.loads((root / "cases.json").read_text())):
    own = {"steps": 10, "out": "out", "text": "text"} | case[rank]
    out, data = root / str(i) / own.pop("out"), root / own.pop("text")
    number = own.pop("version", None)
    _agreement.version = (lambda package: number) if number else version
    _agreement._KEY = f"case{i}"
    try:
        if own.pop("late", False):
            raise OSError(5, "late")
        config, corpus = train_config(own), read_corpus(data).contents
        cluster = Cluster(rank, 2)
        with opened(config, out, corpus, cluster) as (folder, config):
            if rank == 0:
                time.sleep(0.5)
            if config.overwrite:
                _agreement.clear(folder, config, cluster)
            assert not config.overwrite or not (out / "checkpoints").exists()
            print("go", config.steps, config.schedule_length, config.checkpoint.resume)
            meet(f"through{i}")
    except Exception as error:
        print(code_of(error), describe(error).replace(str(root / str(i)), "ROOT"))
    meet(f"done{i}")
"""

GO = "go 10 10 False"
# What version 0.1.0 left (test_old_runs.py), gone on with for more steps.
OLD = {
    "preset": "tiny", "replicas": 2, "algorithm": "slowmo_sgp", "slow_every": 5, "steps": 24,
    "optimizer": "sgd", "clip": 0.0, "out": "../old",
}  # fmt: skip
OPTIONS = "2 CommandError: process 1 has other options than process 0: "
# By name: options of both, and what both print.
CASES = {
    "alike": (
        [{"learning_rate": 0.1, "process_logs": True}, {"learning_rate": 0.1, "restarts": 3}],
        [GO, GO],
    ),
    "learning rate": (
        [{"learning_rate": 0.1}, {"learning_rate": 0.01}],
        [f"{OPTIONS}--learning-rate is 0.01, is 0.1 there"] * 2,
    ),
    "algorithm and seed": (
        [{}, {"algorithm": "sgp", "seed": 3}],
        [f"{OPTIONS}--seed is 3, is 0 there; --algorithm is sgp, is slowmo there"] * 2,
    ),
    "what causes exchanges": (
        [{}, {"replicas": 2, "eval_every": 7}],
        [f"{OPTIONS}--eval-every is 7, is 50 there; --replicas is 2, is 4 there"] * 2,
    ),
    "files": (
        [{}, {"text": "other"}],
        [
            "2 CommandError: --data: process 1 has other files than process 0: b.txt has other "
            "bytes, c.txt is missing"
        ]
        * 2,
    ),
    "the same files elsewhere": ([{}, {"text": "copy"}], [GO, GO]),
    "folder": (
        [{}, {"out": "another"}],
        [
            "2 CommandError: --out ROOT/another of process 1 is not the folder that process 0 "
            "writes to"
        ]
        * 2,
    ),
    "version": (
        [{}, {"version": "0.0.1"}],
        [
            f"2 CommandError: process 1 runs jaxslowmo 0.0.1 and process 0 {version('jaxslowmo')}: "
            "all need the same versions"
        ]
        * 2,
    ),
    # Process 0 decides: the other may have been started again before it.
    "resume of another": ([{}, {"resume": True}], [GO, GO]),
    "resume": ([OLD | {"resume": True}, OLD], ["go 24 16 True"] * 2),
    "overwrite": ([OLD | {"overwrite": True}, OLD], ["go 24 24 False"] * 2),
    "nobody comes": (
        [{"startup_timeout": 2}, {"late": True}],
        [
            "75 CommandError: process 1 did not get ready to train within --startup-timeout 2 s",
            "75 Input/output error ([Errno 5] late)",
        ],
    ),
}  # fmt: skip


def test_two_processes(tmp_path):
    for name, changes in {"text": {}, "copy": {}, "other": {"b.txt": "B", "c.txt": None}}.items():
        files = {"a.txt": "a", "b.txt": "b", "c.txt": "c"} | changes
        (tmp_path / name).mkdir()
        for file, content in files.items():
            if content is not None:
                (tmp_path / name / file).write_text(content)
    with tarfile.open(GOLDEN / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "out").rename(tmp_path / "old")
    (tmp_path / "cases.json").write_text(json.dumps([options for options, _ in CASES.values()]))
    printed = two_processes(PROGRAM, tmp_path)
    for rank in range(2):
        lines = printed[rank].splitlines()
        assert dict(zip(CASES, lines, strict=True)) == {
            name: wanted[rank] for name, (_, wanted) in CASES.items()
        }
    # What the last case but one left of the old run, and no lock.
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["corpus.json"]


def test_other_options_end_both_at_once_and_in_one_line(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("Hello to the world.\n" * 500)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.monotonic()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxslowmo", "train", "--preset", "tiny", "--replicas"),
                *("2", "--data", tmp_path / "text", "--out", tmp_path / "out", "--algorithm"),
                *(algorithm, "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"),
                *("--process-id", str(rank)),
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        )
        for rank, algorithm in enumerate(("slowmo", "sgp"))
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    line = "error: process 1 has other options than process 0: --algorithm is sgp, is slowmo there"
    assert [process.returncode for process in processes] == [2, 2]
    for error in errors:  # of its own, or of the other, which was faster
        said = [part for part in error.splitlines() if part.startswith("error")]
        assert said
        assert all(part.endswith(line.removeprefix("error: ")) for part in said)
    assert time.monotonic() - begun < 190  # of which 10 are quiet: it hung for 200
    # Process 0 may have been ended before it could take its lock away.
    assert set(os.listdir(tmp_path / "out")) <= {"corpus.json", "lock"}


def test_a_run_is_told_of_one_that_is_going_on(tmp_path, call, text):
    out = tmp_path / "out"
    with opened(train_config({}), out, read_corpus(text).contents, ALONE) as (folder, _):
        assert folder.path == out
        for command in (("train",), ("train", "--resume"), ("train", "--overwrite"), ("compare",)):
            outcome = call(*command, "--data", text, "--out", out)
            assert outcome.code == 2
            assert outcome.err.startswith(f"error: --out {out} is in use by process {os.getpid()}")
            assert outcome.err.count("\n") == 1
    assert [path.name for path in out.iterdir()] == ["corpus.json"]
    assert json.loads((out / "corpus.json").read_text())["source"] == str(text)


def test_after_a_wrong_call_a_new_folder_is_gone(tmp_path):
    def wrong():
        raise CommandError("wrong")

    for before in (False, True):
        if before:
            (tmp_path / "out").mkdir()
        with pytest.raises(CommandError, match="wrong"), locked_folder(tmp_path / "out", "train"):
            wrong()
        assert (tmp_path / "out").exists() == before


@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_only_others_train_on_is_not_kept(tmp_path, call, text, monkeypatch, command):
    kept = []

    def run(*_, **__):
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is Corpus]
        kept.extend(each for each in found if each.source == str(text))
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", run)
    outcome = call(command, "--preset", "tiny", "--data", text, "--out", tmp_path / "out")
    assert (outcome.code, kept) == (130, [])
