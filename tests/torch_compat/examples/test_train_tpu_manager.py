import signal

import pytest
import torch

from support.waiting import PATIENCE_SECONDS
from torch_compat.examples import outer_optimizer
from torch_compat.examples.train_tpu_manager import parse

RUN = ("--steps", "24", "--validate-every", "6", "--grad-accumulation-steps", "2")


def test_it_learns_and_resumes_where_ctrl_c_stopped_it(run, start, summary, tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    reference = run("train_tpu_manager", *RUN, "--checkpoint", str(whole))
    assert reference.steps == 24
    assert reference.last_loss < 0.75 * reference.first_loss
    assert reference.samples_per_second > 0

    with start("train_tpu_manager", *RUN, "--checkpoint", str(parts)) as process:
        output = ""
        while "step 6: validation loss" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        process.send_signal(signal.SIGINT)
        output += process.stdout.read()
        assert process.wait(PATIENCE_SECONDS) == 1, output
    assert "Stopped by Ctrl-C." in output
    assert "Traceback" not in output
    stopped = summary(output)
    assert 6 <= stopped.steps < 24
    assert torch.load(parts, weights_only=True)["optimizer"]["steps"] == stopped.steps

    resumed = run("train_tpu_manager", *RUN, "--checkpoint", str(parts), "--resume")
    assert resumed.first_loss == stopped.last_loss
    assert resumed.steps == 24 - stopped.steps
    states = [torch.load(path, weights_only=True) for path in (whole, parts)]
    assert states[0]["samples"] == states[1]["samples"] == 24 * 2 * 2 * 8 * 2
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], value, rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu-devices", "0"], "--cpu-devices: must be a whole number from 1 to 64, got '0'"),
        (["--cpu-devices", "two"], "--cpu-devices: must be a whole number from 1 to 64"),
        (["--steps", "-3"], "--steps: must be a whole number >= 1, got '-3'"),
        (["--learning-rate", "nan"], "--learning-rate: must be a number > 0, got 'nan'"),
        (["--seed", "-1"], "--seed: must be a whole number >= 0"),
        (["--width", "100", "--heads", "3"], "`width` must be a multiple of `heads`"),
        (["--resume"], "--resume: needs --checkpoint"),
        (["--resume", "--checkpoint", "/nowhere/c.pt"], "There is no checkpoint /nowhere/c.pt"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capsys):
    path = tmp_path / "c.pt"
    config = vars(parse(["--width", "96"]).config)
    torch.save({"config": config, "outer": "local"}, path)
    with pytest.raises(SystemExit):
        parse(["--checkpoint", str(path), "--resume"])
    assert "is of another run: its config is" in capsys.readouterr().err
    path.write_text("nonsense")
    with pytest.raises(SystemExit):
        parse(["--checkpoint", str(path), "--resume"])
    assert "is not a checkpoint that can be read" in capsys.readouterr().err


def test_hivemind_is_asked_for_only_where_it_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(outer_optimizer, "hivemind_is_installed", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--optimizer", "hivemind"])
    assert "hivemind is not installed (pip install hivemind)" in capsys.readouterr().err
