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
SCRIPTS = sorted(JOBS.glob("*.sh"))
MANIFESTS = sorted(JOBS.glob("*.yaml"))


def as_called(script: str) -> TrainConfig:
    """The configuration of the only call of `jaxslowmo train`; every variable is taken as 4."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    (call,) = re.findall(r"jaxslowmo train (.*)", "\n".join(lines).replace("\\\n", " "))
    # What the caller adds, and what the shell does with it.
    call = re.split(r'"\$@"|\$\*"| & *$', call)[0]
    words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$\w+", "4", call))
    config = read_config(TrainConfig, "jaxslowmo train", words)
    assert config.run.out is not None
    assert config.checkpoint.resume
    assert config.checkpoint.checkpoint_every
    return config


def syntax_error(script: str) -> str:
    return subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr


def test_the_pages_tell_of_every_job():
    names = {file.name for file in (*SCRIPTS, *MANIFESTS)}
    assert len(names) >= 5
    page, overview = ((DOCS / name).read_text() for name in ("programs/jobs.md", "cluster.md"))
    assert set(re.findall(r'^--8<-- "examples/jobs/(.+)"$', page, re.MULTILINE)) == names
    assert set(re.findall(r"^\| `([\w.]+\.(?:sh|yaml))` \|", overview, re.MULTILINE)) == names


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts(file):
    script = file.read_text()
    assert not syntax_error(script)
    assert as_called(script).mesh.num_replicas == 4


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_job_sets(file):
    parts = yaml.safe_load_all(file.read_text())
    (spec,) = [part["spec"] for part in parts if part["kind"] == "JobSet"]
    (job,) = spec["replicatedJobs"]
    pods = job["template"]["spec"]
    assert pods["parallelism"] == pods["completions"]
    (container,) = pods["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert not syntax_error(script)
    config = as_called(script)
    # A replica per slice, or per process where there are none, on all chips.
    limits = container["resources"].get("limits", {})
    devices = job["replicas"] * pods["parallelism"] * limits.get("google.com/tpu", 1)
    replicas, each = config.mesh.num_replicas, config.mesh.devices_per_replica
    assert replicas == job["replicas"] * (1 if limits else pods["parallelism"])
    assert replicas * each == devices
    assert pods["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
