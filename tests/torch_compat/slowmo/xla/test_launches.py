"""What the wrapper launches: nothing idle, and nothing inside of `torch_xla.compile`."""

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from slowmo_models import Perceptron, batch, values
from slowmo_spawned import spawned

from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel

WIDTH = 8


def idle_forward():
    """Without buffers, masters or slow momentum a forward pass launches nothing of its own."""
    device = torch_xla.device()
    module = torch.nn.Linear(2, 2).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, slowmo_momentum=0.0)
    runtime.run_pending()
    before = met.metric_data("ExecuteTime")
    net(torch.ones(1, 2).to(device))
    return met.metric_data("ExecuteTime") == before


def test_a_forward_pass_alone():
    assert spawned(1, idle_forward, by="torch_xla") == [True]


def compiled(how: str, slow_outside: bool, buffers: bool) -> dict[str, np.ndarray]:
    """Six steps of a function as pytorch/xla's guides have it; `how` tells what compiles it."""
    device, rank = torch_xla.device(), torch_xla.runtime.global_ordinal()
    module = Perceptron(WIDTH, 6)
    if buffers:
        module.register_buffer("seen", torch.tensor([rank]))
    net = SlowMoDistributedDataParallel(
        module.to(device), nprocs_per_node=1, slowmo_frequency=4, localsgd_frequency=2
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not slow_outside:
            net.perform_slowmo(optimizer)
        return loss

    options = {"full": {"full_graph": True}, "compiled": {}}
    run = torch_xla.compile(step, **options[how]) if how in options else step
    for t in range(6):
        x, y = (torch.tensor(part).to(device) for part in batch(t, rank, WIDTH))
        run(x, y)
        if slow_outside:
            net.perform_slowmo(optimizer)
        runtime.run_pending()
    return values(net.module)


@pytest.mark.parametrize("slow_outside", [False, True])
def test_a_step_as_one_full_graph_on_one_device(slow_outside):
    (plain,) = spawned(1, compiled, "not", slow_outside, True, by="torch_xla")
    (full,) = spawned(1, compiled, "full", slow_outside, True, by="torch_xla")
    for key, value in plain.items():
        np.testing.assert_allclose(full[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


def test_a_step_without_exchange_as_a_graph_on_two_devices():
    plain = spawned(2, compiled, "not", True, False, by="torch_xla")
    graphs = spawned(2, compiled, "compiled", True, False, by="torch_xla")
    for expected, ours in zip(plain, graphs, strict=True):
        for key, value in expected.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


def full_graph_beside_others():
    """torch_xla's switch is one per process: the threads of other devices would end it."""
    device = torch_xla.device()
    net = SlowMoDistributedDataParallel(Perceptron(2, 2).to(device), nprocs_per_node=1)
    shares, runtime.shares_a_process = runtime.shares_a_process, lambda: True
    try:
        with torch_xla.compile(full_graph=True), pytest.raises(RuntimeError) as caught:
            net(torch.ones(1, 2).to(device))
    finally:
        runtime.shares_a_process = shares
    return str(caught.value)


def test_a_full_graph_beside_other_devices_is_refused():
    (message,) = spawned(1, full_graph_beside_others, by="torch_xla")
    assert message.startswith("torch_xla.compile(full_graph=True) cannot be used on several CPU")


def test_construction_starts_no_devices(monkeypatch):
    """A process that makes a wrapper may still fork those that drive devices."""
    monkeypatch.setattr(torch_xla.runtime, "world_size", lambda: 4)
    monkeypatch.setattr(torch_xla.runtime, "global_ordinal", lambda: 3)
    net = SlowMoDistributedDataParallel(torch.nn.Linear(2, 2), nprocs_per_node=2)
    assert (net.process_rank, net.logical_rank, net.logical_world_size) == (3, 1, 2)
    assert not runtime.is_started()
