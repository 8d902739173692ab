import pytest
import torch
from slowmo_spawned import spawned

from torch_compat.examples.train_compiled import Trainer, parse

TRAINING = ("--steps", "24", "--slowmo-frequency", "8", "--learning-rate", "5e-3")


@pytest.mark.parametrize("devices", ["1", "2"])
def test_it_learns_and_compiles_nothing_after_the_first_period(run, devices):
    summary = run("train_compiled", *TRAINING, "--cpu-devices", devices)
    assert summary.steps == 24
    assert summary.last_loss < 0.75 * summary.first_loss
    assert f"(mean of {devices} replicas)" in summary.output
    assert "0 programs were compiled after step 9" in summary.output


def step_that_reads_its_loss():
    """What torch_xla says where a step is more than one program."""
    sizes = ("--width", "4", "--layers", "1", "--heads", "1", "--length", "4")
    trainer = Trainer(parse(["--cpu-devices", "1", *sizes]))
    trainer.net.module.register_forward_hook(lambda module, inputs, out: out["loss"].item())
    with pytest.raises(RuntimeError) as caught:
        trainer.compiled_step(torch.zeros(2, 4, dtype=torch.int64).to(trainer.device))
    return str(caught.value)


def test_a_step_on_one_device_is_one_program():
    (message,) = spawned(1, step_that_reads_its_loss, by="torch_xla")
    assert message.startswith("Unexpected execution happens inside the compiled function")
