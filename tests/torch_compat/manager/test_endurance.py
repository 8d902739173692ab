"""Many steps and many starts; nothing compiles after the first steps, nothing is left behind."""

import itertools
import os
import threading

import torch
from models import regressor, samples

from torch_compat import TPUManager


def test_100_steps_on_4_devices_compile_nothing_after_the_first():
    model, data = regressor(), samples(64)
    losses = []
    with TPUManager(model, itertools.cycle(data), nprocs=4, start=True) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        compiled = []
        for _ in range(100):
            loss, count = manager.step()
            assert count == 4
            losses.append(loss)
            compiled.append(manager.statistics.compilations)
            optimizer.step()
            optimizer.zero_grad()
            manager.update_model_parameters(model.parameters())
    assert manager.exitcode == 0
    # One for a micro-batch, one for the exchange, one for what an update of parameters brings.
    assert 2 <= sum(compiled[:2]) <= 4
    assert sum(compiled[2:]) == 0
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_all_micro_batches_run_one_graph():
    def compilations(accumulate: int) -> list[int]:
        with TPUManager(
            regressor(width=32),
            samples(64),
            nprocs=2,
            grad_accumulation_steps=accumulate,
            start=True,
        ) as manager:
            return [(manager.step(), manager.statistics.compilations)[1] for _ in range(3)]

    assert compilations(5) == compilations(1)
    assert compilations(5)[1:] == [0, 0]


def test_20_starts_and_shutdowns_leave_nothing():
    pids, before_files = [os.getpid()], set(os.listdir("/dev/shm"))
    before_threads = threading.active_count()
    open_before = len(os.listdir("/proc/self/fd"))
    data = samples(8)
    for _ in range(20):
        manager = TPUManager(regressor(width=64), itertools.cycle(data), nprocs=2, start=True)
        manager.step()
        pids.append(manager.pid)
        manager.shutdown()
        assert manager.exitcode == 0
        assert not manager.is_alive()
    new = set(os.listdir("/dev/shm")) - before_files
    # torch names its files after the process; those of other programs come and go.
    ours = [name for name in new if any(f"_{pid}_" in name for pid in pids)]
    assert not ours + [name for name in new if not name.startswith("torch_")]
    assert threading.active_count() == before_threads
    del manager
    assert len(os.listdir("/proc/self/fd")) - open_before < 40
