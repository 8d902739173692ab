"""Samples are dealt out in turn, in order, unchanged, and not too far ahead."""

import multiprocessing as mp
import threading
import time
from typing import NamedTuple

import pytest
import torch

from support.waiting import PATIENCE_SECONDS, wait_until
from torch_compat import samples
from torch_compat.reader import DataError, EndOfData, QueueDataset, SampleReader


def test_sample_i_goes_to_device_i_modulo_nprocs():
    manager = SampleReader(range(9), nprocs=3)
    queues = manager.device_queues
    taken = [
        [queues[device].get(timeout=PATIENCE_SECONDS) for _ in range(3)] for device in range(3)
    ]
    assert taken == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    for queue in queues:
        assert queue.get(timeout=PATIENCE_SECONDS) == EndOfData(
            "The dataset ended after 9 samples."
        )


def test_a_queue_dataset_ends_for_good():
    manager = SampleReader("ab", nprocs=1)
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

    manager = SampleReader(endless(), nprocs=2, master_prefetch=3)
    for device_queue in manager.device_queues:
        device_queue.get(timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(read) >= 8)
    time.sleep(0.5)  # for one that reads too much
    # Two taken; three per device in queues, one at each reading end, one at the sending end.
    assert len(read) <= 11


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


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dataset": 5}, "`dataset` must be iterable, got int"),
        ({"dataset": [], "master_prefetch": 0}, "`prefetch` counts samples"),
        ({"dataset": [], "nprocs": 0}, "`nprocs` must be >= 1, got 0"),
    ],
)
def test_bad_arguments(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        SampleReader(**{"nprocs": 1, **arguments})


def test_nprocs_must_be_known_before_samples_are():
    with pytest.raises(ValueError, match="`nprocs` is not known yet"):
        _ = SampleReader([]).device_queues


def test_one_process_may_deal_to_a_number_of_devices_that_only_it_knows():
    manager = SampleReader(range(6))
    manager.nprocs = 2
    queues = manager.device_queues
    assert [queues[1].get(timeout=PATIENCE_SECONDS) for _ in range(3)] == [1, 3, 5]
    assert [queues[0].get(timeout=PATIENCE_SECONDS) for _ in range(3)] == [0, 2, 4]


def _take(manager: SampleReader, index: int, count: int, connection) -> None:
    iterator = iter(QueueDataset(manager.device_queues[index]))
    connection.send([next(iterator) for _ in range(count)])


def test_one_process_per_device():
    manager = SampleReader(range(40), nprocs=4, master_prefetch=2)
    context = mp.get_context("fork")
    pipes = [context.Pipe() for _ in range(4)]
    for index, (_, theirs) in enumerate(pipes):
        context.Process(target=_take, args=(manager, index, 10, theirs), daemon=True).start()
    for index, (ours, _) in enumerate(pipes):
        assert ours.poll(PATIENCE_SECONDS)
        assert ours.recv() == list(range(index, 40, 4))


def test_all_threads_may_ask_at_once():
    for _ in range(30):
        manager = SampleReader(range(8), nprocs=4, master_prefetch=1)
        barrier, taken = threading.Barrier(4), {}

        def take(index: int, manager=manager, barrier=barrier, taken=taken) -> None:
            barrier.wait()
            iterator = iter(QueueDataset(manager.device_queues[index]))
            taken[index] = [next(iterator), next(iterator)]

        threads = [threading.Thread(target=take, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert taken == {index: [index, index + 4] for index in range(4)}


def test_workers_of_a_data_loader_are_refused():
    manager = SampleReader([], nprocs=1)
    with pytest.raises(ValueError, match="`num_workers` must be 0"):
        manager.get_batches(0, num_workers=2)
    with pytest.raises(ValueError, match="`index` must be one of the 1 devices, got 1"):
        manager.get_batches(1)


def test_a_queue_dataset_has_no_end():
    assert len(QueueDataset(None)) == 10**12
