"""Samples are dealt out in turn, in order, unchanged, and not too far ahead."""

import time
from typing import NamedTuple

import pytest
import torch

from support.waiting import wait_until
from torch_compat.reader import DataError, SampleReader
from torch_compat.tensors import dumps, loads


@pytest.mark.parametrize("is_known", [True, False])
def test_sample_i_goes_to_device_i_modulo_nprocs(is_known):
    """One process may deal to a number of devices that only it knows."""
    manager = SampleReader(range(9), nprocs=3 if is_known else None)
    manager.nprocs = 3
    queues = manager.device_queues
    for device in (1, 0, 2):
        taken = [next(iter(queues[device])) for _ in range(3)]
        assert taken == [device, device + 3, device + 6]
    for queue in queues:
        for _ in range(2):  # for good
            with pytest.raises(DataError, match="ended after 9 samples"):
                next(iter(queue))


def test_no_more_is_read_than_prefetch_and_what_is_on_its_way():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield torch.zeros(2**18)  # 1 MiB: a pipe holds less than one

    manager = SampleReader(endless(), nprocs=2, master_prefetch=3)
    for device_queue in manager.device_queues:
        next(iter(device_queue))
    wait_until(lambda: len(read) >= 8)
    time.sleep(0.5)  # for one that reads too much
    # Two taken; three per device in queues, one at each reading end, one at the sending end.
    assert len(read) <= 11


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


SAMPLES = [
    torch.arange(6).reshape(2, 3).T,
    torch.tensor(2.5),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(2, requires_grad=True),
    {"a": [torch.ones(2), 3, "x"], "b": (torch.zeros(1), None)},
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(2, 2).to_sparse(),
    Pair(torch.ones(1), 2),
]


def test_samples_survive_the_pipe():
    for sample in SAMPLES:
        again = loads(dumps(sample))
        assert type(again) is type(sample)
        if isinstance(sample, torch.Tensor):
            assert again.dtype == sample.dtype
            torch.testing.assert_close(again.detach(), sample.detach())
        else:
            assert str(again) == str(sample)
