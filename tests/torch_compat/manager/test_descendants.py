"""What the descendants of hivemind's manager have: lean_transformer, CALM, sahajBERT."""

import itertools

import pytest
import torch
from models import PlainTorch, largest_difference, regressor, samples
from torch import nn

from torch_compat import TPUManager

DATA = samples(16)


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"nprocs": 2, "start": True, **kwargs})


def _silence(replica: nn.Module) -> None:
    replica.out.weight.data.zero_()
    replica.out.bias.data.zero_()


def test_post_init_is_called_with_every_replica_and_not_with_the_master():
    model = regressor(width=32)
    before = model.out.weight.detach().clone()
    plain = PlainTorch(model)
    with manager_of(model, post_init=_silence) as manager:
        loss, _ = manager.step()
        silent = torch.stack([sample["y"] for sample in DATA[:2]]).square().mean()
        assert loss == pytest.approx(silent.item(), abs=1e-6)
        assert torch.equal(model.out.weight, before)
        manager.update_model_parameters(model.parameters())
        loss, _ = manager.step()
        assert loss == pytest.approx(plain.step(DATA[2:4]), abs=1e-6)


class TiedOnce(nn.Module):
    """Its replicas cannot be tied."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_master = nn.Linear(64, 64), True

    def tie_weights(self):
        assert self.is_master, "a replica was tied"

    def forward(self, x, y):
        return ((self.linear(x) - y).square().mean(),)

    def __deepcopy__(self, memo):
        replica = TiedOnce()
        replica.linear.load_state_dict(self.linear.state_dict())
        replica.linear.to(next(iter(memo.values())).device if memo else "cpu")
        replica.is_master = False
        return replica


def test_post_init_stands_in_the_place_of_tie_weights():
    with (
        manager_of(TiedOnce(), nprocs=1) as manager,
        pytest.raises(Exception, match="a replica was tied"),
    ):
        manager.step()
    with manager_of(TiedOnce(), nprocs=1, post_init=lambda replica: None) as manager:
        manager.step()


def test_post_init_must_not_change_the_number_of_parameters():
    def more(replica: nn.Module) -> None:
        replica.more = nn.Parameter(torch.ones(2))

    with (
        manager_of(regressor(width=32), post_init=more) as manager,
        pytest.raises(Exception, match="has 14 parameters and the master 13"),
    ):
        manager.step()


def test_compressed_gradients_are_rounded_once_and_added_in_float32():
    model = regressor(width=64)
    plain = PlainTorch(model)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    with manager_of(model, compress_grads=True) as manager:
        for number in range(3):
            manager.step()
            plain.model.zero_grad()
            plain.step(DATA[2 * number : 2 * number + 2])
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


def test_gradients_are_whole_without_compression():
    model = regressor(width=64)
    with manager_of(model) as manager:
        manager.step()
        gradient = manager.get_aggregated_gradients()[2]
        assert not torch.equal(gradient, gradient.bfloat16().float())
        assert manager.statistics.bytes_to_host >= 4 * sum(p.numel() for p in model.parameters())


def test_compute_grads_is_a_step():
    model = regressor(width=32)
    plain = PlainTorch(model)
    with manager_of(model, batch_size=3) as manager:
        loss, count = manager.compute_grads()
        assert count == 6
        assert loss == pytest.approx(plain.step(DATA[:6]), abs=1e-6)
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({}, 1),
        ({"batch_size": 4}, 4),
        ({"batch_size_per_device": 4}, 4),
        ({"batch_size": 4, "batch_size_per_device": 4}, 4),
    ],
)
def test_spellings_of_the_batch_size(arguments: dict, size: int):
    manager = manager_of(regressor(width=32), start=False, **arguments)
    assert manager.batch_size_per_device == size


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 4, "batch_size_per_device": 1}, "must not differ from it, got 4 and 1"),
        ({"batch_size": 0}, "`batch_size` must be >= 1, got 0"),
        ({"post_init": 3}, "`post_init` must be callable, got 3"),
        ({"compress_grads": 1}, "`compress_grads` must be True or False, got 1"),
    ],
)
def test_bad_arguments(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        manager_of(regressor(width=32), start=False, **arguments)
