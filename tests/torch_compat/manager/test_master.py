"""The master on the host: its gradients, parameters and buffers, and what replicas do with it."""

import itertools
import multiprocessing as mp
import os

import numpy as np
import pytest
import torch
from models import PlainTorch, Regressor, largest_difference, regressor, samples
from torch import nn

from torch_compat import TPUManager
from torch_compat.master import MasterModel

DATA = samples(16)


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"nprocs": 1, "start": True, **kwargs})


def test_a_process_that_may_be_started_later_and_only_once():
    numbers = {"nprocs": np.int64(2), "batch_size_per_device": np.int32(2), "init_timeout": None}
    manager = manager_of(regressor(width=32), start=False, **numbers)
    assert isinstance(manager, mp.Process)
    assert manager.pid is None
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        manager.step()
    with manager:
        manager.start()
        assert manager.step()[1] == 4
        with pytest.raises(RuntimeError, match="started already"):
            manager.start()
        manager.step()
        assert manager.pid not in (None, os.getpid())
    assert not manager.is_alive()
    assert manager.exitcode == 0


def test_gradients_are_copies_that_an_optimizer_may_drop_and_a_program_replace():
    model = regressor(width=32)
    model.out.bias.grad = torch.ones(64)  # what is there at first counts
    plain = PlainTorch(model)
    plain.model.out.bias.grad = torch.ones(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def check(number: int) -> list[torch.Tensor]:
        manager.step()
        plain.step(DATA[number : number + 1])
        found = manager.get_aggregated_gradients()
        assert largest_difference(found, plain.gradients()) < 1e-6
        return found

    with manager_of(model) as manager:
        copies = check(0)
        live = manager.get_aggregated_gradients(copy=False)
        kept = [g.clone() for g in copies]
        check(1)
        assert all(torch.equal(a, b) for a, b in zip(copies, kept, strict=True))
        assert not torch.equal(live[-1], kept[-1])
        assert all(g is p.grad for g, p in zip(live, model.parameters(), strict=True))
        optimizer.zero_grad()  # drops the gradients: set_to_none
        plain.model.zero_grad()
        check(2)
        model.out.weight.grad = torch.ones_like(model.out.weight)
        plain.model.out.weight.grad = torch.ones_like(model.out.weight)
        check(3)
        manager.zero_grad()
        assert not any(g.any() for g in live)


def _assign_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0


def _load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()}, assign=True)


def test_parameters_that_replaced_the_shared_ones_reach_the_devices():
    model = regressor(width=32)
    with manager_of(model) as manager:
        manager.step()
        samples_taken = itertools.count(1)
        for replace in (_assign_data, _load_by_assignment):
            replace(model)
            manager.update_model_parameters(model.parameters())
            loss, _ = manager.step()
            # With zero parameters the output is zero.
            y = DATA[next(samples_taken)]["y"]
            assert loss == pytest.approx(y.square().mean().item(), abs=1e-6)
            assert all(parameter.data.is_shared() for parameter in model.parameters())
            model.out.bias.data.fill_(1.0)  # in place, in the shared tensor again
            manager.update_model_parameters(model.parameters())
            loss, _ = manager.step()
            y = DATA[next(samples_taken)]["y"]
            assert loss == pytest.approx((y - 1).square().mean().item(), abs=1e-6)
        model.register_buffer("found", torch.ones(1))
        with pytest.raises(ValueError, match="found"):
            manager.update_model_parameters(model.parameters())
        model.more = nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=r"13 .*14"):
            manager.step()


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.b = nn.Parameter(torch.zeros(2, 2))


def test_parameters_are_copied_and_may_be_views_of_each_other():
    model = Square()
    before = model.a.detach().clone()
    master = MasterModel(model)
    master.set_host_parameters([model.b, model.a])
    assert not model.a.any()
    assert torch.equal(model.b, before)
    master.set_host_parameters([model.a, model.b.t()])
    assert torch.equal(model.b, before.t())
    new = [torch.full((2, 2), 0.5)] * 2
    master.set_host_parameters(new)
    new[0].fill_(3.0)
    assert (model.a == 0.5).all()
    assert (model.b == 0.5).all()


class Tying(Regressor):
    def tie_weights(self) -> None:
        self.out.bias.data.add_(1.0)


def _silence(replica: nn.Module) -> None:
    replica.out.weight.data.zero_()
    replica.out.bias.data.zero_()


def test_post_init_is_called_with_every_replica_in_the_place_of_tie_weights():
    torch.manual_seed(0)
    model = Tying(width=32)
    before = model.out.bias.detach().clone()
    with manager_of(model, nprocs=2, post_init=_silence) as manager:
        torch.testing.assert_close(model.out.bias, before + 1)  # the master is tied
        plain = PlainTorch(model)
        loss, _ = manager.step()
        silent = torch.stack([sample["y"] for sample in DATA[:2]]).square().mean()
        assert loss == pytest.approx(silent.item(), abs=1e-6)
        assert model.out.weight.any(), "the master is not silenced"
        manager.update_model_parameters(model.parameters())
        loss, _ = manager.step()
        assert loss == pytest.approx(plain.step(DATA[2:4]), abs=1e-6)
