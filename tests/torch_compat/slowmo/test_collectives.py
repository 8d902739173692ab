"""Tensors as one vector; buffers."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import values
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo._collectives import flatten, pack, times, unflatten, unpack


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
    with torch.no_grad():
        seen = net()
    here.launch()
    state = {k: v.float() for k, v in net.module.state_dict().items() if k != "counts"}
    here.launch()
    state = {k: v.cpu().numpy() for k, v in state.items()}
    return seen.cpu().numpy(), net.module.counts.tolist(), state


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_every_dtype_are_rank_0s(by, training):
    for seen, counts, state in spawned(4, broadcast, training, True, by=by):
        assert seen.tolist() == [7, 7, 7]
        assert counts == [2**40, 0]
        assert state["flags"].tolist() == [1, 0, 1]
        assert state["short"].tolist() == [-3]
        np.testing.assert_allclose(state["means"], 0.1, rtol=1e-6)
        np.testing.assert_allclose(state["rounded"], 0.1, rtol=1e-2)


def test_buffers_stay_where_told_so():
    results = spawned(2, broadcast, True, False)
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
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 4).to(device))
    return values(net.module)


def test_batch_norm(by):
    first, second = spawned(2, batch_norm, by=by)
    assert first["1.num_batches_tracked"] == 3
    for key, value in first.items():
        np.testing.assert_allclose(value, second[key], rtol=1e-6, err_msg=key)
