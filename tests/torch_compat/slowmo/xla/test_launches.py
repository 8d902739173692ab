"""What the wrapper launches: nothing idle, and nothing inside of `torch_xla.compile`."""

import numpy as np
import pytest
import torch
import torch_xla
from slowmo_models import Perceptron, batch, values
from slowmo_spawned import spawned

from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WIDTH = 8


def trained(is_compiled: bool) -> dict[str, np.ndarray]:
    """Six steps of a function as pytorch/xla's guides have it."""
    device, rank = torch_xla.device(), torch_xla.runtime.global_ordinal()
    module = Perceptron(WIDTH, 6)
    module.register_buffer("seen", torch.tensor([rank]))
    net = SlowMo(module.to(device), nprocs_per_node=1, slowmo_frequency=4, localsgd_frequency=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        net.perform_slowmo(optimizer)
        return loss

    run = torch_xla.compile(step, full_graph=True) if is_compiled else step
    for t in range(6):
        x, y = (torch.tensor(part).to(device) for part in batch(t, rank, WIDTH))
        run(x, y)
        runtime.run_pending()
    return values(net.module)


def full_graph_beside_others() -> str:
    """torch_xla's switch is one per process: the threads of other devices would end it."""
    device = torch_xla.device()
    net = SlowMo(Perceptron(2, 2).to(device), nprocs_per_node=1)
    shares, runtime.shares_a_process = runtime.shares_a_process, lambda: True
    try:
        with torch_xla.compile(full_graph=True), pytest.raises(RuntimeError) as caught:
            net(torch.ones(1, 2).to(device))
    finally:
        runtime.shares_a_process = shares
    return str(caught.value)


def on_one_device():
    return trained(False), trained(True), full_graph_beside_others()


def test_a_step_as_one_full_graph_on_one_device():
    ((plain, full, message),) = spawned(1, on_one_device, by="torch_xla")
    for key, value in plain.items():
        np.testing.assert_allclose(full[key], value, rtol=1e-5, atol=1e-7, err_msg=key)
    assert "torch_xla.compile(full_graph=True)" in message
    assert "several CPU" in message


def test_construction_starts_no_devices(monkeypatch):
    """A process that makes a wrapper may still fork those that drive devices."""
    monkeypatch.setattr(torch_xla.runtime, "world_size", lambda: 4)
    monkeypatch.setattr(torch_xla.runtime, "global_ordinal", lambda: 3)
    net = SlowMo(torch.nn.Linear(2, 2), nprocs_per_node=2)
    assert (net.process_rank, net.logical_rank, net.logical_world_size) == (3, 1, 2)
    assert not runtime.is_started()
