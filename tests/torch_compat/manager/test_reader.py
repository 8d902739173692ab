"""Samples are not read too far ahead."""

import time

import torch

from support.waiting import wait_until
from torch_compat.reader import SampleReader


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
