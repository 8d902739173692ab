"""Slow momentum: rates that change, of several groups, and that reach 0."""

import itertools
import json

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import take_step
from slowmo_spawned import spawned

from golden import slow_momentum as recorded
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

CASES = json.loads(recorded.FILE.read_text())["cases"]


class OnePerGroup(torch.nn.Module):
    """A number, 0 at first, for every optimizer group."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.numbers = torch.nn.ParameterList([torch.zeros(1) for _ in range(groups)])

    def forward(self, curvature: float, optimum: float) -> torch.Tensor:
        return sum(curvature / 2 * (number - optimum) ** 2 for number in self.numbers).sum()


def anchors(case: dict, memory_efficient: bool) -> np.ndarray:
    """What the slow steps of a recorded case leave, [slow step, group]."""
    module = OnePerGroup(len(case["rates"][0])).to(here.device())
    net = SlowMo(
        module,
        nprocs_per_node=1,
        slowmo_momentum=case["momentum"],
        slowmo_lr=case["slow_lr"],
        slowmo_frequency=case["slow_every"],
        localsgd_frequency=2,
        slowmo_memory_efficient=memory_efficient,
    )
    optimizer = torch.optim.SGD([{"params": [number]} for number in module.numbers], lr=0.1)
    groups = [*optimizer.param_groups]
    optimizer.param_groups.insert(0, {**groups[0], "params": [], "lr": 9.0})  # of no effect
    seen = []
    for t, rates in enumerate(case["rates"]):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.tensor(rate) if t % 2 else rate
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


def rates_of_zero() -> list[float]:
    """Warm-up from 0 and decay to 0, at slow steps (FairScale divides by them)."""
    module = OnePerGroup(1).to(here.device())
    net = SlowMo(module, nprocs_per_node=1, slowmo_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen = []
    for rate in (0.0, 0.1, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        take_step(net, optimizer, net(1.0, 1.0))
        seen.append(module.numbers[0].item())
    return seen


def all_anchors(is_whole: list[bool]):
    return [[anchors(case, not whole) for case in CASES] for whole in is_whole], rates_of_zero()


def test_recorded_cases_of_rates_that_change(by):
    for ways, zeros in spawned(2, all_anchors, [False, True][: 1 + (by == "gloo")], by=by):
        for case, ours in zip(CASES * len(ways), itertools.chain(*ways), strict=True):
            where = case["name"]
            np.testing.assert_allclose(ours, case["anchors"], rtol=1e-4, atol=1e-5, err_msg=where)
        assert zeros[0] == 0
        assert zeros[2] == zeros[1] > 0.05
        assert zeros[3] > zeros[2] + 0.05
