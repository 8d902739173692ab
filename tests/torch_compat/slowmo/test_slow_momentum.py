"""Slow momentum: rates that change, modules of one parameter."""

import json

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import Perceptron, take_step
from slowmo_spawned import spawned

from golden import slow_momentum as recorded
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


def one_parameter(memory_efficient: bool) -> np.ndarray:
    """What is kept for slow momentum must survive in-place optimizers."""
    module = torch.nn.Linear(5, 1, bias=False).to(here.device())
    torch.nn.init.constant_(module.weight, 1.0)
    options = {"slowmo_memory_efficient": memory_efficient}
    net = SlowMo(module, 1, slowmo_frequency=2, localsgd_frequency=1, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    empty = {**optimizer.param_groups[0], "params": [], "lr": 9.0}  # of no effect
    optimizer.param_groups.insert(0, empty)
    for t in range(6):
        x = torch.full((2, 5), 0.1 * (here.rank() + t)).to(here.device())
        take_step(net, optimizer, net(x).sum())
    return module.weight.detach().cpu().numpy().ravel()


def sharded_and_whole():
    return one_parameter(True), one_parameter(False)


def test_a_module_of_one_parameter():
    """All elements are alike: their gradient does not depend on the weight."""
    for world in (1, 4):
        weight, velocity, anchor, slow = 1.0, 0.0, 1.0, 0.0
        for t in range(6):
            velocity = 0.9 * velocity + 2 * 0.1 * (t + (world - 1) / 2)
            weight -= 0.1 * velocity
            if t % 2:
                slow = 0.5 * slow + (anchor - weight) / 0.1
                weight = anchor = anchor - 0.1 * slow
        for found in spawned(world, sharded_and_whole):
            np.testing.assert_allclose(found, np.full((2, 5), weight), rtol=1e-5)


def rates_of_zero():
    """Warm-up from 0 and decay to 0, at slow steps (FairScale divides by them)."""
    device = here.device()
    module = Perceptron(2, 2).to(device)
    net = SlowMo(module, nprocs_per_node=1, slowmo_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen = []
    for rate in (0.0, 0.1, torch.tensor(0.0), 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        take_step(net, optimizer, net(torch.ones(1, 2).to(device)).sum())
        seen.append(torch.cat([p.detach().cpu().reshape(-1) for p in net.parameters()]))
    assert torch.isfinite(net.global_momentum_buffer.cpu()).all()
    return torch.stack(seen).numpy()


class OnePerGroup(torch.nn.Module):
    """A number, 0 at first, for every optimizer group."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.numbers = torch.nn.ParameterList([torch.zeros(1) for _ in range(groups)])

    def forward(self, curvature: float, optimum: float) -> torch.Tensor:
        return sum(curvature / 2 * (number - optimum) ** 2 for number in self.numbers).sum()


def anchors(case: dict, options: dict) -> np.ndarray:
    """What the slow steps of a recorded case leave, [slow step, group]."""
    groups = len(case["rates"][0])
    module = OnePerGroup(groups).to(here.device())
    net = SlowMo(
        module,
        nprocs_per_node=1,
        slowmo_momentum=case["momentum"],
        slowmo_lr=case["slow_lr"],
        slowmo_frequency=case["slow_every"],
        localsgd_frequency=2,
        **options,
    )
    optimizer = torch.optim.SGD([{"params": [number]} for number in module.numbers], lr=0.1)
    seen = []
    for t, rates in enumerate(case["rates"]):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        net(case["curvature"], case["optimum"]).backward()
        if case["curvature"]:
            optimizer.step()
        else:
            with torch.no_grad():
                module.numbers[0] += case["displacements"][t][0]
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
        here.launch()
        if (t + 1) % case["slow_every"] == 0:
            seen.append([number.item() for number in module.numbers])
    return np.array(seen)


# Options, and the recorded numbers that belong to them. `js.slowmo` passes the same.
WAYS = [
    ({"slowmo_memory_efficient": True}, "anchors"),
    ({"slowmo_memory_efficient": False}, "anchors"),
]


def all_anchors(cases: list[dict], ways: list[dict]):
    return [[anchors(case, options) for case in cases] for options in ways], rates_of_zero()


def test_recorded_cases_of_rates_that_change(by):
    cases = json.loads(recorded.FILE.read_text())["cases"]
    ways = WAYS if by == "gloo" else WAYS[:1]
    for found, zeros in spawned(2, all_anchors, cases, [options for options, _ in ways], by=by):
        for (_, expected), seen in zip(ways, found, strict=True):
            for case, ours in zip(cases, seen, strict=True):
                name = f"{expected} of {case['name']}"
                np.testing.assert_allclose(ours, case[expected], rtol=1e-4, atol=1e-5, err_msg=name)
        assert np.isfinite(zeros).all()
        np.testing.assert_array_equal(zeros[2], zeros[1])
        np.testing.assert_array_equal(zeros[3], zeros[2])
        assert np.abs(zeros[1] - zeros[0]).max() > 0.05
        assert np.abs(zeros[4] - zeros[3]).max() > 0.05
