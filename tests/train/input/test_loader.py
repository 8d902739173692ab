"""The thread: how far ahead, errors in their turn, waiting, ends; nothing hangs or is lost."""

import contextlib
import contextvars
import itertools
import threading
import time
import traceback

import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.train.input import _loader
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
    next_of,
    plain,
    small_step,
    start,
)


def pipeline_of(batches, **options):
    step = small_step()
    return js.TrainPipeline(step, start(step), batches, **options)


def failing(count, error):
    yield from BATCHES[:count]
    raise error


# How far ahead


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_it_loads_so_many_ahead_and_no_more(depth):
    batches = Counted(BATCHES)
    with pipeline_of(batches, depth=depth) as pipeline:
        assert batches.next_index == 0  # nothing before the first call
        for used in range(1, 4):
            next(pipeline)
            wait_until(lambda used=used: batches.next_index == used + depth)
            time.sleep(0.01)
            assert batches.next_index == used + depth


def test_a_loop_takes_no_batch_too_many():
    step, batches = small_step(), iter(BATCHES)
    results = list(js.train_loop(step, start(step), batches, num_steps=4, prefetch=3))
    assert [r.step for r in results] == [1, 2, 3, 4]
    assert len(list(batches)) == 5


@pytest.mark.parametrize(("kind", "ahead"), [(list, True), (iter, False), (Counted, False)])
def test_a_loop_loads_ahead_where_nobody_can_tell(kind, ahead):
    step = small_step()
    loop = js.train_loop(step, start(step), kind(BATCHES))
    next(loop)
    assert bool(loaders()) == ahead
    loop.close()
    assert loaders() == []


# Errors


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2, 20])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_an_error_comes_in_the_turn_of_its_batch(depth, drain, count):
    pipeline = pipeline_of(failing(count, KeyError("lost")), depth=depth, drain=drain)
    losses = losses_of(itertools.islice(pipeline, count))
    with pytest.raises(KeyError, match="lost") as caught:
        next(pipeline)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert next(pipeline, None) is None  # a generator has ended then
    rest = iter(BATCHES[count:])
    while (result := next_of(pipeline, rest)) is not None:
        losses += losses_of([result])
    assert_same(losses, plain()[: len(losses)])
    assert len(losses) == (9 if drain else max(count, 9 - depth))


def test_an_iterator_that_goes_on_after_an_error_does():
    class Failing(Counted):
        def __next__(self):
            batch = super().__next__()
            if self.next_index in (2, 3):
                raise OSError(self.next_index)
            return batch

    pipeline, found = pipeline_of(Failing()), []
    for _ in range(9):
        try:
            found += losses_of([next(pipeline)])
        except OSError as error:
            found.append(error.args[0])
    assert found[1:3] == [2, 3]
    assert_same([found[0], *found[3:]], plain("virtual", (0, *range(3, 9))))


def test_a_batch_that_does_not_fit_is_told_in_its_turn():
    pipeline = pipeline_of([BATCHES[0], BATCHES[1], BATCHES[2][:3], BATCHES[3]])
    losses = losses_of([next(pipeline), next(pipeline)])
    with pytest.raises(ValueError, match="positive multiple of 2"):
        next(pipeline)
    assert pipeline.state.step.tolist() == [2, 2]
    losses += losses_of(pipeline)
    assert_same(losses, plain("virtual", (0, 1, 3)))


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
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(pipeline)


def test_arrays_that_are_filled_again_are_told():
    filled = []

    def refilling():
        batch = np.empty_like(BATCHES[0])
        for i, values in enumerate(BATCHES):
            batch[:] = values
            filled.append(i)
            yield batch

    assert_same(losses_of(pipeline_of(refilling(), depth=0)), plain())
    filled.clear()
    pipeline = pipeline_of(refilling(), depth=2)
    with contextlib.suppress(ValueError):  # the first may be changed already
        next(pipeline)
    wait_until(lambda: len(filled) == 3)
    with pytest.raises(ValueError, match="changes arrays of a batch after it has yielded it"):
        next(pipeline)
    again = pipeline_of(itertools.repeat(BATCHES[0], 9), depth=2)  # unchanged: nothing is wrong
    assert len(list(again)) == 9


# Waiting


def test_a_late_batch_is_an_error_in_time_and_comes_all_the_same():
    batches = Gated(2)
    pipeline = pipeline_of(batches, timeout=0.05)
    losses = losses_of([next_in_time(pipeline), next_in_time(pipeline)])
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"`timeout`=0\.05 s"):
            next(pipeline)
    batches.gate.set()
    while (result := next_in_time(pipeline)) is not None:
        losses += losses_of([result])
    assert_same(losses, plain())


def test_a_result_does_not_wait_for_the_batch_after_it():
    batches = Gated(1)
    pipeline = pipeline_of(batches)
    assert_same(losses_of([next(pipeline)]), plain()[:1])
    batches.gate.set()
    assert len(list(pipeline)) == 8


def test_ctrl_c_ends_the_wait_and_nothing_else():
    batches = Gated(1)
    pipeline = pipeline_of(batches)
    losses = losses_of([next(pipeline)])
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


def test_a_thread_that_is_gone_is_told(monkeypatch):
    """As in a process that was forked, which has none."""
    monkeypatch.setattr(_loader, "_load", lambda *_: None)
    monkeypatch.setattr(_loader, "_LOOK_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="thread that loads batches is gone"):
        next(pipeline_of(iter(BATCHES)))


# Threads


def test_a_generator_that_two_pipelines_share_gives_each_batch_once():
    taken = []

    def noted():
        for i, batch in enumerate(BATCHES):
            taken.append((i, threading.current_thread().name))
            time.sleep(0.002)
            yield batch

    step, shared = small_step(), noted()
    one, two = (js.TrainPipeline(step, start(step), shared) for _ in range(2))
    results = 0
    for pipeline in itertools.cycle((one, two)):
        if next(pipeline, None) is None:
            break
        results += 1
    results += len(list(one)) + len(list(two))
    assert results == 9
    assert [i for i, _ in taken] == list(range(9))
    assert {name for _, name in taken} == {"jaxslowmo-loader"}


def test_another_pipeline_does_not_wait_for_the_batch_of_the_first():
    batches = Gated(1)
    one = pipeline_of(batches)
    next(one)  # its thread waits at the gate from now on
    wait_until(lambda: batches.waiting)
    two = pipeline_of(batches)
    assert two.position == {"next_index": 1}
    batches.gate.set()
    assert len(list(one)) + len(list(two)) == 8


def test_what_holds_in_the_calling_context_holds_in_the_thread():
    where = contextvars.ContextVar("where", default="nowhere")

    def batches():
        for batch in BATCHES[:2]:
            yield {"x": batch, "where": where.get()}

    where.set("here")
    pipeline = js.TrainPipeline(lambda state, batch: (state, batch["where"]), {}, batches())
    assert [r.metrics for r in pipeline] == ["here", "here"]


def test_a_position_that_the_iterator_goes_on_to_change_is_copied():
    class Live(Counted):
        def __init__(self):
            super().__init__()
            self.state = {"next_index": 0}

        def __next__(self):
            batch = super().__next__()
            self.state["next_index"] = self.next_index
            return batch

        def get_state(self):
            return self.state

    assert [r.position["next_index"] for r in pipeline_of(Live())] == list(range(1, 10))
