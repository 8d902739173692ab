"""Loss and gradients are those of plain torch on the same samples."""

import math

import pytest
import torch
from models import PlainTorch, largest_difference, regressor, samples

from torch_compat import TPUManager

TOLERANCE = 1e-6


@pytest.mark.parametrize(("nprocs", "accumulate"), [(2, 3), (8, 1)])
def test_steps_equal_plain_torch(nprocs: int, accumulate: int):
    model, batch = regressor(), 2
    count = sum(p.numel() for p in model.parameters())
    assert count >= 700_000
    per_step = nprocs * accumulate * batch
    data = samples(4 * per_step)
    plain = PlainTorch(model)
    with TPUManager(
        model,
        data,
        nprocs=nprocs,
        batch_size=batch,  # a descendant's name of `batch_size_per_device`
        grad_accumulation_steps=accumulate,
        start=True,
    ) as manager:

        def step(number: int):
            take = manager.compute_grads if number == 2 else manager.step
            loss, num_samples = take()
            assert num_samples == per_step
            expected = plain.step(data[number * per_step : (number + 1) * per_step])
            assert math.isclose(loss, expected, abs_tol=TOLERANCE)
            gradients = manager.get_aggregated_gradients()
            assert largest_difference(gradients, plain.gradients()) <= TOLERANCE

        step(0)
        step(1)  # without zero_grad: gradients add up
        assert 4 * count <= manager.statistics.bytes_to_host < 4.1 * count
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
        step(3)
    assert manager.exitcode == 0


def test_compressed_gradients_are_rounded_once_and_added_in_float32():
    data, model = samples(6), regressor(width=64)
    plain = PlainTorch(model)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    with TPUManager(model, data, nprocs=2, compress_grads=True, start=True) as manager:
        for number in range(3):
            manager.step()
            plain.model.zero_grad()
            plain.step(data[2 * number : 2 * number + 2])
            for total, gradient in zip(expected, plain.gradients(), strict=True):
                total += gradient.bfloat16()
        statistics = manager.statistics
        found = manager.get_aggregated_gradients()
    for ours, theirs in zip(found, expected, strict=True):
        # A last digit of the mean may round the other way: one of 8 bits, of the largest.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=theirs.abs().max().item() / 128)
    kept = found[2]
    assert not torch.equal(kept, kept.bfloat16().float())  # a sum of three in bfloat16 would be
    count = sum(p.numel() for p in model.parameters())
    assert 2 * count <= statistics.bytes_to_host < 2.1 * count
