"""The example programs that train over torch_xla learn, stop at Ctrl-C, and resume."""

import torch
from example_runs import SMALL, Program, started, summary

TWO = ("--cpu-devices", "2")
TRAINING = ("--slowmo-frequency", "8", "--learning-rate", "5e-3")


def test_two_replicas_read_digits(tmp_path):
    # 90 % is the target that the program itself asserts.
    arguments = [*TWO, "--target-accuracy", "90", "--epochs", "2"]
    output = Program("train_digits", *arguments, folder=tmp_path).end().output
    accuracies = [float(line.split()[-2]) for line in output.splitlines() if "accuracy" in line]
    assert len(accuracies) == 2, output
    assert accuracies[-1] >= 90


def test_ctrl_c_ends_it_at_once_also_with_sgp(tmp_path):
    arguments = [*TWO, *SMALL, "--steps", "100000", "--base", "sgp"]
    with started("train_slowmo", *arguments, folder=tmp_path) as program:
        program.interrupt_after("20/100000")
        output = program.end(1).output
    assert "Stopped by Ctrl-C." in output
    assert "Traceback" not in output


def test_replicas_of_a_language_model_learn_and_compile_nothing_after_the_first_period(tmp_path):
    arguments = [*TWO, *SMALL, *TRAINING, "--steps", "24", "--compiled"]
    output = Program("train_slowmo", *arguments, folder=tmp_path).end().output
    assert summary(output).steps == 24
    assert summary(output).last_loss < 0.75 * summary(output).first_loss
    assert summary(output).samples_per_second > 0
    assert "(mean of 2 replicas)" in output
    assert "0 programs were compiled after step 9" in output


RUN = (*TWO, *SMALL, "--steps", "16", "--validate-every", "4", "--grad-accumulation-steps", "2")


def test_it_learns_and_resumes_where_ctrl_c_stopped_it(tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"

    def program(path, *arguments):
        return started("train_tpu_manager", *RUN, "--checkpoint", str(path), *arguments, **how)

    how = {"folder": tmp_path}
    with program(whole) as undisturbed, program(parts) as interrupted:
        interrupted.interrupt_after("step 4: validation loss")
        output = interrupted.end(1).output
        reference = summary(undisturbed.end().output)
    assert reference.steps == 16
    assert reference.last_loss < 0.8 * reference.first_loss
    assert "Stopped by Ctrl-C." in output
    assert "Traceback" not in output
    stopped = summary(output)
    assert 4 <= stopped.steps < 16
    assert torch.load(parts, weights_only=True)["steps"] == stopped.steps

    with program(parts, "--resume") as again:
        resumed = summary(again.end().output)
    assert resumed.first_loss == stopped.last_loss
    assert resumed.steps == 16 - stopped.steps
    states = [torch.load(path, weights_only=True) for path in (whole, parts)]
    assert states[0]["samples"] == states[1]["samples"] == 16 * 2 * 2 * 8
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], value, rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob("*.pt?*"))
