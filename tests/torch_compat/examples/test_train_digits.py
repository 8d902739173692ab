import pytest

from support.waiting import PATIENCE_SECONDS
from torch_compat.examples.train_digits import parse


def ended(start, *arguments):
    """Exit status and output."""
    with start("train_digits", *arguments, given=()) as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output


def test_two_replicas_read_digits(start):
    # 90 % is the target that the program itself asserts.
    arguments = ["--cpu-devices", "2", "--target-accuracy", "90", "--epochs", "2", "--metrics"]
    status, output = ended(start, *arguments)
    assert status == 0, output
    accuracies = [float(line.split()[-2]) for line in output.splitlines() if "accuracy" in line]
    assert len(accuracies) == 2, output
    assert accuracies[-1] >= 90
    assert "Metric: CompileTime" in output


def test_too_low_an_accuracy_is_an_error(start):
    sizes = ["--epochs", "1", "--train-samples", "64", "--test-samples", "32"]
    status, output = ended(start, "--cpu-devices", "1", "--target-accuracy", "100", *sizes)
    assert status == 1, output
    assert "is below the target, 100.0 %." in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-accuracy", "101"], "--target-accuracy: must be a number from 0 to 100"),
        (["--epochs", "0"], "--epochs: must be a whole number >= 1, got '0'"),
        (["--cpu-devices", "4", "--nprocs-per-node", "3"], "must divide --cpu-devices, 4, got 3"),
        (["--cpu-devices", "4", "--train-samples", "100"], "for every device, 128, got 100"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
