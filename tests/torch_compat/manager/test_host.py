"""The host's side: gradients, parameters, arguments, and the processes' ends."""

import itertools
import multiprocessing as mp
import os
import signal
import threading

import numpy as np
import pytest
import torch
from models import PlainTorch, largest_difference, regressor, samples
from torch import nn

from support.waiting import PATIENCE_SECONDS
from torch_compat import TPUManager, TPUWorkerError
from torch_compat.master import MasterModel

DATA = samples(32)


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"nprocs": 1, "start": True, **kwargs})


def test_it_is_a_process():
    with manager_of(regressor(width=32)) as manager:
        assert isinstance(manager, mp.Process)
        assert manager.is_alive()
        assert isinstance(manager.pid, int)
        assert manager.pid != os.getpid()
    assert not manager.is_alive()


def test_start_later():
    manager = manager_of(regressor(width=32), start=False)
    assert manager.pid is None
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        manager.step()
    manager.start()
    manager.step()
    manager.shutdown()
    assert manager.exitcode == 0


def test_shutdown_before_start():
    manager = manager_of(regressor(width=32), start=False)
    manager.shutdown()
    with pytest.raises(TPUWorkerError, match="shut down"):
        manager.step()


def test_gradients_are_copies_unless_asked_otherwise():
    model = regressor(width=32)
    with manager_of(model) as manager:
        manager.step()
        copies = manager.get_aggregated_gradients()
        live = manager.get_aggregated_gradients(copy=False)
        kept = [g.clone() for g in copies]
        manager.step()
        assert all(torch.equal(a, b) for a, b in zip(copies, kept, strict=True))
        assert not torch.equal(live[-1], kept[-1])
        assert all(g is p.grad for g, p in zip(live, model.parameters(), strict=True))
        manager.zero_grad()
        assert not any(g.any() for g in live)


def test_zero_grad_of_an_optimizer_zeroes_and_a_replaced_gradient_counts():
    model = regressor(width=32)
    plain = PlainTorch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager_of(model) as manager:
        manager.step()
        plain.step(DATA[:1])
        optimizer.zero_grad()  # drops the gradients: set_to_none
        plain.model.zero_grad()
        manager.step()
        plain.step(DATA[1:2])
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
        model.out.weight.grad = torch.ones_like(model.out.weight)
        plain.model.out.weight.grad = torch.ones_like(model.out.weight)
        manager.step()
        plain.step(DATA[2:3])
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6


def test_parameters_are_copied_from_the_argument_into_the_master():
    model = regressor(width=32)
    new = [torch.full_like(p, 0.5) for p in model.parameters()]
    master = MasterModel(model)
    master.set_host_parameters(new)
    assert all((p == 0.5).all() for p in model.parameters())
    assert all((p == 0.5).all() for p in new)


def _assign_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0


def _vector_to_parameters(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0, model.parameters())


def _load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [_assign_data, _vector_to_parameters, _load_by_assignment])
def test_parameters_that_replaced_the_shared_ones_reach_the_devices(replace):
    model = regressor(width=32)
    with manager_of(model) as manager:
        manager.step()
        replace(model)
        manager.update_model_parameters(model.parameters())
        loss, _ = manager.step()
        # With zero parameters the output is zero.
        assert loss == pytest.approx(DATA[1]["y"].square().mean().item(), abs=1e-6)
        for parameter in model.parameters():
            assert parameter.data.is_shared()
        model.out.bias.data.fill_(1.0)  # in place, in the shared tensor again
        manager.update_model_parameters(model.parameters())
        loss, _ = manager.step()
        assert loss == pytest.approx((DATA[2]["y"] - 1).square().mean().item(), abs=1e-6)


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.b = nn.Parameter(torch.zeros(2, 2))


def test_parameters_may_be_views_of_each_other():
    model = Square()
    before = model.a.detach().clone()
    master = MasterModel(model)
    master.set_host_parameters([model.b, model.a])
    assert not model.a.any()
    assert torch.equal(model.b, before)
    master.set_host_parameters([model.a, model.b.t()])
    assert torch.equal(model.b, before.t())


@pytest.mark.parametrize(
    ("new", "match"),
    [
        (lambda model: model.state_dict(), "got a OrderedDict"),
        (lambda model: model, "got a Square"),
        (lambda model: None, "got a NoneType"),
        (lambda model: model.named_parameters(), "got a tuple for 'a'"),
        (lambda model: [p.detach().numpy() for p in model.parameters()], "got a ndarray for 'a'"),
    ],
)
def test_what_is_no_list_of_parameters(new, match: str):
    model = Square()
    with pytest.raises(ValueError, match=match):
        MasterModel(model).set_host_parameters(new(model))


def test_a_model_that_changes_its_structure_is_told_so():
    model = regressor(width=32)
    with manager_of(model) as manager:
        manager.step()
        model.more = nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match="had 13 parameters when it became the master and has"):
            manager.step()


def test_weights_are_tied_before_they_are_counted():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)

        def tie_weights(self):
            self.head.weight = self.embed.weight

        def forward(self, x, y):
            return (self.head(self.embed(x.abs().long())).square().mean(),)

    model = Late()
    with manager_of(model) as manager:
        manager.step()
        manager.update_model_parameters(model.parameters())
        manager.step()
        (gradient,) = manager.get_aggregated_gradients()
    assert gradient.shape == (64, 8)
    assert model.head.weight is model.embed.weight


def test_many_parameters_take_one_open_file_each():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.ParameterList([torch.ones(2) for _ in range(200)])

    before = len(os.listdir("/proc/self/fd"))
    master = MasterModel(Many())
    assert len(os.listdir("/proc/self/fd")) - before <= 202
    assert len(master.get_aggregated_gradients()) == 200


def test_start_twice_is_refused_and_harmless():
    with manager_of(regressor(width=32)) as manager:
        manager.step()
        with pytest.raises(RuntimeError, match="has been started already"):
            manager.start()
        manager.step()


def test_numbers_of_numpy_and_no_time_limits():
    numbers = {
        "nprocs": np.int64(2),
        "batch_size_per_device": np.int32(2),
        "seed_base": np.int64(3),
        "init_timeout": None,
    }
    with manager_of(regressor(width=32), **numbers) as manager:
        assert manager.step()[1] == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda new: new[:-1], r"like those of model.parameters\(\), 13 of them; got 12"),
        (lambda new: [*new, new[0]], "13 of them; got 14"),
        (lambda new: [new[0], new[1][:-1], *new[2:]], "layers.0.weight' has shape"),
        (lambda new: [new[0].double(), *new[1:]], "'unused' has dtype torch.float32"),
        (lambda new: [new[0].to("meta"), *new[1:]], "has device cpu in the master, got meta"),
    ],
)
def test_parameters_that_do_not_fit_change_nothing(change, match: str):
    model = regressor(width=32)
    before = [p.detach().clone() for p in model.parameters()]
    new = [torch.zeros_like(p) for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        MasterModel(model).set_host_parameters(change(new))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prefetch": 0}, "`prefetch` must be >= 1, got 0"),
        ({"batch_size_per_device": 0}, "`batch_size_per_device` must be >= 1, got 0"),
        ({"grad_accumulation_steps": 1.5}, "`grad_accumulation_steps` must be an int, got 1.5"),
        ({"nprocs": -1}, "`nprocs` must be >= 1, got -1"),
        ({"nprocs": True}, "`nprocs` must be an int"),
        ({"step_timeout": 0}, "`step_timeout` must be a number of seconds > 0, or None, got 0"),
        ({"step_timeout": "5"}, "`step_timeout` must be a number of seconds > 0, or None, got '5'"),
        ({"init_timeout": -1}, "`init_timeout` must be a number of seconds > 0"),
        ({"init_timeout": float("inf")}, "`init_timeout` must be a number of seconds > 0"),
        ({"seed_base": "x"}, "`seed_base` must be an int, got 'x'"),
        ({"collate_fn": 3}, "`collate_fn` must be callable, got 3"),
        ({"dataset": 3}, "`dataset` must be iterable, got int"),
        ({"model": nn.ReLU()}, "`model` has no parameters"),
        ({"model": nn.Linear(2, 2, device="meta")}, "`model` must be on the CPU; 'weight' is on"),
        ({"model": "bert"}, "`model` must be a torch.nn.Module, got str"),
    ],
)
def test_bad_arguments(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        TPUManager(**{"model": regressor(width=32), "dataset": DATA, "start": True, **arguments})


def test_start_is_required():
    with pytest.raises(TypeError, match="start"):
        TPUManager(regressor(width=32), DATA)


def test_other_threads_may_read_gradients_while_a_step_runs():
    model = regressor()
    stop, seen = threading.Event(), []

    def read(manager: TPUManager):
        while not stop.is_set():
            seen.append(manager.get_aggregated_gradients()[2].abs().sum().item())

    with manager_of(model, nprocs=2) as manager:
        reader = threading.Thread(target=read, args=(manager,))
        reader.start()
        for _ in range(20):
            manager.step()
        stop.set()
        reader.join(PATIENCE_SECONDS)
    assert seen
    assert not reader.is_alive()


def test_two_managers_at_once():
    with manager_of(regressor(width=32)) as first, manager_of(regressor(width=32)) as second:
        assert first.step() == second.step()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(TPUWorkerError, match="SIGKILL"):
            first.step()
        second.step()
    assert second.exitcode == 0
