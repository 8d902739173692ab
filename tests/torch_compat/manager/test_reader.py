"""Samples arrive unchanged, and are not read too far ahead."""

import time
from typing import NamedTuple

import torch

from support.waiting import wait_until
from torch_compat.reader import SampleReader
from torch_compat.tensors import dumps, loads


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
