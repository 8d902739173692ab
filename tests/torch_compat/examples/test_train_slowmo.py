import os
import signal

import pytest

from support.waiting import PATIENCE_SECONDS
from torch_compat.examples.train_slowmo import parse


def test_it_learns(run):
    summary = run("train_slowmo", "--steps", "32", "--learning-rate", "5e-3")
    assert summary.steps == 32
    assert summary.last_loss < 0.75 * summary.first_loss
    assert summary.samples_per_second > 0


def test_ctrl_c_ends_it_at_once_also_with_sgp(start):
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu-devices", "65"], "--cpu-devices: must be a whole number from 1 to 64, got '65'"),
        (["--slowmo-momentum", "1"], "--slowmo-momentum: must be in [0, 1), got '1'"),
        (["--slowmo-frequency", "0"], "--slowmo-frequency: must be a whole number >= 1"),
        (["--cpu-devices", "4", "--nprocs-per-node", "3"], "must divide --cpu-devices, 4, got 3"),
        (["--base", "gossip"], "invalid choice: 'gossip'"),
        (["--layers", "1.5"], "--layers: must be a whole number >= 1"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
