"""Processes of gloo that die, fail, or come late to an exchange: who waits says who."""

import functools
import logging
import os
import pickle
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import slowmo_here as here
import torch
import torch.distributed as dist
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned, start_gloo
from torch.distributed import distributed_c10d

from support.waiting import PATIENCE_SECONDS
from torch_compat.errors import PeerLostError
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo
from torch_compat.slowmo.backends import _waiting
from torch_compat.slowmo.backends._distributed import DistributedBackend as Backend

WIDTH = 8


def built(**options):
    net = SlowMo(Perceptron(WIDTH, 6), **{"nprocs_per_node": 1, "localsgd_frequency": 1, **options})
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def going(victim: int, how: str, options: dict):
    """What a process says of the end of another."""
    net, optimizer = built(**options)
    train_step(net, optimizer, 0, WIDTH)
    if here.rank() == victim:
        if how == "exception":
            raise ValueError("bad sample")
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        # In the exchange: its header is sent, and the values of others are on their way to it.
        Backend.permute = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    try:
        for t in range(1, 4):
            train_step(net, optimizer, t, WIDTH)
    except PeerLostError as error:
        return str(error)
    return "nothing has happened"


def result_of(path: Path):
    return pickle.loads(path.read_bytes())


def consolidated_by_process_0():
    net, optimizer = built()
    next(net.parameters()).requires_grad_(False)
    train_step(net, optimizer, 0, WIDTH)
    if here.rank():
        return None
    with pytest.raises(PeerLostError) as caught:
        net.consolidated_state_dict()
    return str(caught.value)


def without_store(address: str):
    """The store is kept by process 0, as with init_method="env://" and no launcher."""
    rank, size = here.rank(), here.world()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return going(0, "SIGKILL", {})


def gone_before_the_wrapper_is_made():
    if here.rank() == 1:
        raise ValueError("bad file")
    with pytest.raises(PeerLostError, match="Process 1 of 2 has ended"):
        train_step(*built(nprocs_per_node=2), 0, WIDTH)


# Processes, which of them end, and what each does.
ENDS = {
    "killed": (4, 2, going, 2, "SIGKILL", {}),
    "killed while values are sent": (4, 1, going, 1, "", {"slowmo_base_algorithm": "sgp"}),
    "an exception": (4, 0, going, 0, "exception", {"nprocs_per_node": 2}),
    "consolidated": (2, 1, consolidated_by_process_0),
    "before": (2, 1, gone_before_the_wrapper_is_made),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """The folders of all groups of processes, which wait for the lost ones at the same time."""
    top, processes = tmp_path_factory.mktemp("ended"), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    groups = {**ENDS, "store": (3, 0, without_store, store)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_waiting, "_ANSWER_SECONDS", 5.0)  # so many share few cores
        for name, (world, _, function, *args) in groups.items():
            (top / name).mkdir()
            processes += start_gloo(world, top / name, function, *args)
    for process in processes:
        process.join(PATIENCE_SECONDS)  # gloo itself would wait for half an hour
    assert not any(process.is_alive() for process in processes)
    return top


@pytest.mark.parametrize("name", ENDS)
def test_who_ends_is_named_by_all(name, ended):
    world, victim, function, *_ = ENDS[name]
    for rank in {*range(world)} - {victim}:
        error = ended / name / f"error{rank}"
        assert not error.exists(), error.read_text()
        message = result_of(ended / name / str(rank))
        if function is going:
            assert message.startswith(f"Process {victim} of 4 has ended"), (rank, message)
            assert "gloo" not in message
            assert "onnection closed" not in message
        if function is consolidated_by_process_0:
            assert message.startswith("Process 1 of 2 has ended, or is stuck")
            assert "Every process must call consolidated_state_dict()." in message
            assert "this process is in the exchange of consolidated_state_dict()" in message


def test_who_keeps_the_store_ends(ended):
    for rank in (1, 2):
        message = result_of(ended / "store" / str(rank))
        assert "has ended" in message
        assert "process 0 of 3" in message


def late():
    """What a process says while it waits for process 1, which waits for all others to say it."""
    said = []
    store = distributed_c10d._get_default_store()
    _waiting.NOTICE_SECONDS = 0.5
    handler = logging.Handler()

    def emit(record):
        said.append(record.getMessage())
        # Not when the third process is late, too.
        if "for process 1 of 3" in said[-1]:
            store.set(f"said/{here.rank()}", "")

    handler.emit = emit
    logging.getLogger("torch_compat.slowmo").addHandler(handler)
    net, optimizer = built()
    train_step(net, optimizer, 0, WIDTH)
    if here.rank() == 1:
        store.wait(["said/0", "said/2"], timedelta(seconds=PATIENCE_SECONDS))
    train_step(net, optimizer, 1, WIDTH)
    return said, values(net.module)["w1"].tolist()


def test_who_is_late_is_waited_for_and_named():
    results = spawned(3, late)
    assert len({str(parameters) for _, parameters in results}) == 1
    for rank, (said, _) in enumerate(results):
        if rank == 1:
            assert said == []
        else:
            assert said, rank
            assert f"process {rank} has waited" in said[-1]
            assert "for process 1 of 3 to exchange" in said[-1]
            assert "such as torch.distributed.barrier(), after its data has ended" in said[-1]


def out_of_time():
    """The time limit of the group ends the wait for a process that never comes."""
    store = distributed_c10d._get_default_store()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    net, optimizer = built(global_group=group)
    train_step(net, optimizer, 0, WIDTH)
    if here.rank() == 1:
        store.wait(["given up"], timedelta(seconds=PATIENCE_SECONDS))
        return None
    with pytest.raises(PeerLostError) as caught:
        train_step(net, optimizer, 1, WIDTH)
    store.set("given up", "")
    return str(caught.value)


def test_the_time_limit_of_the_group_holds():
    message, _ = spawned(2, out_of_time)
    assert message.startswith("Process 1 of 2 has not come to the average of parameters")
    assert "(440 bytes, after 1 call of perform_slowmo() in 1 step)" in message
    assert "1 s (`timeout` of init_process_group)" in message


def tensors_in_use_after_collectives():
    """How often gloo's threads still had a tensor of a collective that was over."""
    waiting, count = _waiting.Waiting.for_group(dist.group.WORLD), 0
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for _ in range(200):
        part, whole = torch.ones(2), torch.empty(4)
        before = part._use_count(), whole._use_count()
        waiting.until_done(functools.partial(gather, whole, part, async_op=True), whole, part)
        count += (part._use_count(), whole._use_count()) != before
    return count


def test_gloo_has_let_go_of_tensors_when_an_exchange_is_over():
    """An interpreter that ended with one in gloo's threads was aborted, in one of ten runs."""
    assert spawned(2, tensors_in_use_after_collectives) == [0, 0]
