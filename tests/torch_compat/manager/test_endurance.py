"""Many starts leave nothing behind."""

import itertools
import os
import threading

from models import regressor, samples

from torch_compat import TPUManager


def test_starts_and_shutdowns_leave_nothing():
    pids, before_files = [os.getpid()], set(os.listdir("/dev/shm"))
    before_threads = threading.active_count()
    counts, data = [], samples(8)
    for _ in range(3):
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
    assert counts[-1] - counts[0] <= 2, counts
