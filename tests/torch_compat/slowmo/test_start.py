"""Processes that start alike, or are made to, or are told that they do not."""

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import Perceptron, values
from slowmo_spawned import spawned

from torch_compat import broadcast_parameters
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


def started(differing: tuple[int, ...] = (), **how):
    """Parameters after a forward pass; ranks in `differing` begin with others."""
    module = Perceptron(3, 2)
    module.register_buffer("seen", torch.tensor([here.rank()]))
    with torch.no_grad():
        if here.rank() in differing:
            module.b1 += here.rank() + 1
            module.w2 *= 2
    module.to(here.device())
    net = SlowMo(module, nprocs_per_node=1, broadcast_buffers=False, **how)
    net.eval()
    net(torch.ones(1, 3).to(here.device()))  # an evaluation compares nothing
    net.train()
    try:
        net(torch.ones(1, 3).to(here.device()))
    except ValueError as error:
        return str(error)
    return values(net.module)


def broadcast():
    module = Perceptron(3, 2)
    module.register_buffer("seen", torch.tensor([True, here.rank() == 0]))
    with torch.no_grad():
        module.b1 += here.rank() + 1
    broadcast_parameters(module.to(here.device()))
    return values(module)


def all_starts():
    return {
        "equal": started(),
        "unequal": started((1, 3)),
        "unequal by choice": started((1,), init_sync=False),
        "made equal": broadcast(),
    }


def test_processes_begin_equal_or_are_named_with_what_differs(by):
    first, *_ = results = spawned(4, all_starts, by=by)
    for rank, result in enumerate(results):
        assert result["equal"]["b1"].tolist() == [0, 0]
        message = result["unequal"]
        for part in ("`module`", "processes 1, 3 of 4", "('b1', 'w2')", "broadcast_parameters"):
            assert part in message
        assert result["unequal by choice"]["b1"].tolist() == [2 * (rank == 1)] * 2
        assert result["unequal by choice"]["seen"].tolist() == [rank]
        for key, value in first["made equal"].items():
            assert np.array_equal(value, result["made equal"][key]), key
        assert result["made equal"]["b1"].tolist() == [1, 1]
        assert result["made equal"]["seen"].tolist() == [True, True]


def unlike(hidden: int, number: int) -> str:
    module = Perceptron(3, hidden if here.rank() else 2)
    module.more = torch.nn.ParameterList([torch.ones(1)] * (number if here.rank() else 0))
    try:
        SlowMo(module, nprocs_per_node=1)(torch.ones(1, 3))
    except ValueError as error:
        return str(error)
    return ""


def unlike_in_both():
    return unlike(4, 0), unlike(2, 1)


def test_their_shapes_and_their_number_are_compared():
    for shapes, number in spawned(2, unlike_in_both):
        assert "processes 1 of 2 do not have ('w1', 'b1', 'w2')" in shapes
        assert "processes 1 of 2 do not have (their number is not the same)" in number
