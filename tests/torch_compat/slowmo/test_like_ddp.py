"""What DistributedDataParallel offers beside the module, beside that class itself."""

import contextlib

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import Perceptron, values
from slowmo_spawned import spawned
from torch.nn.parallel import DistributedDataParallel

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel

WIDTH = 4


def module(batch_norm: bool) -> torch.nn.Module:
    layers = [Perceptron(WIDTH, 3), *([torch.nn.BatchNorm1d(WIDTH)] if batch_norm else [])]
    return torch.nn.Sequential(*layers)


def samples(number: int, rank: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(net, number: int, rank: int) -> torch.Tensor:
    return net(samples(number, rank)).square().mean()


def windows(net, pattern: str, rank: int):
    """Gradients and buffers after each pass: "n" inside of no_sync, "s" outside, "f" forward alone
    inside of it and the backward pass after it."""
    history = []
    for number, letter in enumerate(pattern):
        with contextlib.nullcontext() if letter == "s" else net.no_sync():
            loss = loss_of(net, number, rank)
            if letter == "n":
                loss.backward()
        if letter != "n":
            loss.backward()
        grads = {key: p.grad.numpy().copy() for key, p in net.module.named_parameters()}
        history.append(
            {**grads, **{key: b.numpy().copy() for key, b in net.module.named_buffers()}}
        )
        if letter == "s":
            net.zero_grad()
    return history


def beside_ddp(pattern: str):
    ours = SlowMoDistributedDataParallel(module(True), nprocs_per_node=2)
    return (
        windows(ours, pattern, here.rank()),
        windows(DistributedDataParallel(module(True)), pattern, here.rank()),
    )


@pytest.mark.parametrize("pattern", ["snnsns", "fsffs"])
def test_no_sync_is_that_of_ddp(pattern):
    for ours, theirs in spawned(2, beside_ddp, pattern):
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for key, value in other.items():
                np.testing.assert_allclose(
                    mine[key], value, rtol=1e-6, atol=1e-7, err_msg=f"{number} {key}"
                )


def one_window():
    net = SlowMoDistributedDataParallel(module(False), nprocs_per_node=2)
    return windows(net, "nns", here.rank())[-1]


def test_a_window_is_one_large_batch():
    whole = module(False)
    sum(loss_of(whole, number, rank) for number in range(3) for rank in (0, 1)).backward()
    for gradients in spawned(2, one_window):
        for key, parameter in whole.named_parameters():
            np.testing.assert_allclose(2 * gradients[key], parameter.grad, rtol=1e-5, atol=1e-6)


def gossiping(in_no_sync: bool):
    """The module holds numerators after each backward pass where push-sum weights move."""
    net = SlowMoDistributedDataParallel(
        module(False),
        nprocs_per_node=2,
        slowmo_base_algorithm="sgp",
        mixing=topology.self_weighted([0.3, 0.6]),
        slowmo_frequency=4,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        with net.no_sync() if in_no_sync else contextlib.nullcontext():
            loss_of(net, 2 * step, here.rank()).backward()
        loss_of(net, 2 * step + 1, here.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
    return values(net.module), float(net.ps_weight)


def test_no_sync_under_push_sum():
    results = spawned(4, gossiping, True), spawned(4, gossiping, False)
    for (ours, weight), (plain, other) in zip(*results, strict=True):
        assert weight == other
        for key, value in plain.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-6)
    assert len({weight for _, weight in results[0]}) > 1
