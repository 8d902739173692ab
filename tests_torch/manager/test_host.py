"""The host's side: gradients, parameters, arguments, and the processes' ends."""

import itertools
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from models import PlainTorch, largest_difference, regressor, samples
from torch_compat import TPUManager, TPUSynchronizer, TPUWorkerError

DATA = samples(32)
ROOT = Path(__file__).parents[2]


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"nprocs": 1, "start": True, **kwargs})


def test_it_is_a_process():
    with manager_of(regressor(width=32)) as manager:
        assert isinstance(manager, mp.Process)
        assert manager.is_alive()
        assert isinstance(manager.pid, int)
        assert manager.pid != os.getpid()
    assert not manager.is_alive()


def test_start_later():
    manager = manager_of(regressor(width=32), start=False)
    assert manager.pid is None
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        manager.step()
    manager.start()
    manager.step()
    manager.shutdown()
    assert manager.exitcode == 0


def test_shutdown_before_start():
    manager = manager_of(regressor(width=32), start=False)
    manager.shutdown()
    with pytest.raises(TPUWorkerError, match="shut down"):
        manager.step()


def test_gradients_are_copies_unless_asked_otherwise():
    model = regressor(width=32)
    with manager_of(model) as manager:
        manager.step()
        copies = manager.get_aggregated_gradients()
        live = manager.get_aggregated_gradients(copy=False)
        kept = [g.clone() for g in copies]
        manager.step()
        assert all(torch.equal(a, b) for a, b in zip(copies, kept, strict=True))
        assert not torch.equal(live[-1], kept[-1])
        assert all(g is p.grad for g, p in zip(live, model.parameters(), strict=True))
        manager.zero_grad()
        assert not any(g.any() for g in live)


def test_zero_grad_of_an_optimizer_zeroes_and_a_replaced_gradient_counts():
    model = regressor(width=32)
    plain = PlainTorch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager_of(model) as manager:
        manager.step()
        plain.step(DATA[:1])
        optimizer.zero_grad()  # drops the gradients: set_to_none
        plain.model.zero_grad()
        manager.step()
        plain.step(DATA[1:2])
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
        model.out.weight.grad = torch.ones_like(model.out.weight)
        plain.model.out.weight.grad = torch.ones_like(model.out.weight)
        manager.step()
        plain.step(DATA[2:3])
        assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6


def test_parameters_are_copied_from_the_argument_into_the_master():
    model = regressor(width=32)
    new = [torch.full_like(p, 0.5) for p in model.parameters()]
    synchronizer = TPUSynchronizer(model)
    synchronizer.set_host_parameters(new)
    assert all((p == 0.5).all() for p in model.parameters())
    assert all((p == 0.5).all() for p in new)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda new: new[:-1], "must have the model's 13 tensors, got 12"),
        (lambda new: [*new, new[0]], "must have the model's 13 tensors, got 14"),
        (lambda new: [new[0], new[1][:-1], *new[2:]], "layers.0.weight' has shape"),
        (lambda new: [new[0].double(), *new[1:]], "'unused' has dtype torch.float32"),
        (lambda new: [new[0].to("meta"), *new[1:]], "has device cpu in the model, got meta"),
    ],
)
def test_parameters_that_do_not_fit_change_nothing(change, match: str):
    model = regressor(width=32)
    before = [p.detach().clone() for p in model.parameters()]
    new = [torch.zeros_like(p) for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        TPUSynchronizer(model).set_host_parameters(change(new))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prefetch": 0}, "`prefetch` must be an int >= 1, got 0"),
        ({"batch_size_per_device": 0}, "`batch_size_per_device` must be an int >= 1, got 0"),
        ({"grad_accumulation_steps": 1.5}, "`grad_accumulation_steps` must be an int >= 1"),
        ({"nprocs": -1}, "`nprocs` must be an int >= 1, got -1"),
        ({"nprocs": 65}, "`num_devices` must be between 1 and 64"),
        ({"nprocs": True}, "`nprocs` must be an int"),
        ({"step_timeout": 0}, "`step_timeout` is in seconds and must be > 0, got 0"),
        ({"init_timeout": -1}, "`init_timeout` is in seconds"),
        ({"seed_base": "x"}, "`seed_base` must be an int, got 'x'"),
        ({"collate_fn": 3}, "`collate_fn` must be callable, got 3"),
        ({"dataset": 3}, "`dataset` must be iterable, got int"),
        ({"model": nn.ReLU()}, "`model` has no parameters"),
        ({"model": nn.Linear(2, 2, device="meta")}, "`model` must be on the CPU; 'weight' is on"),
        ({"model": "bert"}, "`model` must be a torch.nn.Module, got str"),
    ],
)
def test_bad_arguments(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        TPUManager(**{"model": regressor(width=32), "dataset": DATA, "start": True, **arguments})


def test_start_is_required():
    with pytest.raises(TypeError, match="start"):
        TPUManager(regressor(width=32), DATA)


def test_nprocs_of_old_scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(ValueError, match=r"there are, 2 CPU devices \(CPU_NUM_DEVICES\), got 8"):
        manager_of(regressor(width=32), nprocs=8)
    with manager_of(regressor(width=32), nprocs=None) as manager:
        assert manager.step()[1] == 2
        assert manager.nprocs == 2
    monkeypatch.setenv("CPU_NUM_DEVICES", "8")
    with manager_of(regressor(width=32), nprocs=8) as manager:
        assert manager.step()[1] == 8


def test_other_threads_may_read_gradients_while_a_step_runs():
    model = regressor()
    stop, seen = threading.Event(), []

    def read(manager: TPUManager):
        while not stop.is_set():
            seen.append(manager.get_aggregated_gradients()[2].abs().sum().item())

    with manager_of(model, nprocs=2) as manager:
        reader = threading.Thread(target=read, args=(manager,))
        reader.start()
        for _ in range(20):
            manager.step()
        stop.set()
        reader.join(5)
    assert seen
    assert not reader.is_alive()


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "import torch, torch_xla\nfrom torch_compat import *\n" + code],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_parent_that_has_touched_a_device_is_told_so():
    done = run("torch_xla.device()\nTPUManager(torch.nn.Linear(2, 2), [], start=True)")
    assert done.returncode == 1
    assert "RuntimeError: This process has touched an XLA device" in done.stderr


def test_a_program_that_forgets_shutdown_ends():
    code = """
import sys, os
def data():
    while True:
        yield torch.ones(2)
class Model(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x).sum(),)
manager = TPUManager(Model(2, 2), data(), nprocs=2, start=True)
manager.step()
print("pid", manager.pid, flush=True)
"""
    begin = time.perf_counter()
    done = run(code)
    assert time.perf_counter() - begin < 30
    assert done.returncode == 0, done.stderr
    _, pid = done.stdout.split()
    assert not Path(f"/proc/{pid}").exists()


def _hold_manager(connection) -> None:
    manager = manager_of(regressor(width=32))
    manager.step()
    connection.send(manager.pid)
    time.sleep(60)


def test_the_device_process_ends_when_the_main_process_is_killed():
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold_manager, args=(theirs,))
    holder.start()
    pid = ours.recv()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    deadline = time.monotonic() + 3
    while _is_running(pid):
        assert time.monotonic() < deadline, "the device process outlived its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_managers_at_once():
    with manager_of(regressor(width=32)) as first, manager_of(regressor(width=32)) as second:
        assert first.step() == second.step()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(TPUWorkerError, match="SIGKILL"):
            first.step()
        second.step()
    assert second.exitcode == 0
