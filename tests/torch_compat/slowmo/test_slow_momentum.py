"""Slow momentum: against the same written out in NumPy, in float64; its start, its parts."""

import json

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import HIDDEN, WIDTH, Perceptron, batch, perceptron, train_step, values
from slowmo_spawned import spawned

from golden import slow_momentum as recorded
from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo.slow_momentum import Groups, Span


def test_parts_of_all_processes_are_the_whole():
    whole = torch.arange(10.0)
    spans = [Span((4, 10), 4, index) for index in range(4)]
    assert (spans[0].length, spans[0].padded) == (3, 12)
    parts = torch.cat([span.part_of(whole) for span in spans])
    assert torch.equal(parts, torch.nn.functional.pad(whole, (0, 2)))


def test_groups_without_parameters_do_not_count():
    first, second = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,)))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    optimizer.param_groups.insert(0, {"params": [], "lr": 9.0})
    groups = Groups(optimizer)
    assert [id(param) for param in groups.params] == [id(first), id(second)]
    assert groups.ends == (6, 10)
    assert groups.rates(torch.device("cpu")) == [0.1, 0.5]


STEPS, AVERAGE_EVERY, SLOW_EVERY, RATE, MOMENTUM, SLOW_RATE = 9, 2, 4, 0.2, 0.6, 0.9


def rate(t: int) -> float:
    return RATE / (1 + t)


def slowmo_on_device() -> dict[str, np.ndarray]:
    net = SlowMoDistributedDataParallel(
        Perceptron().to(here.device()),
        nprocs_per_node=1,
        slowmo_momentum=MOMENTUM,
        slowmo_frequency=SLOW_EVERY,
        slowmo_lr=SLOW_RATE,
        localsgd_frequency=AVERAGE_EVERY,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(t)
        train_step(net, optimizer, t)
    here.launch()
    momentum = net.global_momentum_buffer
    here.launch()
    return values(net.module) | {"momentum": momentum.cpu().numpy()}


def gradients(p: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    error = 2 * (hidden @ p["w2"] + p["b2"] - y) / y.size
    inner = (error @ p["w2"].T) * (1 - hidden**2)
    return {"w1": x.T @ inner, "b1": inner.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def slowmo_in_numpy(world: int) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    params = [perceptron(WIDTH, HIDDEN) for _ in range(world)]
    anchor = perceptron(WIDTH, HIDDEN)
    inner = [{k: np.zeros_like(v) for k, v in anchor.items()} for _ in range(world)]
    outer = {k: np.zeros_like(v) for k, v in anchor.items()}
    for t in range(STEPS):
        for rank in range(world):
            for k, g in gradients(params[rank], *batch(t, rank)).items():
                inner[rank][k] = 0.5 * inner[rank][k] + g
                params[rank][k] = params[rank][k] - rate(t) * inner[rank][k]
        if (t + 1) % SLOW_EVERY == 0:
            for k in anchor:
                mean = sum(p[k] for p in params) / world
                outer[k] = MOMENTUM * outer[k] + (anchor[k] - mean) / rate(t)
                anchor[k] = anchor[k] - SLOW_RATE * rate(t) * outer[k]
            params = [dict(anchor) for _ in range(world)]
        elif (t + 1) % AVERAGE_EVERY == 0:
            mean = {k: sum(p[k] for p in params) / world for k in anchor}
            params = [dict(mean) for _ in range(world)]
    return params, outer


@pytest.mark.parametrize("world", [2, 4])
def test_a_million_parameters_follow_the_oracle(by, world):
    assert sum(v.size for v in perceptron(WIDTH, HIDDEN).values()) > 1_000_000
    results = spawned(world, slowmo_on_device, by=by)
    all_expected, outer = slowmo_in_numpy(world)
    for ours, expected in zip(results, all_expected, strict=True):
        for key, value in expected.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    # FairScale's global_momentum_buffer is m, in parts.
    momentum = np.concatenate([ours["momentum"] for ours in results])
    flat = np.concatenate([outer[key].ravel() for key in ("w1", "b1", "w2", "b2")])
    np.testing.assert_allclose(momentum[: flat.size], flat, rtol=1e-3, atol=1e-5)
    assert not momentum[flat.size :].any()
    moved = np.abs(results[0]["w1"] - perceptron(WIDTH, HIDDEN)["w1"]).max()
    assert moved > 5e-4


def one_parameter(options: dict):
    """What is kept for slow momentum must survive in-place optimizers."""
    device, rank = here.device(), here.rank()
    module = torch.nn.Linear(5, 1, bias=False).to(device)
    torch.nn.init.constant_(module.weight, 1.0)
    net = SlowMoDistributedDataParallel(
        module, nprocs_per_node=1, slowmo_frequency=2, localsgd_frequency=1, **options
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for t in range(6):
        net(torch.full((2, 5), 0.1 * (rank + t)).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
        here.launch()
        if t % 2:
            anchor = net.old_params.cpu().numpy().copy()
            assert np.isfinite(anchor).all()
    return module.weight.detach().cpu().numpy().ravel(), anchor


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_of_one_parameter(world, whole):
    results = spawned(world, one_parameter, {"slowmo_memory_efficient": not whole})
    weight = results[0][0]
    for rank, (_, anchor) in enumerate(results):
        part = weight if whole or world == 1 else weight[3 * rank : 3 * rank + 3]
        np.testing.assert_allclose(anchor[: part.size], part, rtol=1e-6)


def rates_of_zero():
    """Warm-up from 0 and decay to 0, at slow steps (FairScale divides by them)."""
    device = here.device()
    module = Perceptron(2, 2).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, slowmo_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen = []
    for rate in (0.0, 0.1, torch.tensor(0.0), 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        net(torch.ones(1, 2).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
        here.launch()
        seen.append(torch.cat([p.detach().cpu().reshape(-1) for p in net.parameters()]))
    assert torch.isfinite(net.global_momentum_buffer.cpu()).all()
    return torch.stack(seen).numpy()


def test_a_rate_of_zero_at_a_slow_step(by):
    for seen in spawned(2, rates_of_zero, by=by):
        assert np.isfinite(seen).all()
        np.testing.assert_array_equal(seen[2], seen[1])
        np.testing.assert_array_equal(seen[3], seen[2])
        assert np.abs(seen[1] - seen[0]).max() > 0.05
        assert np.abs(seen[4] - seen[3]).max() > 0.05


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
    net = SlowMoDistributedDataParallel(
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


def all_anchors(cases: list[dict], options: dict) -> list[np.ndarray]:
    return [anchors(case, options) for case in cases]


def check_recorded_cases(options: dict, expected: str, by: str) -> None:
    cases = json.loads(recorded.FILE.read_text())["cases"]
    for seen in spawned(2, all_anchors, cases, options, by=by):
        for case, ours in zip(cases, seen, strict=True):
            theirs = case[expected]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=case["name"])


@pytest.mark.parametrize("is_sharded", [True, False])
def test_recorded_cases_of_rates_that_change(by, is_sharded):
    """`js.slowmo` passes the same."""
    check_recorded_cases({"slowmo_memory_efficient": is_sharded}, "anchors", by)


def test_recorded_cases_without_bound():
    check_recorded_cases({"bound_momentum": False}, "anchors_without_bound", "gloo")
