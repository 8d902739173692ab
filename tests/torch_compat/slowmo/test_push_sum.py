"""Push-sum weights that move: training against the same written out in NumPy."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step
from slowmo_recorded import Prescribed
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

# Weights that move under slow momentum: estimates, not numerators, are averaged (which FairScale's
# recordings of it do not do).
STEPS, RATE, MOMENTUM = 9, 0.2, 0.6
TABLE = [[1, 3], [0, 2], [0, 3], [1, 0]]
KEEP = [0.3, 0.5, 0.65, 0.4]
SHAPES = [(3, 5), (), (4,)]


def prescribed(t: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng([t, rank])
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


def push_sum_on_device(nprocs_per_node: int, options: dict) -> dict[str, np.ndarray]:
    device, rank = here.device(), here.rank()
    nodes = here.world() // nprocs_per_node
    net = SlowMo(
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
        take_step(net, optimizer, net(grads)["loss"])
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


KINDS = [
    {"slowmo_memory_efficient": True},
    {"slowmo_memory_efficient": False},
    {"slowmo_memory_efficient": False, "slowmo_sgp_average_params": True},
]


def push_sum_of_all_kinds(nprocs_per_node: int) -> list[np.ndarray]:
    return [push_sum_on_device(nprocs_per_node, options) for options in KINDS]


@pytest.mark.parametrize("nprocs_per_node", [1, 2])
def test_push_sum_weights_under_slow_momentum(nprocs_per_node):
    results = spawned(4, push_sum_of_all_kinds, nprocs_per_node)
    for kind, options in enumerate(KINDS):
        expected = push_sum_in_numpy(4 // nprocs_per_node, nprocs_per_node, **options)
        assert np.ptp(expected[..., -1]) > 0.3
        for rank, ours in enumerate(results):
            theirs = expected[:, rank // nprocs_per_node]
            np.testing.assert_allclose(ours[kind], theirs, rtol=2e-5, atol=2e-5)
