"""The job files in examples/jobs are well formed and call `jaxslowmo train` as it can be called.

Only `mpirun.sh` is run, by tests/cluster/test_mpirun.py.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxslowmo.cli._config import TrainConfig, read_config

ROOT = Path(__file__).parents[2]
DOCS, JOBS = ROOT / "docs", ROOT / "examples" / "jobs"
FILES = [*sorted(JOBS.glob("*.sh")), *sorted(JOBS.glob("*.yaml"))]


def as_called(script: str) -> TrainConfig:
    """The configuration of the only call of `jaxslowmo train`; every variable is taken as 4."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    (call,) = re.findall(r"jaxslowmo train (.*)", "\n".join(lines).replace("\\\n", " "))
    # What the caller adds, and what the shell does with it.
    call = re.split(r'"\$@"|\$\*"| & *$', call)[0]
    words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$\w+", "4", call))
    return read_config(TrainConfig, "jaxslowmo train", words)


def test_the_pages_tell_of_every_job():
    names = {file.name for file in FILES}
    assert len(names) >= 5
    page, overview = ((DOCS / name).read_text() for name in ("programs/jobs.md", "cluster.md"))
    assert set(re.findall(r'^--8<-- "examples/jobs/(.+)"$', page, re.MULTILINE)) == names
    assert set(re.findall(r"^\| `([\w.]+\.(?:sh|yaml))` \|", overview, re.MULTILINE)) == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_job_calls_train_as_it_can_be_called(file):
    script = file.read_text()
    if file.suffix == ".yaml":
        (job,) = [x["spec"] for x in yaml.safe_load_all(script) if x["kind"] == "JobSet"]
        pods = job["replicatedJobs"][0]["template"]["spec"]
        assert pods["parallelism"] == pods["completions"]
        assert pods["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
        ((script,),) = [x["args"] for x in pods["template"]["spec"]["containers"]]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert not done.stderr
    config = as_called(script)
    assert config.run.out is not None
    assert config.checkpoint.resume
    assert config.checkpoint.checkpoint_every
    assert config.mesh.num_replicas > 1
