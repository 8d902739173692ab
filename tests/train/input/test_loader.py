"""The thread: how far ahead, errors in their turn, waiting, ends; nothing hangs or is lost."""

import itertools
import time
import traceback

import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.train import _loader
from support.waiting import wait_until
from train.input.small import (
    BATCHES,
    Counted,
    Gated,
    assert_same,
    ctrl_c,
    loaders,
    losses_of,
    next_in_time,
    pipeline_of,
    plain,
    rest_of,
    small_step,
    start,
)


@pytest.mark.parametrize("depth", [0, 3])
def test_it_loads_so_many_ahead_and_no_more(depth):
    batches = Counted(BATCHES)
    with pipeline_of(batches, depth=depth) as pipeline:
        assert batches.next_index == 0  # nothing before the first call
        for used in range(1, 4):
            next(pipeline)
            wait_until(lambda used=used: batches.next_index == used + depth)
            time.sleep(0.01)
            assert batches.next_index == used + depth


@pytest.mark.parametrize(("kind", "ahead"), [(list, True), (iter, False), (Counted, False)])
def test_a_loop_loads_ahead_where_nobody_can_tell(kind, ahead):
    loop = js.train_loop(small_step(), start(small_step()), kind(BATCHES))
    next(loop)
    assert bool(loaders()) == ahead
    loop.close()
    assert loaders() == []
    batches = iter(BATCHES)
    list(js.train_loop(small_step(), start(small_step()), batches, num_steps=4, prefetch=3))
    assert len(list(batches)) == 5


@pytest.mark.parametrize(("depth", "count", "drain"), [(0, 1, True), (2, 4, False), (20, 4, True)])
def test_an_error_comes_in_the_turn_of_its_batch(depth, count, drain):
    def failing():
        yield from BATCHES[:count]
        raise KeyError("lost")

    pipeline = pipeline_of(failing(), depth=depth, drain=drain)
    losses = losses_of(itertools.islice(pipeline, count))
    with pytest.raises(KeyError, match="lost") as caught:
        next(pipeline)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert next(pipeline, None) is None  # a generator has ended then
    losses += losses_of(rest_of(pipeline, iter(BATCHES[count:])))
    assert_same(losses, plain()[: len(losses)])
    assert len(losses) == (9 if drain else max(count, 9 - depth))


@pytest.mark.parametrize("where", ["stage", "step", "get_state"])
def test_a_stop_iteration_is_no_end(where):
    """In a loop it would look like one."""

    def stop(*_):
        raise StopIteration

    batches = Counted()
    if where == "get_state":
        batches.get_state = lambda: stop() if batches.next_index else None
    step = stop if where == "step" else small_step()
    stages = [stop] if where == "stage" else None
    pipeline = js.TrainPipeline(step, start(small_step()), batches, stages=stages)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(pipeline)


@pytest.mark.parametrize("depth", [0, 3])
def test_arrays_that_are_filled_again(depth):
    """Batches that are loaded ahead are copies of what was filled, and the results those of all."""
    filled = []

    def refilling():
        batch = np.empty_like(BATCHES[0])
        for i, values in enumerate(BATCHES):
            batch[:] = values
            filled.append(i)
            yield batch

    pipeline = pipeline_of(refilling(), depth=depth)
    losses = losses_of([next(pipeline)])
    wait_until(lambda: len(filled) == 1 + depth)
    assert_same(losses + losses_of(pipeline), plain())


def test_a_late_batch_is_an_error_in_time_and_comes_all_the_same():
    batches = Gated(2)
    pipeline = pipeline_of(batches, timeout=0.05)
    losses = losses_of([next_in_time(pipeline), next_in_time(pipeline)])
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"`timeout`=0\.05"):
            next(pipeline)
    batches.gate.set()
    losses += losses_of(iter(lambda: next_in_time(pipeline), None))
    assert_same(losses, plain())


def test_ctrl_c_ends_the_wait_and_nothing_else():
    """A result does not wait for the batch after it, of which another pipeline knows nothing."""
    batches = Gated(1)
    pipeline = pipeline_of(batches)
    losses = losses_of([next(pipeline)])
    wait_until(lambda: batches.waiting)  # its thread, at the gate
    assert pipeline_of(batches).position == {"next_index": 1}
    with ctrl_c(), pytest.raises(KeyboardInterrupt):
        next(pipeline)
    batches.gate.set()
    assert_same(losses + losses_of(pipeline), plain())


def test_the_end_does_not_wait_for_a_batch_for_ever(monkeypatch):
    monkeypatch.setattr(_loader, "ENDING_SECONDS", 0.05)
    batches = Gated(1)
    with pipeline_of(batches) as pipeline:
        next(pipeline)
    assert len(loaders()) == 1
    batches.gate.set()
    wait_until(lambda: loaders() == [])


def test_an_error_in_a_hook_ends_the_thread():
    def fail(result):
        raise OSError("full")

    fail.every, step = 2, small_step()
    loop = js.train_loop(step, start(step), itertools.cycle(BATCHES), hooks=[fail], prefetch=2)
    with pytest.raises(OSError, match="full"):
        list(loop)
    assert loaders() == []
