"""Wrong arguments of the examples, on the command line."""

import pytest
import torch

from torch_compat.examples import train_digits, train_slowmo, train_tpu_manager

# A program, its arguments, and what it says of them.
LINES = [
    (train_digits, ["--target-accuracy", "101"], "--target-accuracy"),
    (train_slowmo, ["--cpu-devices", "65"], "--cpu-devices"),
    (train_slowmo, ["--base", "gossip"], "'gossip'"),
    (train_tpu_manager, ["--learning-rate", "nan"], "--learning-rate"),
    (train_tpu_manager, ["--resume"], "--checkpoint"),
    (train_tpu_manager, ["--resume", "--checkpoint", "/nowhere/c.pt"], "/nowhere/c.pt"),
]


def stopped(program, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        program.parse(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("program", "arguments", "said"), LINES)
def test_wrong_arguments(program, arguments, said, capsys):
    assert said in stopped(program, arguments, capsys)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capsys):
    path = tmp_path / "c.pt"
    config = vars(train_tpu_manager.parse(["--width", "96"]).config)
    torch.save({"config": config}, path)
    arguments = ["--checkpoint", str(path), "--resume"]
    assert "config" in stopped(train_tpu_manager, arguments, capsys)
    path.write_text("nonsense")
    assert f"{path} is not a checkpoint" in stopped(train_tpu_manager, arguments, capsys)
