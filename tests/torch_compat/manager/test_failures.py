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
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from models import TRACED_ONCE, PlainTorch, Regressor, Sample, largest_difference, samples

from support.waiting import PATIENCE_SECONDS, wait_until
from torch_compat import TPUManager, TPUWorkerError

DATA = samples(16)
# What waits for this ends too late.
FOR_EVER_SECONDS = 2 * PATIENCE_SECONDS
# Calls of a model's Python code that come before the one that goes wrong.
BEFORE = 0 if TRACED_ONCE else 1
IN_A_STEP, GATE = mp.get_context("fork").Event(), mp.get_context("fork").Event()


class Breaks(Regressor):
    """Calls `trouble` in the forward pass on one device that comes after `before` others."""

    def __init__(self, trouble: Callable[[torch.Tensor], object] = lambda loss: loss):
        super().__init__(width=64)
        self.trouble, self.calls = trouble, [0]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls[0] += 1  # no number: of these a program has one value
        loss = super().forward(x, y)["loss"]
        return {"loss": self.trouble(loss) if self.calls[0] == BEFORE + 1 else loss}


def of(model: Regressor, data=None, *, nprocs: int = 2, steps: int = BEFORE, **kw) -> TPUManager:
    """A manager after the steps that come before a failure."""
    data = itertools.cycle(DATA) if data is None else data
    manager = TPUManager(model, data, nprocs=nprocs, start=True, **kw)
    for _ in range(steps):
        manager.step()
    return manager


def check_failure(
    manager: TPUManager,
    match: str,
    exitcode: int = 0,
    during: AbstractContextManager = nullcontext(),  # noqa: B008
) -> TPUWorkerError:
    """A step fails and waits for nothing that takes for ever; so do later calls; all ends."""
    begin = time.perf_counter()
    with during, pytest.raises(TPUWorkerError, match=match) as first:
        manager.step()
    with pytest.raises(TPUWorkerError) as again:
        manager.step()
    assert again.value is first.value
    with pytest.raises(TPUWorkerError):
        manager.update_model_parameters(manager._synchronizer.master_model.parameters())
    assert time.perf_counter() - begin < PATIENCE_SECONDS
    manager.shutdown()
    assert not manager.is_alive()
    assert manager.exitcode == exitcode
    wait_until(lambda: not manager._data_manager.is_loading())
    manager.get_aggregated_gradients()  # what has been added up is still there
    return first.value


class ListError(Exception):
    pass


class UnspeakableError(Exception):
    def __repr__(self):
        raise RuntimeError("no words")

    __str__ = __repr__


def broken_after(count: int) -> Iterator[Sample]:
    yield from DATA[:count]
    raise UnspeakableError


# Datasets, what is said of them, and the function in the traceback.
ENDS = {
    "it fails": (lambda: broken_after(5), "failed at sample 5: UnspeakableError", "broken_after"),
    "a sample cannot be sent": (
        lambda: [*DATA[:4], {"x": threading.Lock(), "y": DATA[0]["y"]}],
        *("failed at sample 4: TypeError", "dumps"),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_dataset_that_gives_no_more(case):
    data, match, function = ENDS[case]
    # Steps of two samples: the failure of a later one is not theirs.
    error = check_failure(of(Breaks(), data(), steps=2), match)
    assert function is None or function in error.worker_traceback


def test_one_of_four_devices_fails_while_the_others_wait():
    def collate(batch: list[Sample]) -> Sample:
        if torch.equal(batch[0]["x"], DATA[6]["x"]):
            raise ListError("ragged")
        return torch.utils.data.default_collate(batch)

    manager = of(Breaks(), nprocs=4, collate_fn=collate, steps=1)
    error = check_failure(manager, r"Device 2 of 4 failed: ListError\('ragged'\)")
    assert "in collate" in error.worker_traceback


def _raise(loss: torch.Tensor) -> torch.Tensor:
    raise ListError("nan")


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise ListError("no derivative")


TROUBLES = {
    "forward": (_raise, r"ListError\('nan'\)", 1),
    "backward": (lambda loss: _BadBackward.apply(loss), r"ListError\('no derivative'\)", 2),
    "no loss": (lambda loss: None, "its loss.* got None in a dict", 2),
}


@pytest.mark.parametrize("case", TROUBLES)
def test_the_model_fails(case):
    trouble, match, nprocs = TROUBLES[case]
    error = check_failure(of(Breaks(trouble), nprocs=nprocs), match)
    assert error.exitcode is None
    assert "torch_compat" in error.worker_traceback


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


def test_the_device_process_is_killed_inside_a_step():
    manager = of(Breaks(_sleep))
    kill = inside_a_step(lambda: os.kill(manager.pid, signal.SIGKILL))
    check_failure(manager, "SIGKILL", -signal.SIGKILL, during=kill)


def test_a_step_takes_too_long():
    manager = of(Breaks(_sleep))
    manager._exchange.wait_until_ready(None)
    manager.step_timeout = 0.5
    check_failure(manager, "within `step_timeout` = 0.5 s", -signal.SIGKILL)


class Slow(Breaks):
    def __deepcopy__(self, memo):
        time.sleep(FOR_EVER_SECONDS)


def test_the_devices_take_too_long_to_start():
    manager = of(Slow(), init_timeout=0.5, steps=0)
    check_failure(manager, "within `init_timeout` = 0.5 s", -signal.SIGKILL)


def test_shutdown_in_the_middle_of_a_dataset_that_waits():
    over = threading.Event()

    def endless() -> Iterator[Sample]:
        yield from DATA[:2]
        over.wait(FOR_EVER_SECONDS)

    manager = of(Breaks(), endless(), steps=1)
    manager.shutdown()
    assert manager._data_manager.is_loading()  # it was not waited for
    over.set()
    assert manager.exitcode == 0
    with pytest.raises(TPUWorkerError, match="has been shut down"):
        manager.step()
    manager.shutdown()


def test_ctrl_c_in_a_step_loses_neither_the_manager_nor_the_order_of_answers():
    GATE.clear()

    def pause(loss: torch.Tensor) -> torch.Tensor:
        IN_A_STEP.set()
        GATE.wait(PATIENCE_SECONDS)
        return loss

    def interrupt() -> None:
        """It reaches the main thread where that waits, not at some later line of its."""
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    model = Breaks(pause)
    plain = PlainTorch(Regressor(width=64))
    plain.model.load_state_dict(model.state_dict())
    manager = of(model, nprocs=1)
    # A shell that starts this in the background has it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with inside_a_step(interrupt), pytest.raises(KeyboardInterrupt):
            manager.step()
    finally:
        signal.signal(signal.SIGINT, before)
    GATE.set()
    manager.zero_grad()  # waits for the interrupted step, whose gradient would come after it
    loss, _ = manager.step()
    assert math.isclose(loss, plain.step(DATA[BEFORE + 1 : BEFORE + 2]), abs_tol=1e-6)
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) < 1e-6
    manager.shutdown()
    assert manager.exitcode == 0
