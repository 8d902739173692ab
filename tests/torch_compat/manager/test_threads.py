"""Threads of the host while a step runs: they see what was before it or after it, and wait little.

The device process waits in the model's forward pass until a test opens a gate.
"""

import itertools
import multiprocessing as mp
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from models import PlainTorch, Regressor, largest_difference, regressor, samples
from torch import nn

from support.waiting import PATIENCE_SECONDS
from torch_compat import TPUManager

DATA = samples(16)
FORK = mp.get_context("fork")
ENTERED, GATE = FORK.Event(), FORK.Event()


@pytest.fixture(autouse=True)
def _closed():
    ENTERED.clear()
    GATE.clear()


class Gated(Regressor):
    def forward(self, x, y):
        ENTERED.set()
        GATE.wait(PATIENCE_SECONDS)  # a host that waits for the step gets on too late, but gets on
        return super().forward(x, y)


def gated() -> Gated:
    """A model with gradients of ones."""
    torch.manual_seed(0)
    model = Gated(width=32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"nprocs": 1, "start": True, **kwargs})


@contextmanager
def running(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """A thread that ends inside."""
    thread = threading.Thread(target=function)
    thread.start()
    yield thread
    thread.join(2 * PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_everything_but_a_step_goes_on_while_the_devices_compute():
    model = gated()
    plain = PlainTorch(regressor(width=32))
    with manager_of(model) as manager:
        manager.update_model_parameters(model.parameters())  # loaded at the start of the step
        with running(manager.step) as stepper:
            assert ENTERED.wait(PATIENCE_SECONDS)
            assert all((g == 1).all() for g in manager.get_aggregated_gradients())
            manager.zero_grad()
            assert not any(g.any() for g in manager.get_aggregated_gradients())
            manager.update_model_parameters([torch.zeros_like(p) for p in model.parameters()])
            assert stepper.is_alive()
            GATE.set()
        # The step had the parameters from before it, and its gradient came after the zeros.
        plain.step(DATA[:1])
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
        loss, _ = manager.step()
        assert loss == pytest.approx(DATA[1]["y"].square().mean().item(), abs=1e-6)


class Sums(nn.Module):
    """Every gradient is 1; the loss says how far its parameters are apart."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([torch.zeros(100_000) for _ in range(20)])

    def forward(self, x, y):
        everything = torch.cat(list(self.all))
        apart = (everything.max() - everything.min()).detach()
        return (everything.sum() - everything.sum().detach() + apart,)


def test_no_thread_sees_half_added_gradients_nor_the_devices_half_written_parameters():
    seen, stop = [], threading.Event()
    model = Sums()
    with manager_of(model) as manager:

        def read() -> None:
            while not stop.is_set():
                gradients = manager.get_aggregated_gradients()
                seen.append({value.item() for g in gradients for value in (g.min(), g.max())})

        def write() -> None:
            for number in itertools.cycle(range(1, 1000)):
                if stop.is_set():
                    return
                manager.update_model_parameters(
                    [torch.full_like(p, float(number)) for p in model.parameters()]
                )

        manager.step()
        with running(read), running(write):
            try:
                apart = [manager.step()[0] for _ in range(20)]
            finally:
                stop.set()
        assert (model.all[-1].grad == 21).all()
    assert apart == [0.0] * 20
    assert all(len(values) == 1 for values in seen)
    assert len(seen) > 1


def test_steps_of_two_threads_come_one_after_the_other():
    model = regressor(width=32)
    plain, results = PlainTorch(model), []
    with manager_of(model) as manager:
        with running(lambda: results.append(manager.step()[0])):
            results.append(manager.step()[0])
        wanted = [plain.step([sample]) for sample in DATA[:2]]
        assert sorted(results) == pytest.approx(sorted(wanted), abs=1e-6)
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
