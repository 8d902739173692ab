"""Training with `--mesh`: the losses of one device per replica, resumed on another mesh."""

import shutil

import numpy as np
import pytest

from cli.commands import run, trajectory
from support.exhaustive import sweep

pytestmark = pytest.mark.xdist_group("meshes")  # they share runs

TINY = """train --preset tiny --batch 4 --sync-every 2 --slow-every 4 --log-every 1 --eval-every 3
    --warmup 0 --steps 6 --checkpoint-every 4"""
FILE = {"eval_batches": 1, "clip": 0.5, "keep": 9}
MESHES = {
    "one device": "replica=2",
    "fsdp": "replica=2,fsdp=2",
    "tensor": "replica=2,tensor=2",
    "stages": "replica=2,stage=2,fsdp=2",
    "three stages": "replica=2,stage=3",
}
OPTIONS = {
    "plain": "",
    "tied": {"tied": True},
    "accumulated": "--accumulate 2",
    **{kind: f"--schedule {kind}" for kind in ("gpipe", "zero_bubble", "lockstep")},
    "host": {"schedule": "one_f_one_b", "executor": "host"},
}
CASES = [
    (mesh, options)
    for mesh in [*MESHES][1:]
    for options in OPTIONS
    if "schedule" not in str(OPTIONS[options]) or mesh == "stages"
]


def losses(folder):
    return {r["step"]: r["loss"] for r in trajectory(folder) if "loss" in r}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """`trained(mesh, options)`: the folder of a run with a checkpoint to go on from."""
    folder, runs = tmp_path_factory.mktemp("meshes"), {}

    def train(mesh, options="", out=None):
        if out is None and (mesh, str(options)) in runs:
            return runs[mesh, str(options)]
        target = out or folder / f"run{len(runs)}"
        resume = "--resume" if out else ""
        given = ("--data", text, "--mesh", MESHES[mesh], "--out", target, options, resume)
        assert run(TINY, FILE, *given) == 0
        if out is None:
            runs[mesh, str(options)] = target
        return target

    return train


@pytest.mark.parametrize(
    ("mesh", "options"),
    sweep(CASES, lambda mesh, options: (mesh, options) == ("stages", "tied")),
)
def test_losses_are_those_of_one_device_per_replica(trained, mesh, options):
    given = OPTIONS[options]
    found = losses(trained(mesh, given))
    wanted = losses(trained("one device", "" if "schedule" in str(given) else given))
    assert found.keys() == wanted.keys() == {*range(1, 7)}
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=0, atol=2e-5)
    assert wanted[6] < wanted[1]


def test_a_run_with_stages_can_be_sampled_and_goes_on_without(trained, tmp_path, capsys):
    with_stages, alone = (trained(x, {"tied": True}) for x in ("stages", "one device"))
    for folder in (with_stages, alone):
        assert run("sample", folder, "--tokens 8 --prompt File --temperature 0") == 0
    written = capsys.readouterr().out.split("File")
    assert len(written) == 3
    assert written[1] == written[2]
    out = shutil.copytree(with_stages, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "6")
    trained("one device", {"tied": True}, out=out)
    found, wanted = losses(out), losses(with_stages)
    np.testing.assert_allclose([found[5], found[6]], [wanted[5], wanted[6]], rtol=0, atol=2e-5)
