"""Training against the same training written out in NumPy, in float64."""

import numpy as np
import pytest
import torch
import torch_xla
from slowmo_models import HIDDEN, WIDTH, Perceptron, batch, perceptron, train_step, values
from slowmo_recorded import Prescribed
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel

STEPS, AVERAGE_EVERY, SLOW_EVERY, RATE, MOMENTUM, SLOW_RATE = 9, 2, 4, 0.2, 0.6, 0.9


def rate(t: int) -> float:
    return RATE / (1 + t)


def slowmo_on_device() -> dict[str, np.ndarray]:
    net = SlowMoDistributedDataParallel(
        Perceptron().to(torch_xla.device()),
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
    runtime.run_pending()
    momentum = net.global_momentum_buffer
    runtime.run_pending()
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
def test_a_million_parameters_follow_the_oracle(world):
    assert sum(v.size for v in perceptron(WIDTH, HIDDEN).values()) > 1_000_000
    results = spawned(world, slowmo_on_device)
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


# Push-sum whose weights move, under slow momentum: estimates, not numerators, are averaged (which
# FairScale's recordings of it do not do).
TABLE = [[1, 3], [0, 2], [0, 3], [1, 0]]
KEEP = [0.3, 0.5, 0.65, 0.4]
SHAPES = [(3, 5), (), (4,)]


def prescribed(t: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng([t, rank])
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


def push_sum_on_device(nprocs_per_node: int, options: dict) -> dict[str, np.ndarray]:
    device, rank = torch_xla.device(), torch_xla.runtime.global_ordinal()
    nodes = torch_xla.runtime.world_size() // nprocs_per_node
    net = SlowMoDistributedDataParallel(
        Prescribed(prescribed(0, 99), None, torch.float32).to(device),
        nprocs_per_node,
        slowmo_base_algorithm="sgp",
        graph=topology.from_phone_book(TABLE) if nodes == 4 else None,
        mixing=topology.self_weighted(KEEP[:nodes]),
        slowmo_frequency=3,
        slowmo_momentum=MOMENTUM,
        **options,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    history = []
    for t in range(STEPS):
        grads = [torch.tensor(g, dtype=torch.float32).to(device) for g in prescribed(t, rank)]
        net(grads)["loss"].backward()
        optimizer.step()
        net.zero_grad(set_to_none=True)
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        flat = np.concatenate([p.detach().cpu().numpy().ravel() for p in net.parameters()])
        history.append(np.append(flat, net.ps_weight.item()))
    return np.stack(history)


def push_sum_in_numpy(
    nodes: int, members: int, *, slowmo_memory_efficient: bool, slowmo_sgp_average_params=False
) -> np.ndarray:
    def flat(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([a.ravel() for a in arrays])

    graph = topology.from_phone_book(TABLE) if nodes == 4 else topology.directed_exponential(nodes)
    mixing = topology.self_weighted(KEEP[:nodes])
    z = np.stack([flat(prescribed(0, 99))] * nodes)
    w, exchanges = np.ones(nodes), 0
    anchor, outer = z.copy(), np.zeros_like(z)
    history = []
    for t in range(STEPS):
        grads = [flat(prescribed(t, rank)) for rank in range(nodes * members)]
        x = w[:, None] * z - RATE * np.stack(grads).reshape(nodes, members, -1).mean(1)
        slow = (t + 1) % 3 == 0
        if slow and (slowmo_memory_efficient or slowmo_sgp_average_params):
            z, w = np.stack([x.sum(0) / w.sum()] * nodes), np.ones(nodes)
        else:
            matrix = topology.mixing_matrix(graph, mixing, exchanges)
            x, w, exchanges = matrix @ x, matrix @ w, exchanges + 1
            z = x / w[:, None]
        if slow:
            outer = MOMENTUM * outer + (anchor - z) / RATE
            anchor = anchor - RATE * outer
            z = anchor.copy()
        history.append(np.concatenate([z, w[:, None]], axis=1))
    return np.stack(history)


@pytest.mark.parametrize(
    "options",
    [
        {"slowmo_memory_efficient": True},
        {"slowmo_memory_efficient": False},
        {"slowmo_memory_efficient": False, "slowmo_sgp_average_params": True},
    ],
)
@pytest.mark.parametrize("nprocs_per_node", [1, 2])
def test_push_sum_weights_under_slow_momentum(options, nprocs_per_node):
    results = spawned(4, push_sum_on_device, nprocs_per_node, options)
    nodes = 4 // nprocs_per_node
    expected = push_sum_in_numpy(nodes, nprocs_per_node, **options)
    assert np.ptp(expected[..., -1]) > 0.3
    for rank, ours in enumerate(results):
        theirs = expected[:, rank // nprocs_per_node]
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
