"""Buffers: rank 0's, each process' own, or their mean when parameters are averaged."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


class Buffered(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("counts", torch.tensor([2**40 + rank, rank]))
        self.register_buffer("short", torch.tensor([rank - 3], dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([rank == 0, rank == 1, True]))
        self.register_buffer("means", torch.full((2,), float("nan") if rank else 0.1))
        self.register_buffer("rounded", torch.full((2,), 0.1 + rank, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("unsaved", torch.tensor(7.0 + rank), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.weight * self.unsaved


def broadcast(training: bool, broadcast_buffers: bool):
    device, rank = here.device(), here.rank()
    net = SlowMo(Buffered(rank).to(device), nprocs_per_node=1, broadcast_buffers=broadcast_buffers)
    net.train(training)
    net.module.register_buffer("on_host", torch.tensor([rank + 2.0]))
    with torch.no_grad():
        seen = net()
    here.launch()
    state = {k: v.float() for k, v in net.module.state_dict().items() if k != "counts"}
    here.launch()
    state = {k: v.cpu().numpy() for k, v in state.items()}
    return seen.cpu().numpy(), net.module.counts.tolist(), state


def all_broadcasts():
    kept = [broadcast(training, mode) for training, mode in ((True, False), (False, True))]
    return broadcast(True, True), kept


def test_buffers_of_every_dtype_are_rank_0s_or_stay(by):
    results = spawned(4, all_broadcasts, by=by)
    for rank, ((seen, counts, state), kept) in enumerate(results):
        assert seen.tolist() == [7, 7, 7]
        assert counts == [2**40, 0]
        assert state["flags"].tolist() == [1, 0, 1]
        assert state["short"].tolist() == [-3]
        assert state["on_host"].tolist() == [2]
        np.testing.assert_allclose(state["means"], 0.1, rtol=1e-6)
        np.testing.assert_allclose(state["rounded"], 0.1, rtol=1e-2)
        for own, own_counts, _ in kept:  # told so, or in evaluation
            assert own.tolist() == [7 + rank] * 3
            assert own_counts == [2**40 + rank, rank]


SGP = {"slowmo_base_algorithm": "sgp", "slowmo_frequency": 3}
WHOLE = {"slowmo_memory_efficient": False}
SLOW = {"slowmo_frequency": 3, "localsgd_frequency": 2}
MEANS = SGP | WHOLE | {"slowmo_sgp_average_params": True}
# Processes, those of a node, options; the steps that average buffers, and those of them that send
# the buffers in an all-reduce of their own, since no all-reduce takes the parameters.
AVERAGED = {
    "slow steps": (2, 1, SLOW, {2, 3, 4, 6}, {3, 6}),
    "push-sum with means": (2, 1, MEANS | {"mixing": [0.3, 0.6]}, {3, 6}, set()),
    "local sgd": (2, 1, {"localsgd_frequency": 2, "slowmo_momentum": 0.0}, {2, 4, 6}, set()),
    "whole sgp": (2, 1, SGP | WHOLE, {3, 6}, {3, 6}),
    "one node": (2, 2, SLOW | WHOLE, {2, 3, 4, 6}, {2, 3, 4, 6}),
    "nodes of two": (4, 2, {"localsgd_frequency": 2, "slowmo_momentum": 0.0}, {2, 4, 6}, set()),
}


class Counting(torch.nn.Module):
    """Buffers of several dtypes; parameters of each dtype among them that is averaged."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.light = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("means", torch.zeros(2))
        self.register_buffer("halves", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("number", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * (1 + self.means.sum())


def counted(nprocs_per_node: int, options: dict, mode: object):
    """Per step the collectives so far, and the buffers afterwards."""
    rank, device, calls, seen = here.rank(), here.device(), [], []
    options = dict(options)
    if "mixing" in options:
        options["mixing"] = topology.self_weighted(options["mixing"])
    module = Counting(rank).to(device)
    net = SlowMo(module, nprocs_per_node, broadcast_buffers=mode, **options)
    for name in ("all_reduce", "reduce_scatter", "all_gather", "permute"):
        setattr(net._backend, name, noted(getattr(net._backend, name), calls))
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    module.register_buffer("on_host", torch.zeros(2))
    for t in range(1, 7):
        module.means.fill_(t + rank)
        module.on_host.fill_(t + rank)
        module.halves.fill_(2 * t + rank)
        take_step(net, optimizer, net(), others="fairscale")
        assert module.on_host.tolist() == module.means.tolist()
        seen.append((len(calls), module.means.tolist(), module.halves.float().item()))
    state = net.consolidated_state_dict()
    return seen, module.number.item(), [state[k].tolist() for k in ("means", "number")]


def noted(collective, calls: list):
    def call(*args, **kwargs):
        calls.append(1)
        return collective(*args, **kwargs)

    return call


def counted_with_and_without(names: list[str]):
    return {name: [counted(*AVERAGED[name][1:3], m) for m in ("average", False)] for name in names}


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_are_averaged_with_the_parameters(by, world):
    names = [name for name, setting in AVERAGED.items() if setting[0] == world]
    names = names[:2] if by == "torch_xla" else names
    results = spawned(world, counted_with_and_without, names, by=by)
    mean = (world - 1) / 2
    for rank, result in enumerate(results):
        for name, (ours, plain) in result.items():
            due, alone = AVERAGED[name][3:]
            expected = [mean if t in due else rank for t in range(1, 7)]
            assert [row[1] for row in ours[0]] == [[t + 1 + e] * 2 for t, e in enumerate(expected)]
            assert [row[2] for row in ours[0]] == [2 * t + 2 + e for t, e in enumerate(expected)]
            # Nothing is sent but in those steps: one more all-reduce for each of the two dtypes.
            sent = np.diff([0] + [a[0] - b[0] for a, b in zip(ours[0], plain[0], strict=True)])
            assert {t + 1: int(n) for t, n in enumerate(sent) if n} == dict.fromkeys(alone, 2), name
            assert (ours[1], ours[2]) == (rank, [[6 + mean] * 2, 0]), "whole numbers stay"
            assert plain[2] == [[6, 6], 0], "rank 0's"
            if name == "nodes of two":  # the start, gradients and parameters of two dtypes
                assert plain[0][-1][0] == 1 + 6 * 2 + 3 * 2
