"""Uneven data: processes that leave their loop, against NumPy, which does what join() says."""

import functools

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import take_step, values
from slowmo_spawned import spawned
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WIDTH, RATE, MOMENTUM, SLOW_MOMENTUM = 3, 0.05, 0.9, 0.5


def batch(epoch: int, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([epoch, step, rank])
    return rng.normal(size=(4, WIDTH)), rng.normal(size=(4, 1))


def rate_of(step: int) -> float:
    return RATE / (1 + 0.1 * step)


def built(**options):
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    net = SlowMo(model, **{"nprocs_per_node": 1, "slowmo_momentum": SLOW_MOMENTUM, **options})
    return net, torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def step_on_batch(net, optimizer, epoch: int, step: int) -> None:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in batch(epoch, step, here.rank()))
    for group in optimizer.param_groups:
        group["lr"] = rate_of(step)
    take_step(net, optimizer, (net(x) - y).square().mean())


def trained(lengths: list[list[int]], by_all: bool, options: dict):
    """Weights after every epoch, and what else must be the same in all processes."""
    net, optimizer = built(**options)
    found = []
    for epoch, steps in enumerate(lengths):
        with net.join(divide_by_initial_world_size=by_all):
            for step in range(steps[here.rank()]):
                step_on_batch(net, optimizer, epoch, step)
        found.append((net.module.weight.detach().numpy()[0].copy(), net.num_updates))
    whole = net.consolidated_state_dict()["weight"].numpy()[0]
    return found, whole, net.state_dict()["slowmo.num_updates"].item()


def oracle(
    world: int,
    lengths: list[list[int]],
    by_all: bool = True,
    *,
    nprocs_per_node: int = 1,
    localsgd_frequency: int = 2,
    slowmo_frequency: int = 4,
    slowmo_memory_efficient: bool = True,
    mixing=None,
):
    """The weights of all nodes after every epoch."""
    size, nodes = nprocs_per_node, world // nprocs_per_node
    weights, velocity = np.full((nodes, WIDTH), 0.5), np.zeros((nodes, WIDTH))
    anchor, slow, updates = weights.copy(), np.zeros((nodes, WIDTH)), 0
    last_rate = None
    history = []
    for epoch, steps in enumerate(lengths):
        for step in range(max(steps)):
            has_data = np.array([step < n for n in steps]).reshape(nodes, size)
            for node in range(nodes):
                if not has_data[node].any():
                    continue
                gradient = np.zeros(WIDTH)
                for member in np.flatnonzero(has_data[node]):
                    x, y = batch(epoch, step, node * size + member)
                    gradient += 2 * (x * (x @ weights[node][:, None] - y)).mean(0)
                gradient /= size if by_all else has_data[node].sum()
                velocity[node] = MOMENTUM * velocity[node] + gradient
                weights[node] = weights[node] - rate_of(step) * velocity[node]
            updates += 1
            counted = np.ones(nodes, bool) if by_all else has_data.any(1)
            due = updates % slowmo_frequency == 0
            if mixing is not None and not (due and slowmo_memory_efficient):
                weights = mixing(updates - 1 - updates // slowmo_frequency) @ weights
            elif (due and slowmo_memory_efficient) or updates % localsgd_frequency == 0:
                weights = np.repeat(weights[counted].mean(0, keepdims=True), nodes, 0)
            if due:
                rate = rate_of(step)  # of a process that has data
                carry = SLOW_MOMENTUM * (rate / last_rate if last_rate else 1)
                slow = carry * slow + (anchor - weights)
                anchor = anchor - slow
                weights, last_rate = anchor.copy(), rate
        history.append(weights.copy())
    return history


SCHEDULE = {"localsgd_frequency": 2, "slowmo_frequency": 4}
WHOLE = {**SCHEDULE, "slowmo_memory_efficient": False}
NODES = {**SCHEDULE, "nprocs_per_node": 2}
SGP = {"slowmo_base_algorithm": "sgp", "graph": "ring", "slowmo_frequency": 4}
# Per epoch the steps of each process; whether all count in averages; options.
CASES = [
    ([[3, 9, 5, 2], [6, 2, 1, 4]], True, SCHEDULE),
    ([[9, 5, 2, 7]], False, WHOLE),
    ([[3, 9, 5, 4], [4, 1, 9, 8]], False, NODES),
    ([[9, 6, 2, 3]], True, {**NODES, "slowmo_memory_efficient": False}),
    ([[9, 5, 2, 7]], True, SGP),
    ([[3, 9, 5, 5], [4, 1, 9, 8]], True, {**SGP, "nprocs_per_node": 2}),
]
WORLD = 4


def all_trained():
    return [trained(*case) for case in CASES]


def expected_of(lengths, by_all: bool, options: dict):
    if "graph" in options:
        size = options.get("nprocs_per_node", 1)
        mixing = functools.partial(topology.mixing_matrix, topology.ring(WORLD // size), None)
        options = {"nprocs_per_node": size, "localsgd_frequency": 10**6, "mixing": mixing}
    return oracle(WORLD, lengths, by_all, **options)


def test_training_on_uneven_data():
    results = spawned(WORLD, all_trained)
    for case, (lengths, by_all, options) in enumerate(CASES):
        expected = expected_of(lengths, by_all, options)
        size, updates = options.get("nprocs_per_node", 1), np.cumsum([max(n) for n in lengths])
        for rank in range(WORLD):
            found, whole, num_updates = results[rank][case]
            assert num_updates == updates[-1]
            for (weights, number), theirs, total in zip(found, expected, updates, strict=True):
                assert number == total
                np.testing.assert_allclose(weights, theirs[rank // size], rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(whole, expected[-1].mean(0), rtol=2e-5, atol=1e-6)
            of_master = results[rank - rank % size][case][0][-1][0]
            assert np.array_equal(found[-1][0], of_master)


def batch_norm() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.BatchNorm1d(3))


def loss_of(net, step: int) -> torch.Tensor:
    x = torch.tensor(batch(0, step, here.rank())[0], dtype=torch.float32)
    return (net(x) - x).square().mean()


def in_windows():
    """Windows of two batches, of which process 1 ends in the middle of one; buffers, nodes of two.

    Another model is trained by DistributedDataParallel before each window.
    """
    net = SlowMo(batch_norm(), 2, localsgd_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = DistributedDataParallel(torch.nn.Linear(WIDTH, 3))
    updates = (2, 5, 1, 3)[here.rank()]
    with Join([other, net]):
        for step in range(updates):
            loss_of(other, step).backward()
            with net.no_sync():
                loss_of(net, 2 * step).backward()
            take_step(net, optimizer, loss_of(net, 2 * step + 1))
    with torch.no_grad():
        net(torch.zeros(2, WIDTH))  # outside of the context: all make the same calls again
    net.zero_grad()
    net.perform_slowmo(optimizer)
    return values(net.module), net.num_updates


def test_windows_of_batches():
    (first, _), *_ = results = spawned(4, in_windows)
    assert first["1.num_batches_tracked"] >= 9
    for other, number in results:
        assert number == 6
        for key in ("0.weight", "0.bias", "1.weight"):
            assert np.array_equal(first[key], other[key]), key


def message_of(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stop_early() -> None:
    net, optimizer = built()
    with net.join(throw_on_early_termination=True):
        for step in range(2 + here.rank()):
            step_on_batch(net, optimizer, 0, step)


def fail_inside(net, optimizer) -> None:
    with net.join():
        step_on_batch(net, optimizer, 0, 0)
        raise ValueError("bad sample")


def without_data(remembers: bool) -> int:
    net, optimizer = built(slowmo_momentum=0.0, nprocs_per_node=2)
    if remembers:
        net._init_global_momentum_buffers(optimizer)
    with net.join():
        for step in range(3 * here.rank()):
            step_on_batch(net, optimizer, 0, step)
    return net.num_updates


def troubles():
    early = message_of(stop_early)
    net, optimizer = built(localsgd_frequency=1)
    inside = message_of(lambda: fail_inside(net, optimizer))
    step_on_batch(net, optimizer, 0, 1)
    no_optimizer = message_of(lambda: without_data(remembers=False))
    return early, inside, net.num_updates, no_optimizer, without_data(remembers=True)


def test_troubles():
    (first, *others), (second, *same) = spawned(2, troubles)
    assert first == "RuntimeError: Rank 0 exhausted all inputs."
    assert "Detected at least one rank that exhausted inputs" in second
    assert others == same
    inside, num_updates, no_optimizer, without = others
    assert inside == "ValueError: bad sample"
    assert (num_updates, without) == (2, 3)
    assert "before its data ends; process 0 of 2 has not" in no_optimizer
