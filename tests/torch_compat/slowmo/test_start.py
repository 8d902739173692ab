"""Processes that start alike, or are made to, or are told that they do not."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import Perceptron, values
from slowmo_spawned import spawned

from torch_compat import broadcast_parameters
from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo._start import fingerprint

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn),
]


def in_python(tensor: torch.Tensor) -> int:
    """The sum over elements of bits * (2 * place + 1) * factor, modulo 2**64."""
    width = tensor.real.element_size() if tensor.is_complex() else tensor.element_size()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    bits = np.frombuffer(data, dtype=f"<i{width}").tolist()
    total = tensor.numel() + sum(b * (2 * i + 1) * 0x1E3779B97F4A7C15 for i, b in enumerate(bits))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_is_of_all_bits(dtype):
    tensor = (torch.randn(7, 3) * 9).to(dtype)
    assert int(fingerprint(tensor)) == in_python(tensor)
    assert int(fingerprint(tensor.T)) == in_python(tensor.T)
    assert int(fingerprint(tensor[:0])) == 0


def test_a_fingerprint_in_pieces(monkeypatch):
    tensor = torch.randn(1000)
    whole = int(fingerprint(tensor))
    monkeypatch.setattr("torch_compat.slowmo._start._CHUNK", 77)
    assert int(fingerprint(tensor)) == whole


def test_what_differs_has_other_fingerprints():
    one = torch.zeros(2, 3)
    others = [one.flatten()[:5], -one, one + torch.finfo(torch.float32).tiny, one * float("nan")]
    swapped = torch.arange(6.0), torch.tensor([1.0, 0, 2, 3, 4, 5])
    prints = [int(fingerprint(value)) for value in (one, *others, *swapped)]
    assert len(set(prints)) == len(prints)


def started(how: dict, differing: list[int]):
    """Parameters after a forward pass; ranks in `differing` begin with others."""
    module = Perceptron(3, 2)
    module.register_buffer("seen", torch.tensor([here.rank()]))
    with torch.no_grad():
        if here.rank() in differing:
            module.b1 += here.rank()
            module.w2 *= 2
    module.to(here.device())
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, broadcast_buffers=False, **how)
    net.eval()
    net(torch.ones(1, 3).to(here.device()))  # an evaluation compares nothing
    net.train()
    try:
        net(torch.ones(1, 3).to(here.device()))
    except ValueError as error:
        return str(error)
    return values(net.module)


def test_equal_processes_begin(by):
    for result in spawned(4, started, {}, [], by=by):
        assert result["b1"].tolist() == [0, 0]


def test_unequal_processes_are_named_with_what_differs(by):
    for message in spawned(4, started, {}, [1, 3], by=by):
        assert message.startswith("`module` must start with equal parameters in all processes")
        assert "processes 1, 3 of 4 do not have ('b1', 'w2')" in message
        assert "broadcast_parameters=True" in message


def test_unequal_processes_may_begin_where_told_so(by):
    results = spawned(2, started, {"check_start": False}, [1], by=by)
    assert [result["b1"].tolist() for result in results] == [[0, 0], [1, 1]]
    assert [result["seen"].tolist() for result in results] == [[0], [1]]


def test_unequal_processes_are_made_equal(by):
    first, second = spawned(2, started, {"broadcast_parameters": True}, [0], by=by)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert np.array_equal(value, second[key]), key
    assert first["seen"].tolist() == [0]


def sizes_that_differ():
    module = Perceptron(3, 2)
    if here.rank() == 1:
        module.more = torch.nn.Parameter(torch.ones(1))
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1)
    with pytest.raises(ValueError, match="their number is not the same"):
        net(torch.ones(1, 3))


def test_another_number_of_parameters():
    spawned(2, sizes_that_differ)


def resumed_apart():
    """Replicas that differ in the middle of a period go on."""
    module = Perceptron(3, 2)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, slowmo_momentum=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.full((1, 3), 1.0 + here.rank())).sum().backward()
    optimizer.step()
    net.perform_slowmo(optimizer)
    again = SlowMoDistributedDataParallel(Perceptron(3, 2), nprocs_per_node=1, slowmo_momentum=0.0)
    again.load_state_dict(net.state_dict())
    again(torch.ones(1, 3))
    return values(again.module)["b1"]


def test_a_run_that_goes_on_is_not_compared():
    first, second = spawned(2, resumed_apart)
    assert not np.array_equal(first, second)


def broadcast():
    module = Perceptron(3, 2)
    module.register_buffer("seen", torch.tensor([True, here.rank() == 0]))
    with torch.no_grad():
        module.b1 += here.rank() + 1
    broadcast_parameters(module.to(here.device()))
    return values(module)


def test_all_get_rank_0s(by):
    for result in spawned(4, broadcast, by=by):
        assert result["b1"].tolist() == [1, 1]
        assert result["seen"].tolist() == [True, True]


def test_a_module_without_parameters_has_nothing_to_broadcast():
    with pytest.raises(ValueError, match=r"`module` must be a torch.nn.Module with"):
        broadcast_parameters(torch.nn.ReLU())
