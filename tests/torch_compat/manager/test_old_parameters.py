"""A warning where parameters change on the host and never reach the devices, and no other."""

import itertools
import warnings

import pytest
import torch
from models import regressor, samples

from torch_compat import TPUManager
from torch_compat.manager._manager import _OLD_STEPS

STEPS = 3 * _OLD_STEPS


def warned(programs, optimizer_of=lambda params: torch.optim.SGD(params, lr=0.01)) -> list[str]:
    """Return the warnings that each `program(manager, optimizer, t)` gets in its steps t."""
    model, data = regressor(width=8), itertools.cycle(samples(4))
    optimizer = optimizer_of([p for p in model.parameters() if p is not model.unused])
    with TPUManager(model, data, nprocs=1, start=False) as manager:
        model.load_state_dict(regressor(1, width=8).state_dict())
        manager.start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for program in programs:
                for t in range(STEPS):
                    manager.step()
                    program(manager, optimizer, t)
                manager.zero_grad()
                updated(manager)
        return [str(warning.message) for warning in caught]


def stepped(optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def updated(manager) -> None:
    manager.update_model_parameters(manager._synchronizer.master_model.parameters())


def never(manager, optimizer, t):
    stepped(optimizer)


def once_and_no_more(manager, optimizer, t):
    stepped(optimizer)
    if t == 0:
        updated(manager)


def accumulated_and_never(manager, optimizer, t):
    if t % 2:
        stepped(optimizer)


class WithoutVersion(torch.optim.Optimizer):
    """Writes through `.data`, and replaces it: torch counts neither as a change."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.9)
            param.data = param.data - 0.1 * param.grad


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "data": WithoutVersion,
}


@pytest.mark.parametrize(
    ("program", "optimizer"),
    [(never, "sgd"), (once_and_no_more, "fused"), (accumulated_and_never, "data")],
)
def test_a_program_that_forgets_the_update_is_warned_once(program, optimizer):
    (text,) = warned([program], OPTIMIZERS[optimizer])
    assert f"have changed before {_OLD_STEPS} steps without update_model_parameters()" in text
    assert "manager.update_model_parameters(model.parameters())" in text


def every_step(manager, optimizer, t):
    stepped(optimizer)
    updated(manager)


def updated_before_the_optimizer(manager, optimizer, t):
    updated(manager)
    stepped(optimizer)


def accumulated(manager, optimizer, t):
    if t % (STEPS - 1) == STEPS - 2:
        every_step(manager, optimizer, t)


def summed_elsewhere(manager, optimizer, t):
    """Add up gradients for as many steps as an epoch of hivemind has."""
    manager.get_aggregated_gradients()
    manager.zero_grad()
    accumulated(manager, optimizer, t)


def at_rate_0(manager, optimizer, t):
    optimizer.param_groups[0]["lr"] = 0.0
    stepped(optimizer)


def evaluated_with_other_weights(manager, optimizer, t):
    params = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.zero_()
        for p, value in zip(params, before, strict=True):
            p.copy_(value)


def test_correct_programs_are_not_warned():
    """One after the other, with an update in between; weights loaded at first are no change."""
    programs = [
        every_step,
        updated_before_the_optimizer,
        accumulated,
        summed_elsewhere,
        evaluated_with_other_weights,
        at_rate_0,
    ]
    assert warned(programs) == []
