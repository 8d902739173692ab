"""How many XLA graphs training compiles, and that idle steps trace nothing."""

import threading

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from slowmo_models import Perceptron, train_step
from slowmo_spawned import spawned

from support.waiting import PATIENCE_SECONDS
from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WORLD, PERIOD, WIDTH = 4, 4, 8
# Waits for all device threads of the process that is forked from this one.
TOGETHER = threading.Barrier(WORLD)


def together(read):
    """`read()` while no thread runs anything."""
    runtime.run_pending()
    TOGETHER.wait(PATIENCE_SECONDS)
    value = read()
    TOGETHER.wait(PATIENCE_SECONDS)
    return value


def compiled() -> int:
    return met.counter_value("UncachedCompile") or 0


def activity() -> dict[str, float]:
    counters = {name: met.counter_value(name) for name in met.counter_names()}
    return counters | {name: met.metric_data(name)[0] for name in met.metric_names()}


def trained(options: dict, with_buffers: bool) -> list[int]:
    """Compilations after each of four periods, with another learning rate in every step."""
    device = torch_xla.device()
    module = Perceptron(WIDTH, 6)
    if with_buffers:
        module.register_buffer("seen", torch.arange(3))
    net = SlowMo(module.to(device), slowmo_frequency=PERIOD, localsgd_frequency=2, **options)
    weights, biases = [module.w1, module.w2], [module.b1, module.b2]
    optimizer = torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1, momentum=0.9)
    counts = [together(compiled)]
    for t in range(4 * PERIOD):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (1 + t + i)
        train_step(net, optimizer, t, WIDTH)
        if (t + 1) % PERIOD == 0:
            counts.append(together(compiled))
    return counts


# Two graphs of the step itself (the optimizer's momentum begins with the first), one that compares
# the processes at the start, two of slow momentum's beginning (copy of the initial parameters,
# anchor), then those of each kind of exchange: an average is prepared and summed, an exchange with
# peers packed, sent by one graph per round (here 2) and unpacked, a slow step packed, made and
# unpacked; a whole one is packed and unpacked as an exchange with peers is, by the same graphs.
CASES = {
    "sgp slowmo": (
        {"slowmo_base_algorithm": "sgp", "nprocs_per_node": 1, "slowmo_memory_efficient": False},
        *(False, 3 + 2 + 4 + 1),
    ),
    # Buffers before the step (2), gradients in the middle of it (2).
    "two levels": ({"nprocs_per_node": 2}, True, 3 + 2 + 2 + 3 + 4),
}


@pytest.mark.parametrize("case", CASES)
def test_after_one_period_nothing_is_compiled(case):
    options, with_buffers, expected = CASES[case]
    results = spawned(WORLD, trained, options, with_buffers, by="torch_xla")
    assert len({tuple(result) for result in results}) == 1, "the counter is the process'"
    start, first, *later = results[0]
    assert later == [first] * len(later)
    assert first - start == expected


def idle() -> list[bool]:
    """Per step whether `perform_slowmo` left every counter and metric of torch_xla alone."""
    device = torch_xla.device()
    module = Perceptron(8, 8).to(device)
    net = SlowMo(module, nprocs_per_node=1, slowmo_frequency=PERIOD, localsgd_frequency=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    quiet = []
    for _ in range(2 * PERIOD):
        net(torch.ones(2, 8).to(device)).sum().backward()
        optimizer.step()
        before = together(activity)
        net.perform_slowmo(optimizer)
        TOGETHER.wait(PATIENCE_SECONDS)
        quiet.append(activity() == before)
        TOGETHER.wait(PATIENCE_SECONDS)
    return quiet


def test_steps_in_which_nothing_is_due_trace_and_send_nothing():
    for quiet in spawned(WORLD, idle, by="torch_xla"):
        # The first step builds the anchor.
        assert quiet == [False, False, True, False, True, False, True, False]
