"""Training with `--mesh`: the losses of one device per replica, and other meshes to go on on."""

import shutil

import numpy as np
import pytest

from jaxslowmo.cli import main
from support.exhaustive import sweep
from support.metrics import trajectory

pytestmark = pytest.mark.xdist_group("meshes")  # they share runs

TINY = (
    "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 4, "--sync-every", 2,
    "--slow-every", 4, "--log-every", 1, "--eval-every", 3, "--warmup", 0, "--clip", 0.5,
    "--steps", 6,
)  # fmt: skip
STOPPED = 4  # where another mesh goes on
MESHES = {
    "one device": "replica=2",
    "fsdp": "replica=2,fsdp=2",
    "tensor": "replica=2,tensor=2",
    "stages": "replica=2,stage=2,fsdp=2",
    "three stages": "replica=2,stage=3",
    "all": "stage=2,fsdp=2,tensor=2",
}


def losses(folder):
    return {r["step"]: r["loss"] for r in trajectory(folder) if "loss" in r}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(mesh, *options)`: the folder of a run with a checkpoint to go on from."""
    folder = tmp_path_factory.mktemp("meshes")
    (folder / "text").mkdir()
    for i in range(10):
        (folder / "text" / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    runs = {}

    def run(mesh, *options, out=None):
        key = (mesh, *options)
        if out is None and key in runs:
            return runs[key]
        target = folder / f"run{len(runs)}" if out is None else out
        argv = [*TINY, "--checkpoint-every", STOPPED, "--keep", 9, "--data", folder / "text"]
        with pytest.raises(SystemExit) as left:
            main([str(x) for x in (*argv, "--mesh", MESHES[mesh], "--out", target, *options)])
        assert left.value.code == 0
        if out is None:
            runs[key] = target
        return target

    return run


OPTIONS = {
    "plain": (),
    "tied": ("--tied",),
    "accumulated": ("--accumulate", 2),
    "validated after": ("--validate", "after"),
    "gpipe": ("--schedule", "gpipe", "--microbatches", 2),
    "zbv": ("--schedule", "zbv"),
    "zero_bubble": ("--schedule", "zero_bubble"),
    "lockstep": ("--schedule", "lockstep"),
    "host": ("--schedule", "one_f_one_b", "--executor", "host"),
    "host, zero_bubble": ("--schedule", "zero_bubble", "--executor", "host"),
}
CASES = [
    (mesh, options)
    for mesh in ("fsdp", "tensor", "stages", "three stages")
    for options in OPTIONS
    if "--schedule" not in OPTIONS[options] or (mesh == "stages" and options != "zbv")
    # Its four chunks are all that the three layers of the preset cannot be.
]


@pytest.mark.parametrize(
    ("mesh", "options"),
    sweep(CASES, lambda mesh, options: mesh == "stages" and options in ("tied", "host")),
)
def test_losses_are_those_of_one_device_per_replica(trained, mesh, options):
    given = OPTIONS[options]
    plain = () if "--schedule" in given else given
    found, wanted = losses(trained(mesh, *given)), losses(trained("one device", *plain))
    assert found.keys() == wanted.keys()
    assert len(found) == 6
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=0, atol=2e-5)
    assert wanted[6] < wanted[1]


MOVES = [(old, new) for old in MESHES for new in MESHES if old != new and "all" not in (old, new)]


@pytest.mark.exhaustive  # tests/checkpoint/test_form.py does it without the command line
@pytest.mark.parametrize(("old", "new"), MOVES)
def test_a_run_goes_on_on_another_mesh(trained, tmp_path, old, new):
    undisturbed = trained(old, "--tied")
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    for step in (out / "checkpoints").iterdir():
        if step.name.isdigit() and int(step.name) > STOPPED:
            shutil.rmtree(step)
    trained(new, "--tied", "--resume", out=out)
    found, wanted = losses(out), losses(undisturbed)
    np.testing.assert_allclose(
        [found[step] for step in (5, 6)], [wanted[step] for step in (5, 6)], rtol=0, atol=2e-5
    )


def test_a_run_with_stages_can_be_sampled(trained, capsys):
    run = trained("stages", "--tied")
    for folder in (run, trained("one device", "--tied")):
        main_returns(["sample", folder, "--tokens", 8, "--prompt", "File", "--temperature", 0])
    written = capsys.readouterr().out.split("File")
    assert len(written) == 3
    assert written[1] == written[2]


def main_returns(argv):
    with pytest.raises(SystemExit) as left:
        main([str(x) for x in argv])
    assert left.value.code == 0


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("replica=4,fsdp=4", "--mesh replica=4,fsdp=4 needs 16 devices, found 8 (CPU device): use"),
        ("stage=4", "4 stages need as many layers, and --preset demo has 3"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(call, text, tmp_path, mesh, words):
    outcome = call(
        "train", "--preset", "demo", "--mesh", mesh, "--data", text, "--out", tmp_path / "a"
    )
    assert outcome.code == 2
    assert words in outcome.err
    assert not (tmp_path / "a" / "config.json").exists()
