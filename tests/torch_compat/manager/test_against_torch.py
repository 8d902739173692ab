"""Loss and gradients are those of plain torch on the same samples."""

import math

import pytest
import torch
from models import PlainTorch, largest_difference, regressor, samples

from torch_compat import TPUManager

TOLERANCE = 1e-6


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_steps_equal_plain_torch(nprocs: int, accumulate: int):
    model, batch = regressor(), 2
    assert sum(p.numel() for p in model.parameters()) >= 700_000
    per_step = nprocs * accumulate * batch
    data = samples(6 * per_step)
    plain = PlainTorch(model)
    with TPUManager(
        model,
        data,
        nprocs=nprocs,
        batch_size_per_device=batch,
        grad_accumulation_steps=accumulate,
        start=True,
    ) as manager:

        def step(number: int):
            loss, count = manager.step()
            assert count == per_step
            expected = plain.step(data[number * per_step : (number + 1) * per_step])
            assert math.isclose(loss, expected, abs_tol=TOLERANCE)
            gradients = manager.get_aggregated_gradients()
            assert largest_difference(gradients, plain.gradients()) <= TOLERANCE

        step(0)
        step(1)  # without zero_grad: gradients add up
        manager.zero_grad()
        plain.model.zero_grad()
        assert not any(g.any() for g in manager.get_aggregated_gradients())
        step(2)
        new = [p.detach() + 0.01 * torch.randn_like(p) for p in model.parameters()]
        manager.update_model_parameters(new)
        with torch.no_grad():
            for ours, theirs, value in zip(
                model.parameters(), plain.model.parameters(), new, strict=True
            ):
                assert torch.equal(ours, value)
                theirs.copy_(value)
        manager.zero_grad()
        plain.model.zero_grad()
        step(3)
        step(4)
    assert manager.exitcode == 0


def test_eight_devices():
    model = regressor()
    plain, data = PlainTorch(model), samples(32)
    with TPUManager(model, data, nprocs=8, batch_size_per_device=2, start=True) as manager:
        for number in range(2):
            loss, count = manager.step()
            assert count == 16
            assert math.isclose(
                loss, plain.step(data[number * 16 : number * 16 + 16]), abs_tol=TOLERANCE
            )
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) <= TOLERANCE


def test_the_usage_of_the_original_trainer():
    """hivemind's run_trainer_tpu.py, with SGD in the place of its collaborative optimizer."""
    model = regressor()
    data = samples(64)
    plain = PlainTorch(model)
    manager = TPUManager(
        model,
        dataset=data,
        collate_fn=torch.utils.data.default_collate,
        grad_accumulation_steps=2,
        batch_size_per_device=1,
        nprocs=2,
        start=True,
    )
    model = manager._synchronizer.master_model
    manager.step()
    manager.update_model_parameters(model.parameters())
    manager.step()
    manager.step()
    manager.get_aggregated_gradients()
    manager.zero_grad()

    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.model.parameters(), lr=0.1, momentum=0.9)
    manager.update_model_parameters(model.parameters())
    for number in range(3, 9):
        loss, count = manager.step()
        assert count == 4
        with torch.no_grad():
            for parameter, gradient in zip(
                model.parameters(), manager.get_aggregated_gradients(), strict=True
            ):
                parameter.grad[...] = gradient
        ours.step()
        manager.update_model_parameters(model.parameters())
        manager.zero_grad()

        theirs.zero_grad()
        expected = plain.step(data[number * 4 : number * 4 + 4])
        theirs.step()
        assert math.isclose(loss, expected, abs_tol=1e-5)
    assert largest_difference(list(model.parameters()), list(plain.model.parameters())) <= 1e-5
    manager.shutdown()
    assert manager.exitcode == 0
