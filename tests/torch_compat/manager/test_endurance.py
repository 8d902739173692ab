"""Many steps and many starts; nothing compiles after the first steps, nothing is left behind."""

import itertools
import os
import threading

import torch
from models import regressor, samples

from torch_compat import TPUManager


def test_steps_of_several_micro_batches_compile_nothing_after_the_first():
    model, data = regressor(width=256), samples(64)
    losses, compiled = [], []
    with TPUManager(
        model, itertools.cycle(data), nprocs=4, grad_accumulation_steps=3, start=True
    ) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(30):
            loss, count = manager.step()
            assert count == 4 * 3
            losses.append(loss)
            compiled.append(manager.statistics.compilations)
            optimizer.step()
            optimizer.zero_grad()
            manager.update_model_parameters(model.parameters())
    assert manager.exitcode == 0
    # One for all micro-batches, one for the exchange, one for what an update of parameters brings.
    assert 2 <= sum(compiled[:2]) <= 4
    assert sum(compiled[2:]) == 0
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_starts_and_shutdowns_leave_nothing():
    pids, before_files = [os.getpid()], set(os.listdir("/dev/shm"))
    before_threads = threading.active_count()
    counts, data = [], samples(8)
    for _ in range(4):
        manager = TPUManager(regressor(width=64), itertools.cycle(data), nprocs=1, start=True)
        manager.step()
        pids.append(manager.pid)
        manager.shutdown()
        assert manager.exitcode == 0
        assert not manager.is_alive()
        counts.append(len(os.listdir("/proc/self/fd")))
    new = set(os.listdir("/dev/shm")) - before_files
    # torch names its files after the process; those of other programs come and go.
    ours = [name for name in new if any(f"_{pid}_" in name for pid in pids)]
    assert not ours + [name for name in new if not name.startswith("torch_")]
    assert threading.active_count() == before_threads
    assert counts[-1] - counts[0] <= 3, counts
