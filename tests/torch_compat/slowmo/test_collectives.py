"""Tensors as one vector; buffers."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import values
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo._flat import flatten, pack, times, unflatten, unpack


def test_many_tensors_as_one_vector_and_back():
    tensors = [torch.arange(3.0), torch.tensor(5.0), torch.ones(2, 2, dtype=torch.bfloat16)]
    flat = flatten(tensors, 10)
    assert flat.tolist() == [0, 1, 2, 5, 1, 1, 1, 1, 0, 0]
    for tensor, part in zip(tensors, unflatten(tensors, flat), strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)
    alone = torch.ones(2)
    assert flatten([alone]).data_ptr() != alone.data_ptr(), "never a view"


def test_one_vector_per_dtype_and_back():
    tensors = [torch.ones(2), torch.tensor([2**40]), torch.zeros(0), torch.full((1, 2), 3.0)]
    flats = pack(tensors)
    assert [flat.tolist() for flat in flats] == [[1, 1, 3, 3], [2**40]]
    for tensor, part in zip(tensors, unpack(tensors, flats), strict=True):
        assert torch.equal(part, tensor)


def test_half_precision_is_multiplied_in_float32():
    value, factor = torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([1 / 3])
    assert torch.equal(times(value, factor), (value.float() / 3).to(torch.bfloat16))


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
    net = SlowMoDistributedDataParallel(
        Buffered(rank).to(device), nprocs_per_node=1, broadcast_buffers=broadcast_buffers
    )
    net.train(training)
    net.module.register_buffer("on_host", torch.tensor([rank + 2.0]))
    with torch.no_grad():
        seen = net()
    here.launch()
    state = {k: v.float() for k, v in net.module.state_dict().items() if k != "counts"}
    here.launch()
    state = {k: v.cpu().numpy() for k, v in state.items()}
    return seen.cpu().numpy(), net.module.counts.tolist(), state


def test_buffers_of_every_dtype_are_rank_0s(by):
    for seen, counts, state in spawned(4, broadcast, True, True, by=by):
        assert seen.tolist() == [7, 7, 7]
        assert counts == [2**40, 0]
        assert state["flags"].tolist() == [1, 0, 1]
        assert state["short"].tolist() == [-3]
        assert state["on_host"].tolist() == [2]
        np.testing.assert_allclose(state["means"], 0.1, rtol=1e-6)
        np.testing.assert_allclose(state["rounded"], 0.1, rtol=1e-2)


@pytest.mark.parametrize("how", [(True, False), (False, True)])
def test_buffers_stay_where_told_so_and_in_evaluation(how):
    results = spawned(2, broadcast, *how)
    assert [seen[0] for seen, _, _ in results] == [7, 8]
    assert [counts for _, counts, _ in results] == [[2**40, 0], [2**40 + 1, 1]]


def batch_norm():
    """Also what the batches' own statistics make of the buffers."""
    device, rank = here.device(), here.rank()
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    torch.nn.init.eye_(module[0].weight)  # threads of one process share their random numbers
    torch.nn.init.zeros_(module[0].bias)
    module.to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, localsgd_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for t in range(3):
        net(torch.full((5, 4), 1.0 + rank + t).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
    last = values(net.module)
    net(torch.ones(2, 4).to(device))  # in training mode: it broadcasts, then sees the same batch
    return last, values(net.module)


def test_batch_norm(by):
    (last, first), (_, second) = spawned(2, batch_norm, by=by)
    assert last["1.num_batches_tracked"] == 3
    for key, value in first.items():
        np.testing.assert_allclose(value, second[key], rtol=1e-6, err_msg=key)


# Buffers that are averaged when parameters are.

SGP = {"slowmo_base_algorithm": "sgp", "slowmo_frequency": 3}
WHOLE = {"slowmo_memory_efficient": False}
SLOW = {"slowmo_frequency": 3, "localsgd_frequency": 2}
# Processes, those of a node, options; the steps that average buffers, and those of them that send
# the buffers in an all-reduce of their own, since no all-reduce takes the parameters.
AVERAGED = {
    "local sgd": (2, 1, {"localsgd_frequency": 2, "slowmo_momentum": 0.0}, {2, 4, 6}, set()),
    "slow steps": (2, 1, SLOW, {2, 3, 4, 6}, {3, 6}),
    "whole slow steps": (2, 1, SLOW | WHOLE, {2, 3, 4, 6}, {3}),
    "sgp": (2, 1, SGP, {3, 6}, {3, 6}),
    "whole sgp": (2, 1, SGP | WHOLE, {3, 6}, {3, 6}),
    "sgp with means": (2, 1, SGP | WHOLE | {"slowmo_sgp_average_params": True}, {3, 6}, set()),
    "push-sum with means": (
        *(2, 1),
        SGP | WHOLE | {"slowmo_sgp_average_params": True, "mixing": [0.3, 0.6]},
        *({3, 6}, set()),
    ),
    "one node": (2, 2, SLOW | WHOLE, {2, 3, 4, 6}, {2, 3, 4, 6}),
    "nodes of two": (4, 2, {"localsgd_frequency": 2, "slowmo_momentum": 0.0}, {2, 4, 6}, set()),
}


class Counting(torch.nn.Module):
    """Buffers of several dtypes; parameters of each dtype among them that is averaged."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.light = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("means", torch.zeros(2))
        self.register_buffer("halves", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("number", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * (1 + self.means.sum())


def counted(names: list[str], mode: object):
    """Per setting and step the collectives so far, and the buffers afterwards."""
    return [counted_once(*AVERAGED[name][1:3], mode) for name in names]


def counted_once(nprocs_per_node: int, options: dict, mode: object):
    rank, device, calls, seen = here.rank(), here.device(), [], []
    options = dict(options)
    if "mixing" in options:
        options["mixing"] = topology.self_weighted(options["mixing"])
    module = Counting(rank).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node, broadcast_buffers=mode, **options)
    for name in ("all_reduce", "reduce_scatter", "all_gather", "permute"):
        setattr(net._backend, name, noted(getattr(net._backend, name), calls))
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    module.register_buffer("on_host", torch.zeros(2))
    for t in range(1, 7):
        module.means.fill_(t + rank)
        module.on_host.fill_(t + rank)
        module.halves.fill_(2 * t + rank)
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
        here.launch()
        assert module.on_host.tolist() == module.means.tolist()
        seen.append((len(calls), module.means.tolist(), module.halves.float().item()))
    state = net.consolidated_state_dict()
    return seen, module.number.item(), [state[f"module.{k}"].tolist() for k in ("means", "number")]


def noted(collective, calls: list):
    def call(*args, **kwargs):
        calls.append(1)
        return collective(*args, **kwargs)

    return call


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_are_averaged_with_the_parameters(by, world):
    names = [name for name, setting in AVERAGED.items() if setting[0] == world]
    if by == "torch_xla" and world == 2:
        names = ["slow steps", "push-sum with means"]
    averaged = spawned(world, counted, names, "average", by=by)
    without = spawned(world, counted, names, False, by=by)
    mean = (world - 1) / 2
    for rank in range(world):
        for name, ours, plain in zip(names, averaged[rank], without[rank], strict=True):
            due, alone = AVERAGED[name][3:]
            expected = [mean if t in due else rank for t in range(1, 7)]
            assert [row[1] for row in ours[0]] == [[t + 1 + e] * 2 for t, e in enumerate(expected)]
            assert [row[2] for row in ours[0]] == [2 * t + 2 + e for t, e in enumerate(expected)]
            # Nothing is sent but in those steps: one more all-reduce for each of the two dtypes.
            sent = np.diff([0] + [a[0] - b[0] for a, b in zip(ours[0], plain[0], strict=True)])
            assert {t + 1: int(n) for t, n in enumerate(sent) if n} == dict.fromkeys(alone, 2), name
            assert (ours[1], ours[2]) == (rank, [[6 + mean] * 2, 0]), "whole numbers stay"
            assert plain[2] == [[6, 6], 0], "rank 0's"
            if name == "nodes of two":  # the start, gradients, parameters of two dtypes
                assert plain[0][-1][0] == 1 + 6 + 3 * 2
