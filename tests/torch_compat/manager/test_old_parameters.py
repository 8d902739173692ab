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


def program(steps, updates=lambda t: False):
    """One that takes optimizer steps after the manager's steps `steps(t)`, and updates then."""

    def run(manager, optimizer, t):
        if steps(t):
            stepped(optimizer)
        if updates(t):
            updated(manager)

    return run


def always(t: int) -> bool:
    return True


class WithoutVersion(torch.optim.Optimizer):
    """Writes through `.data`, and replaces it: torch counts neither as a change."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.9)
            param.data = param.data - 0.1 * param.grad


# Optimizers, and programs that forget the update.
FORGETFUL = {
    "never": (lambda params: torch.optim.SGD(params, lr=0.01), program(always)),
    "once": (
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        program(always, lambda t: t == 0),
    ),
    "after accumulation": (WithoutVersion, program(lambda t: t % 2)),
}


@pytest.mark.parametrize("case", FORGETFUL)
def test_a_program_that_forgets_the_update_is_warned_once(case):
    optimizer, forgetful = FORGETFUL[case]
    (text,) = warned([forgetful], optimizer)
    assert f"have changed before {_OLD_STEPS} steps without update_model_parameters()" in text
    assert "manager.update_model_parameters(model.parameters())" in text


def updated_before_the_optimizer(manager, optimizer, t):
    updated(manager)
    stepped(optimizer)


every_step = program(always, always)
accumulated = program(*[lambda t: t % (STEPS - 1) == STEPS - 2] * 2)


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
