"""What a wrapper or a process group leaves behind when it ends: nothing."""

import gc
import os
import threading

import slowmo_here as here
import torch
import torch.distributed as dist
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

OPTIONS = {"slowmo_frequency": 2, "localsgd_frequency": 1}


def open_now() -> tuple[int, int]:
    """Open files, and threads of any kind, of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def alike() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(module: torch.nn.Module, nprocs_per_node: int) -> None:
    net = SlowMo(module, nprocs_per_node, **OPTIONS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        net.perform_slowmo(optimizer)


def with_many_wrappers(nprocs_per_node: int):
    gc.freeze()  # what is older than this process
    module = alike()
    seen, groups = [], []
    for _ in range(4):
        train(module, nprocs_per_node)
        seen.append(open_now())
        groups.append(len(dist.distributed_c10d._world.pg_map))
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    dist.barrier()
    return seen, groups, hooks


def with_many_groups(folder: str):
    """The process group is made anew each time, as in tests and notebooks."""
    rank, world, seen = here.rank(), here.world(), []
    for number in range(3):
        train(alike(), 2)
        dist.barrier()
        dist.destroy_process_group()
        seen.append(open_now())
        address = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        dist.barrier()  # all are connected
    assert threading.active_count() == 1
    return seen


def with_many_of_both(folder: str):
    return [with_many_wrappers(size) for size in (1, 2)], with_many_groups(folder)


def test_wrappers_and_groups_leave_nothing_behind(tmp_path):
    for wrappers, of_groups in spawned(4, with_many_of_both, str(tmp_path)):
        for seen, groups, hooks in wrappers:
            assert seen[1:] == [seen[1]] * (len(seen) - 1), "files and threads"
            assert groups == [1] * len(groups)
            assert hooks == [0, 0]
        assert of_groups[1:] == [of_groups[1]] * (len(of_groups) - 1), of_groups
