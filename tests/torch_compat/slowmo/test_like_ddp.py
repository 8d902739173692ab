"""What DistributedDataParallel offers beside the module, beside that class itself."""

import contextlib

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import Perceptron, take_step, values
from slowmo_spawned import spawned
from torch.nn.parallel import DistributedDataParallel

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WIDTH = 4


def module() -> torch.nn.Module:
    return torch.nn.Sequential(Perceptron(WIDTH, 3), torch.nn.BatchNorm1d(WIDTH))


def loss_of(net, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + here.rank())
    return net(torch.randn(5, WIDTH, generator=generator)).square().mean()


def windows(net, pattern: str):
    """Gradients and buffers after each pass: "n" inside of no_sync, "s" outside, "f" forward alone
    inside of it and the backward pass after it."""
    history = []
    for number, letter in enumerate(pattern):
        with contextlib.nullcontext() if letter == "s" else net.no_sync():
            loss = loss_of(net, number)
            if letter == "n":
                loss.backward()
        if letter != "n":
            loss.backward()
        grads = {key: p.grad.numpy().copy() for key, p in net.module.named_parameters()}
        buffers = {key: b.numpy().copy() for key, b in net.module.named_buffers()}
        history.append({**grads, **buffers})
        if letter == "s":
            net.zero_grad()
    return history


PATTERNS = ("snnsns", "fsffs")


def beside_ddp():
    ours = [SlowMo(module(), nprocs_per_node=2) for _ in PATTERNS]
    theirs = [DistributedDataParallel(module()) for _ in PATTERNS]
    return [list(map(windows, nets, PATTERNS)) for nets in (ours, theirs)]


def test_no_sync_is_that_of_ddp():
    for ours, theirs in spawned(2, beside_ddp):
        for mine, other, pattern in zip(ours, theirs, PATTERNS, strict=True):
            for number, wanted in enumerate(other):
                for key, value in wanted.items():
                    where = f"{pattern}, {number}, {key}"
                    np.testing.assert_allclose(
                        mine[number][key], value, rtol=1e-6, atol=1e-7, err_msg=where
                    )


def gossiping(in_no_sync: bool):
    """The module holds numerators after each backward pass where push-sum weights move."""
    net = SlowMo(
        Perceptron(WIDTH, 3),
        nprocs_per_node=2,
        slowmo_base_algorithm="sgp",
        mixing=topology.self_weighted([0.3, 0.6]),
        slowmo_frequency=4,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        with net.no_sync() if in_no_sync else contextlib.nullcontext():
            loss_of(net, 2 * step).backward()
        take_step(net, optimizer, loss_of(net, 2 * step + 1))
    return values(net.module), float(net.ps_weight)


def gossiping_both_ways():
    return gossiping(True), gossiping(False)


def test_no_sync_under_push_sum():
    results = spawned(4, gossiping_both_ways)
    for (ours, weight), (plain, other) in results:
        assert weight == other
        for key, value in plain.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-6)
    assert len({weight for (_, weight), _ in results}) > 1
