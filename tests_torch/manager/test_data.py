"""Samples are dealt out in turn, in order, unchanged, and not too far ahead."""

import time
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from torch_compat import QueueDataset, TPUDataManager, samples
from torch_compat.data import DataError, EndOfData, send_to_device


def test_sample_i_goes_to_device_i_modulo_nprocs():
    manager = TPUDataManager(range(9), nprocs=3)
    queues = manager.device_queues
    taken = [[queues[device].get(timeout=5) for _ in range(3)] for device in range(3)]
    assert taken == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    for queue in queues:
        assert queue.get(timeout=5) == EndOfData("The dataset ended after 9 samples.")


def test_a_queue_dataset_ends_for_good():
    manager = TPUDataManager("ab", nprocs=1)
    iterator = iter(QueueDataset(manager.device_queues[0]))
    assert [next(iterator), next(iterator)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(DataError, match="ended after 2 samples"):
            next(iter(QueueDataset(manager.device_queues[0])))


def test_no_more_is_read_than_prefetch_and_what_is_on_its_way():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield torch.zeros(2**18)  # 1 MiB: a pipe holds less than one

    manager = TPUDataManager(endless(), nprocs=2, master_prefetch=3)
    assert len(manager.device_queues) == 2
    time.sleep(0.5)
    # Three per device, one at the reading end, one at the sending end, one just made.
    assert 6 <= len(read) <= 9


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
        {"a": [torch.ones(2), 3, "x"], "b": (torch.zeros(1), None)},
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, 2).to_sparse(),
        Pair(torch.ones(1), 2),
    ],
    ids=str,
)
def test_samples_survive_the_pipe(sample):
    again = samples.loads(samples.dumps(sample))
    assert type(again) is type(sample)
    if isinstance(sample, torch.Tensor):
        assert again.dtype == sample.dtype
        assert again.shape == sample.shape
        torch.testing.assert_close(again.detach(), sample.detach())
    else:
        assert str(again) == str(sample)


def test_structure_of_a_batch_is_kept(monkeypatch: pytest.MonkeyPatch):
    transfers = []

    def transfer(tensors, device):
        transfers.append(len(tensors))
        return [tensor + 1 for tensor in tensors]

    monkeypatch.setattr("torch_compat.runtime.to_device", transfer)
    zero, one = torch.zeros(1), torch.ones(1)
    batch = OrderedDict(a=zero, b=[zero, "x", (zero, 3)], c=Pair(zero, 5))
    moved = send_to_device(batch, torch.device("xla"))
    assert moved == {"a": one, "b": [one, "x", (one, 3)], "c": Pair(one, 5)}
    assert transfers == [4]
    assert send_to_device("text", torch.device("xla")) == "text"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dataset": 5}, "`dataset` must be iterable, got int"),
        ({"dataset": [], "master_prefetch": 0}, "`prefetch` counts samples"),
    ],
)
def test_bad_arguments(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        TPUDataManager(**{"nprocs": 1, **arguments})


def test_nprocs_must_be_known_before_samples_are():
    with pytest.raises(ValueError, match="`nprocs` is not known yet"):
        _ = TPUDataManager([]).device_queues
