"""The example programs that train over torch_xla learn, stop at Ctrl-C, and resume."""

import os
import signal

import pytest
import torch
from example_runs import run, start, summary

from support.waiting import PATIENCE_SECONDS


def test_two_replicas_read_digits():
    # 90 % is the target that the program itself asserts.
    arguments = ["--cpu-devices", "2", "--target-accuracy", "90", "--epochs", "2"]
    with start("train_digits", *arguments, given=()) as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    accuracies = [float(line.split()[-2]) for line in output.splitlines() if "accuracy" in line]
    assert len(accuracies) == 2, output
    assert accuracies[-1] >= 90


def test_replicas_of_a_language_model_learn():
    summary = run("train_slowmo", "--steps", "32", "--learning-rate", "5e-3")
    assert summary.steps == 32
    assert summary.last_loss < 0.75 * summary.first_loss
    assert summary.samples_per_second > 0


def test_ctrl_c_ends_it_at_once_also_with_sgp():
    with start("train_slowmo", "--steps", "100000", "--base", "sgp") as process:
        output = ""
        while "20/100000" not in output:
            block = os.read(process.stdout.fileno(), 4096).decode(errors="replace")
            assert block, output
            output += block
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output += process.stdout.read()
        assert process.wait(PATIENCE_SECONDS) == 1, output
    assert "Stopped by Ctrl-C." in output
    assert "Traceback" not in output


TRAINING = ("--steps", "24", "--slowmo-frequency", "8", "--learning-rate", "5e-3")


@pytest.mark.parametrize("devices", ["1", "2"])
def test_it_learns_and_compiles_nothing_after_the_first_period(devices):
    summary = run("train_slowmo", *TRAINING, "--compiled", "--cpu-devices", devices)
    assert summary.steps == 24
    assert summary.last_loss < 0.75 * summary.first_loss
    assert f"(mean of {devices} replicas)" in summary.output
    assert "0 programs were compiled after step 9" in summary.output


RUN = ("--steps", "24", "--validate-every", "6", "--grad-accumulation-steps", "2")


def test_it_learns_and_resumes_where_ctrl_c_stopped_it(tmp_path):
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
    assert torch.load(parts, weights_only=True)["steps"] == stopped.steps

    resumed = run("train_tpu_manager", *RUN, "--checkpoint", str(parts), "--resume")
    assert resumed.first_loss == stopped.last_loss
    assert resumed.steps == 24 - stopped.steps
    states = [torch.load(path, weights_only=True) for path in (whole, parts)]
    assert states[0]["samples"] == states[1]["samples"] == 24 * 2 * 2 * 8
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], value, rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]
