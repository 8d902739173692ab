"""Training with `--mesh`: the losses of one device per replica, resumed on another mesh."""

import shutil

import numpy as np

from cli.commands import run, trajectory

TINY = """train --preset tiny --batch 4 --sync-every 2 --slow-every 4 --log-every 1 --eval-every 3
    --warmup 0 --steps 6 --checkpoint-every 4"""
FILE = {"eval_batches": 1, "clip": 0.5, "keep": 9, "tied": True}


def losses(folder):
    return [r["loss"] for r in trajectory(folder) if "loss" in r]


def test_stages_train_and_write_as_one_device_per_replica_which_goes_on_with_them(
    text, tmp_path, capsys
):
    with_stages, alone = tmp_path / "stages", tmp_path / "alone"
    for mesh, out in (("replica=2,stage=2,fsdp=2", with_stages), ("replica=2", alone)):
        assert run(TINY, FILE, "--data", text, "--mesh", mesh, "--out", out) == 0
    found, wanted = losses(with_stages), losses(alone)
    assert len(found) == 6
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    capsys.readouterr()
    for folder in (with_stages, alone):
        assert run("sample", folder, "--tokens 8 --prompt File --temperature 0") == 0
    written = capsys.readouterr().out.split("File")
    assert len(written) == 3
    assert written[1] == written[2]
    shutil.rmtree(with_stages / "checkpoints" / "6")
    assert run(TINY, "--data", text, "--mesh replica=2 --resume --out", with_stages) == 0
    np.testing.assert_allclose(losses(with_stages), found, rtol=0, atol=2e-5)
