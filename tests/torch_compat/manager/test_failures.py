"""Whatever fails, `step` says so at once, again and again, and `shutdown` ends it all."""

import itertools
import math
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from models import (
    TRACED_ONCE,
    PlainTorch,
    Regressor,
    Sample,
    largest_difference,
    regressor,
    samples,
)

from support.waiting import PATIENCE_SECONDS, wait_until
from torch_compat import TPUManager, TPUWorkerError
from torch_compat.manager import _manager

DATA = samples(16)


# What waits for this ends too late.
FOR_EVER_SECONDS = 2 * PATIENCE_SECONDS


@contextmanager
def fails_at_once(match: str | None) -> Iterator[pytest.ExceptionInfo]:
    """Expect a failure that waits for nothing that takes for ever, however slow the machine is."""
    begin = time.perf_counter()
    with pytest.raises(TPUWorkerError, match=match) as caught:
        yield caught
    assert time.perf_counter() - begin < PATIENCE_SECONDS


def check_end(manager: TPUManager, first: TPUWorkerError, exitcode: int = 0):
    """Later calls raise the same; the end is complete."""
    with fails_at_once(None) as caught:
        manager.step()
    assert caught.value is first
    with pytest.raises(TPUWorkerError):
        manager.update_model_parameters(manager._synchronizer.master_model.parameters())
    manager.shutdown()
    assert not manager.is_alive()
    assert manager.exitcode == exitcode
    wait_until(lambda: not manager._data_manager.is_loading())
    manager.get_aggregated_gradients()  # what has been added up is still there


# Calls of a model's Python code that come before the one that goes wrong.
BEFORE = 0 if TRACED_ONCE else 1


class Breaks(Regressor):
    """Calls `trouble` in the forward pass on one device that comes after `before` others."""

    def __init__(self, trouble: Callable[[torch.Tensor], torch.Tensor], before: int = BEFORE):
        super().__init__(width=64)
        self.trouble, self.after, self.calls = trouble, before + 1, [0]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls[0] += 1  # no number: of these a program has one value
        loss = super().forward(x, y)["loss"]
        return {"loss": self.trouble(loss) if self.calls[0] == self.after else loss}


def take_the_steps_before(manager: TPUManager) -> None:
    for _ in range(BEFORE):
        manager.step()
    manager._exchange.wait_until_ready(None)


def of(model: Regressor, data=None, **kwargs) -> TPUManager:
    data = itertools.cycle(DATA) if data is None else data
    return TPUManager(model, data, **{"nprocs": 2, "start": True, **kwargs})


IN_A_STEP, GATE = mp.get_context("fork").Event(), mp.get_context("fork").Event()


def _sleep(loss: torch.Tensor) -> torch.Tensor:
    IN_A_STEP.set()
    time.sleep(FOR_EVER_SECONDS)
    return loss


@contextmanager
def inside_a_step(function: Callable[[], object]) -> Iterator[None]:
    """Call `function` in a thread when the model is in its forward pass and this thread waits."""
    waiter = threading.get_ident()

    def call() -> None:
        assert IN_A_STEP.wait(PATIENCE_SECONDS)
        # A thread that waits for the device process is in a call of `select`, not between two.
        wait_until(lambda: sys._current_frames()[waiter].f_code.co_name == "select")
        function()

    IN_A_STEP.clear()
    thread = threading.Thread(target=call)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


class ListError(Exception):
    pass


def broken_after(count: int) -> Iterator[Sample]:
    yield from DATA[:count]
    raise ListError("the disk is on fire")


def test_the_dataset_fails():
    manager = of(regressor(width=64), broken_after(5))
    manager.step()
    manager.step()  # samples 2 and 3: the failure at sample 5 is not theirs
    with fails_at_once("The dataset failed at sample 5: ListError") as caught:
        manager.step()
    assert "the disk is on fire" in caught.value.worker_traceback
    assert "broken_after" in caught.value.worker_traceback
    check_end(manager, caught.value)


def test_the_dataset_ends():
    manager = of(regressor(width=64), DATA[:7])
    for _ in range(3):
        manager.step()
    with fails_at_once("The dataset ended after 7 samples") as caught:
        manager.step()
    check_end(manager, caught.value)


class UnspeakableError(Exception):
    def __repr__(self):
        raise RuntimeError("no words")

    __str__ = __repr__


def _unspeakable(loss: torch.Tensor) -> torch.Tensor:
    raise UnspeakableError


def test_an_error_that_cannot_be_shown():
    def data() -> Iterator[Sample]:
        yield from DATA[:2]
        raise UnspeakableError

    manager = of(regressor(width=64), data())
    manager.step()
    with fails_at_once("The dataset failed at sample 2: UnspeakableError") as caught:
        manager.step()
    check_end(manager, caught.value)
    manager = of(Breaks(_unspeakable))
    take_the_steps_before(manager)
    with fails_at_once("failed: UnspeakableError") as caught:
        manager.step()
    check_end(manager, caught.value)


def test_a_sample_cannot_be_sent():
    manager = of(regressor(width=64), [*DATA[:2], {"x": threading.Lock(), "y": DATA[0]["y"]}])
    manager.step()
    with fails_at_once("The dataset failed at sample 2: TypeError") as caught:
        manager.step()
    check_end(manager, caught.value)


def test_the_collate_function_fails():
    def collate(batch: list[Sample]) -> Sample:
        if batch[0] is not None and torch.equal(batch[0]["x"], DATA[3]["x"]):
            raise ListError("ragged")
        return torch.utils.data.default_collate(batch)

    manager = of(regressor(width=64), collate_fn=collate)
    manager.step()
    with fails_at_once(r"Device 1 of 2 failed: ListError\('ragged'\)") as caught:
        manager.step()
    assert "in collate" in caught.value.worker_traceback
    check_end(manager, caught.value)


def test_a_batch_that_does_not_fit_the_model():
    manager = of(regressor(width=64), samples(8, features=65))
    with pytest.raises(TPUWorkerError, match=r"of 2 .*failed: \w+Error") as caught:
        manager.step()
    assert "torch_compat" in caught.value.worker_traceback
    check_end(manager, caught.value)


def _raise(loss: torch.Tensor) -> torch.Tensor:
    raise ListError("nan")


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise ListError("no derivative")


# A derivative of one's own is jax's to take there, and refused.
BAD_BACKWARD = "_BadBackward" if TRACED_ONCE else r"ListError\('no derivative'\)"


@pytest.mark.parametrize(
    ("trouble", "match"),
    [
        (_raise, r"ListError\('nan'\)"),
        (lambda loss: _BadBackward.apply(loss), BAD_BACKWARD),
        (lambda loss: None, "must return its loss.* got None in a dict"),
        (lambda loss: loss.expand(3), r"one element.* got shape \(3,\) in a dict"),
    ],
    ids=["forward", "backward", "no loss", "loss"],
)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_model_fails(trouble, match: str, nprocs: int):
    manager = of(Breaks(trouble), nprocs=nprocs)
    take_the_steps_before(manager)
    with fails_at_once(match) as caught:
        manager.step()
    assert caught.value.exitcode is None
    check_end(manager, caught.value)


def test_one_of_four_devices_fails_while_the_others_wait():
    def collate(batch: list[Sample]) -> Sample:
        if torch.equal(batch[0]["x"], DATA[6]["x"]):
            raise ListError("only me")
        return torch.utils.data.default_collate(batch)

    manager = of(regressor(), nprocs=4, collate_fn=collate)
    manager.step()
    with fails_at_once("Device 2 of 4 failed") as caught:
        manager.step()
    check_end(manager, caught.value)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_device_process_is_killed_between_steps(signum: signal.Signals):
    manager = of(regressor(width=64))
    manager.step()
    os.kill(manager.pid, signum)
    with fails_at_once(signum.name) as caught:
        manager.step()
    assert caught.value.exitcode == -signum
    check_end(manager, caught.value, exitcode=-signum)


def test_the_device_process_is_killed_inside_a_step():
    manager = of(Breaks(_sleep))
    take_the_steps_before(manager)
    with (
        inside_a_step(lambda: os.kill(manager.pid, signal.SIGKILL)),
        fails_at_once("SIGKILL") as caught,
    ):
        manager.step()
    check_end(manager, caught.value, exitcode=-signal.SIGKILL)


def test_the_runtime_aborts():
    manager = of(Breaks(lambda loss: os.abort()))
    take_the_steps_before(manager)
    with fails_at_once("SIGABRT") as caught:
        manager.step()
    assert caught.value.exitcode == -signal.SIGABRT
    check_end(manager, caught.value, exitcode=-signal.SIGABRT)


def test_a_step_takes_too_long():
    manager = of(Breaks(_sleep))
    take_the_steps_before(manager)
    manager.step_timeout = 0.5
    with fails_at_once("within `step_timeout` = 0.5 s") as caught:
        manager.step()
    check_end(manager, caught.value, exitcode=-signal.SIGKILL)


def test_the_devices_take_too_long_to_start():
    class Slow(Regressor):
        def __deepcopy__(self, memo):
            time.sleep(FOR_EVER_SECONDS)

    manager = of(Slow(width=64), init_timeout=0.5)
    with fails_at_once("within `init_timeout` = 0.5 s") as caught:
        manager.step()
    check_end(manager, caught.value, exitcode=-signal.SIGKILL)


def test_a_replica_cannot_be_made():
    class Uncopyable(Regressor):
        def __deepcopy__(self, memo):
            raise ListError("I am unique")

    manager = of(Uncopyable(width=64))
    with pytest.raises(TPUWorkerError, match="I am unique") as caught:
        manager.step()
    check_end(manager, caught.value)


def test_shutdown_in_the_middle_of_a_dataset_that_waits():
    over = threading.Event()

    def endless() -> Iterator[Sample]:
        yield from DATA[:2]
        over.wait(FOR_EVER_SECONDS)

    manager = of(regressor(width=64), endless())
    manager.step()
    manager.shutdown()
    assert manager._data_manager.is_loading()  # it was not waited for
    over.set()
    assert manager.exitcode == 0
    with pytest.raises(TPUWorkerError, match="has been shut down"):
        manager.step()
    manager.shutdown()


def test_shutdown_waits_for_less_than_two_seconds_in_all(monkeypatch, patient_shutdown):
    # What it asks for, not what the clock says: a process that never ends is waited for as long
    # on any machine.
    monkeypatch.setattr(_manager, "_END_SECONDS", patient_shutdown)
    manager, waits = of(regressor(width=64)), []
    manager.step()
    monkeypatch.setattr(manager, "join", waits.append)
    monkeypatch.setattr(manager, "is_alive", lambda: True)
    monkeypatch.setattr(manager._data_manager._loader, "join", waits.append)
    idle = manager._exchange.idle
    monkeypatch.setattr(
        manager._exchange, "idle", lambda timeout: (waits.append(timeout), idle(timeout))[1]
    )
    manager.shutdown()
    monkeypatch.undo()
    manager.join()
    assert len(waits) == 5  # for its turn, after each of three ways to end it, for the loader
    assert sum(waits) < 2


def interrupt():
    """Ctrl-C: it reaches the main thread where that waits, not at some later line of its."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_in_a_step_loses_neither_the_manager_nor_the_order_of_answers():
    GATE.clear()

    def pause(loss: torch.Tensor) -> torch.Tensor:
        IN_A_STEP.set()
        GATE.wait(PATIENCE_SECONDS)
        return loss

    model = Breaks(pause)
    plain = PlainTorch(regressor(width=64))
    plain.model.load_state_dict(model.state_dict())
    manager = of(model, nprocs=1)
    take_the_steps_before(manager)
    with inside_a_step(interrupt), pytest.raises(KeyboardInterrupt):
        manager.step()
    GATE.set()
    manager.zero_grad()  # waits for the interrupted step, whose gradient would come after it
    loss, _ = manager.step()
    assert math.isclose(loss, plain.step(DATA[BEFORE + 1 : BEFORE + 2]), abs_tol=1e-6)
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
    manager.shutdown()
    assert manager.exitcode == 0


def test_shutdown_from_another_thread_while_a_step_runs():
    manager = of(Breaks(_sleep))
    take_the_steps_before(manager)
    with inside_a_step(manager.shutdown), fails_at_once("has been shut down"):
        manager.step()
    assert not manager.is_alive()
