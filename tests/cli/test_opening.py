"""Before the first step: whose the folder is, and whether all processes want the same."""

import json
import os
from importlib.metadata import version

from jaxslowmo.cli._config import TrainConfig, replace_options
from jaxslowmo.cli._folder import open_run
from jaxslowmo.cli._processes import ALONE
from jaxslowmo.data import read_corpus
from support.pairs import two_processes

# Case by case both print what ended them, or with which steps and schedule they go on.
PROGRAM = """
import json
from pathlib import Path
from jaxslowmo._support import coordinator as notes
from jaxslowmo.cli import _folder
from jaxslowmo.cli._folder import open_run
from jaxslowmo.cli._config import TrainConfig, replace_options
from jaxslowmo.cli._errors import code_of, describe
from jaxslowmo.cli._processes import Cluster
from jaxslowmo.data import read_corpus

root = Path(__file__).parent
_folder._FILE_SERVER_SECONDS = 0.2
version = _folder.version

def meet(name):
    notes.write_note(f"{name}/{rank}", "")
    notes.wait_for_note(f"{name}/{1 - rank}", 300)

for i, case in enumerate(json.loads((root / "cases.json").read_text())):
    own = {"steps": 10, "out": "out", "text": "text"} | case[rank]
    out, data = root / str(i) / own.pop("out"), root / own.pop("text")
    number = own.pop("version", None)
    _folder.version = (lambda package: number) if number else version
    _folder._KEY = f"case{i}"
    try:
        if own.pop("late", False):
            raise OSError(5, "late")
        config = replace_options(TrainConfig(), own | {"out": str(out)})
        corpus = read_corpus(data).fingerprint
        cluster = Cluster(rank, 2)
        with open_run(config, corpus, cluster) as (folder, config):
            if config.run.overwrite:
                _folder.clear_folder(config, folder, cluster)
            assert not config.run.overwrite or not (out / "checkpoints").exists()
            print("go", config.run.steps, config.schedule_length, config.checkpoint.resume)
            meet(f"through{i}")
    except Exception as error:
        print(code_of(error), describe(error))
    meet(f"done{i}")
"""

GO = "go 10 10 False"
# A run of 16 steps, gone on with for more.
OLD = {"preset": "tiny", "replicas": 2, "optimizer": "sgd", "steps": 24, "out": "../old"}
OLD |= {"schedule_steps": 16, "learning_rate": 1e-2, "batch": 4}
# By name: options of both, and what each must print.
CASES: dict[str, tuple[list[dict], list[tuple[str, ...]]]] = {
    "alike": (
        [
            {"learning_rate": 0.1, "process_logs": True},
            # What is each process's own, too.
            {"learning_rate": 0.1, "restarts": 3, "data": "/a", "process_id": 1,
             "num_processes": 2, "coordinator": "a:1", "startup_timeout": 5},
        ],
        [(GO,)] * 2,
    ),
    "options": (
        [{}, {"algorithm": "sgp", "seed": 3, "eval_every": 7}],
        [("2 ", "process 1 ", "--seed is 3, not 0", "--eval-every is 7, not 50",
          "--algorithm is sgp, not slowmo")] * 2,
    ),
    "files": ([{}, {"text": "other"}], [("2 ", "--data: process 1")] * 2),
    "version": (
        [{}, {"version": "0.0.1"}], [("2 ", "process 1", "0.0.1", version("jax"))] * 2
    ),
    # Process 0 decides: the other may have been started again before it.
    "resume of another": ([{}, {"resume": True}], [(GO,)] * 2),
    "resume": ([OLD | {"resume": True}, OLD], [("go 24 16 True",)] * 2),
    "overwrite": ([OLD | {"overwrite": True}, OLD], [("go 24 16 False",)] * 2),
    "nobody comes": (
        [{"startup_timeout": 1}, {"late": True}],
        [("75 ", "process 1 within 1 s", "startup_timeout"), ("75 Input/output error", "late")],
    ),
}  # fmt: skip


def test_two_processes(tmp_path, call):
    for name, changes in {"text": {}, "other": {"b.txt": "B", "c.txt": None}}.items():
        files = {f"{letter}.txt": 2000 * letter for letter in "abc"} | changes
        (tmp_path / name).mkdir()
        for file, content in files.items():
            if content is not None:
                (tmp_path / name / file).write_text(content)
    old = "train --preset tiny --replicas 2 --optimizer sgd --steps 16 --checkpoint-every 16"
    assert call(old, "--data", tmp_path / "text", "--out", tmp_path / "old").code == 0
    (tmp_path / "cases.json").write_text(json.dumps([options for options, _ in CASES.values()]))
    for rank, printed in enumerate(two_processes(PROGRAM, tmp_path)):
        for (name, (_, wanted)), line in zip(CASES.items(), printed.splitlines(), strict=True):
            assert line.startswith(wanted[rank][0]), (name, line)
            assert all(part in line for part in wanted[rank]), (name, line)
    assert [*(tmp_path / "old").iterdir()] == []  # neither the old run nor a lock


def test_a_run_is_told_of_one_that_is_going_on(tmp_path, call, text):
    out = tmp_path / "out"
    config = replace_options(TrainConfig(), {"out": str(out)})
    with open_run(config, read_corpus(text).fingerprint, ALONE) as (folder, _):
        assert folder.path == out
        for command in ("train --resume", "train --overwrite", "compare"):
            told = call(command, "--data", text, "--out", out)
            told.is_refused(f"--out {out}", os.getpid())
    assert [*out.iterdir()] == []
