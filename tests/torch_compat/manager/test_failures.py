"""Whatever fails, `step` says so within a second, again and again, and `shutdown` ends it all."""

import itertools
import math
import os
import signal
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
from torch_compat import TPUManager, TPUWorkerError

DATA = samples(16)


@contextmanager
def fails_within(seconds: float, match: str | None) -> Iterator[pytest.ExceptionInfo]:
    begin = time.perf_counter()
    with pytest.raises(TPUWorkerError, match=match) as caught:
        yield caught
    assert time.perf_counter() - begin < seconds


def check_end(manager: TPUManager, first: TPUWorkerError, exitcode: int = 0):
    """Later calls raise the same; the end is quick and complete."""
    with fails_within(0.1, None) as caught:
        manager.step()
    assert caught.value is first
    with pytest.raises(TPUWorkerError):
        manager.update_model_parameters(manager._synchronizer.master_model.parameters())
    begin = time.perf_counter()
    manager.shutdown()
    assert time.perf_counter() - begin < 2
    assert not manager.is_alive()
    assert manager.exitcode == exitcode
    assert not manager._data_manager.is_loading()
    manager.get_aggregated_gradients()  # what has been added up is still there


# Calls of a model's Python code that come before the one that goes wrong.
BEFORE = 0 if TRACED_ONCE else 1


class Breaks(Regressor):
    """Calls `trouble` in the forward pass on one device that comes after `before` others."""

    def __init__(self, trouble: Callable[[torch.Tensor], torch.Tensor], before: int = BEFORE):
        super().__init__(width=64)
        self.trouble, self.after, self.calls = trouble, before + 1, 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        loss = super().forward(x, y)["loss"]
        return {"loss": self.trouble(loss) if self.calls == self.after else loss}


def take_the_steps_before(manager: TPUManager) -> None:
    for _ in range(BEFORE):
        manager.step()
    manager._exchange.wait_until_ready(None)


def of(model: Regressor, data=None, **kwargs) -> TPUManager:
    data = itertools.cycle(DATA) if data is None else data
    return TPUManager(model, data, **{"nprocs": 2, "start": True, **kwargs})


class ListError(Exception):
    pass


def broken_after(count: int) -> Iterator[Sample]:
    yield from DATA[:count]
    raise ListError("the disk is on fire")


def test_the_dataset_fails():
    manager = of(regressor(width=64), broken_after(5))
    manager.step()
    manager.step()  # samples 2 and 3: the failure at sample 5 is not theirs
    with fails_within(1, "The dataset failed at sample 5: ListError") as caught:
        manager.step()
    assert "the disk is on fire" in caught.value.worker_traceback
    assert "broken_after" in caught.value.worker_traceback
    check_end(manager, caught.value)


def test_the_dataset_ends():
    manager = of(regressor(width=64), DATA[:7])
    for _ in range(3):
        manager.step()
    with fails_within(1, "The dataset ended after 7 samples") as caught:
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
    with fails_within(1, "The dataset failed at sample 2: UnspeakableError") as caught:
        manager.step()
    check_end(manager, caught.value)
    manager = of(Breaks(_unspeakable))
    take_the_steps_before(manager)
    with fails_within(1, "failed: UnspeakableError") as caught:
        manager.step()
    check_end(manager, caught.value)


def test_a_sample_cannot_be_sent():
    manager = of(regressor(width=64), [*DATA[:2], {"x": threading.Lock(), "y": DATA[0]["y"]}])
    manager.step()
    with fails_within(1, "The dataset failed at sample 2: TypeError") as caught:
        manager.step()
    check_end(manager, caught.value)


def test_the_collate_function_fails():
    def collate(batch: list[Sample]) -> Sample:
        if batch[0] is not None and torch.equal(batch[0]["x"], DATA[3]["x"]):
            raise ListError("ragged")
        return torch.utils.data.default_collate(batch)

    manager = of(regressor(width=64), collate_fn=collate)
    manager.step()
    with fails_within(1, r"Device 1 of 2 failed: ListError\('ragged'\)") as caught:
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
    with fails_within(1, match) as caught:
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
    with fails_within(1, "Device 2 of 4 failed") as caught:
        manager.step()
    check_end(manager, caught.value)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_device_process_is_killed_between_steps(signum: signal.Signals):
    manager = of(regressor(width=64))
    manager.step()
    os.kill(manager.pid, signum)
    with fails_within(1, signum.name) as caught:
        manager.step()
    assert caught.value.exitcode == -signum
    check_end(manager, caught.value, exitcode=-signum)


def test_the_device_process_is_killed_inside_a_step():
    def wait_long(loss: torch.Tensor) -> torch.Tensor:
        time.sleep(60)
        return loss

    manager = of(Breaks(wait_long))
    take_the_steps_before(manager)
    killer = threading.Timer(0.3, lambda: os.kill(manager.pid, signal.SIGKILL))
    killer.start()
    with fails_within(1.3, "SIGKILL") as caught:
        manager.step()
    killer.join()
    check_end(manager, caught.value, exitcode=-signal.SIGKILL)


def test_the_runtime_aborts():
    manager = of(Breaks(lambda loss: os.abort()))
    take_the_steps_before(manager)
    with fails_within(1, "SIGABRT") as caught:
        manager.step()
    assert caught.value.exitcode == -signal.SIGABRT
    check_end(manager, caught.value, exitcode=-signal.SIGABRT)


def _sleep(loss: torch.Tensor) -> torch.Tensor:
    time.sleep(60)
    return loss


def test_a_step_takes_too_long():
    manager = of(Breaks(_sleep), step_timeout=20.0)
    take_the_steps_before(manager)
    manager.step_timeout = 0.5
    with fails_within(1.5, "within `step_timeout` = 0.5 s") as caught:
        manager.step()
    check_end(manager, caught.value, exitcode=-signal.SIGKILL)


def test_the_devices_take_too_long_to_start():
    class Slow(Regressor):
        def __deepcopy__(self, memo):
            time.sleep(60)

    manager = of(Slow(width=64), init_timeout=0.5)
    with fails_within(1.5, "within `init_timeout` = 0.5 s") as caught:
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
    def endless() -> Iterator[Sample]:
        yield from DATA[:2]
        time.sleep(5)

    manager = of(regressor(width=64), endless())
    manager.step()
    begin = time.perf_counter()
    manager.shutdown()
    assert time.perf_counter() - begin < 2
    assert manager.exitcode == 0
    with pytest.raises(TPUWorkerError, match="has been shut down"):
        manager.step()
    manager.shutdown()


def interrupt():
    """Ctrl-C: it reaches the main thread where that waits, not at some later line of its."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_in_a_step_loses_neither_the_manager_nor_the_order_of_answers():
    def pause(loss: torch.Tensor) -> torch.Tensor:
        time.sleep(1)
        return loss

    model = Breaks(pause)
    plain = PlainTorch(regressor(width=64))
    plain.model.load_state_dict(model.state_dict())
    manager = of(model, nprocs=1)
    take_the_steps_before(manager)
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        manager.step()
    timer.join()
    manager.zero_grad()  # waits for the interrupted step, whose gradient would come after it
    loss, _ = manager.step()
    assert math.isclose(loss, plain.step(DATA[BEFORE + 1 : BEFORE + 2]), abs_tol=1e-6)
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
    manager.shutdown()
    assert manager.exitcode == 0


def test_shutdown_from_another_thread_while_a_step_runs():
    manager = of(Breaks(_sleep))
    take_the_steps_before(manager)
    stopper = threading.Timer(0.3, manager.shutdown)
    stopper.start()
    with fails_within(2.3, "has been shut down"):
        manager.step()
    stopper.join()
    assert not manager.is_alive()
