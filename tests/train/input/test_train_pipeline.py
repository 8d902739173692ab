"""A pipeline on one batch per update: what it holds, stages, hands on and reports.

`test_accumulate.py` has the property that any pipeline is the calls it stands for.
"""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from train.input.small import (
    BATCHES,
    Counted,
    assert_same,
    loaders,
    losses_of,
    pipeline_of,
    plain,
    rest_of,
    small_step,
    start,
)
from train.small_loop import Note


def test_another_iterator_comes_after_what_is_held():
    pipeline, first, second = pipeline_of(depth=3), Counted(BATCHES[:6]), iter(BATCHES[6:])
    losses = losses_of([pipeline.progress(first), pipeline.progress(first)])
    losses += losses_of(rest_of(pipeline, second))
    # What had been loaded of the first by then is trained, in its order, and the rest is left.
    taken = first.next_index
    assert 3 <= taken <= 5
    assert_same(losses, plain((*range(taken), 6, 7, 8)))
    epochs = pipeline_of(Counted([*BATCHES[:4], StopIteration(), *BATCHES[4:]]))
    assert [len(list(epochs)) for _ in range(3)] == [4, 5, 0]  # it is asked again


def test_position_and_state_go_on_together():
    """The position is that of what was trained; the state may also be replaced by another."""
    step, batches = small_step(), Counted()
    pipeline = js.TrainPipeline(step, start(step), batches, depth=4)
    assert pipeline.position == {"next_index": 0}
    for result in itertools.islice(pipeline, 3):
        assert result.position == pipeline.position == {"next_index": result.step}
        assert bool(result.phase) == (result.step % 2 == 0)
    state, again = jax.tree.map(jnp.copy, pipeline.state), Counted()
    again.set_state({"next_index": 3})
    wanted = losses_of(pipeline)
    assert_same(losses_of(js.TrainPipeline(step, state, again)), wanted)
    pipeline = pipeline_of(iter(BATCHES))
    losses_of(itertools.islice(pipeline, 3))
    pipeline.state = start(step)
    assert_same(losses_of(pipeline), plain(tuple(range(3, 9))))


def test_a_weight_stays_beside_its_batch_in_stages():
    step, weight = small_step(), np.float32([2, 1])
    weighted = [js.train.WeightedBatch(batch, weight) for batch in BATCHES]
    state, wanted = start(step), []
    for batch in BATCHES:
        state, metrics = step(state, 2 * batch + 1, weight)
        wanted.append(np.asarray(metrics["loss"]))
    stages = [jax.jit(lambda batch: batch * 2), jax.jit(lambda batch: batch + 1)]
    assert_same(losses_of(js.TrainPipeline(step, start(step), weighted, stages=stages)), wanted)


def test_the_thread_ends_with_its_pipeline_and_with_the_block():
    pipeline = pipeline_of(itertools.cycle(BATCHES))
    next(pipeline)
    (thread,) = loaders()
    gone = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    thread.join(5)
    assert gone() is None
    assert loaders() == []
    with pipeline_of(itertools.cycle(BATCHES)) as pipeline:
        next(pipeline)
        assert len(loaders()) == 1
    assert loaders() == []
    assert pipeline.state.step.tolist() == [1, 1]
    with pytest.raises(ValueError, match="closed"):
        next(pipeline)


def test_the_report_counts():
    pipeline = pipeline_of(BATCHES[:5], stages=[jax.jit(lambda batch: batch)])
    assert pipeline.report().batches == 0
    losses_of(itertools.islice(pipeline, 4))
    report = pipeline.report()
    assert [s.name for s in report.stages] == ["load", "place", "<lambda>", "step"]
    assert report.batches == 4
    assert report.held in (0, 1)  # the fifth, if it was loaded in time
    assert [s.batches for s in report.stages[1:]] == [4 + report.held] * 2 + [4]
    busy = {s.name: s.busy_seconds for s in report.stages[1:]}
    spent = {**busy, "load": report.waiting_seconds, "caller": report.caller_seconds}
    assert sum(spent.values()) <= report.seconds
    assert report.slowest == max(spent, key=spent.get)


def test_a_loop_around_a_pipeline_calls_a_hook_and_goes_on_in_another():
    """With its batches, state and numbers."""
    calls, pipeline = [], pipeline_of(BATCHES)
    losses = losses_of(js.train_loop(pipeline, num_steps=4, hooks=[Note("a", calls, every=2)]))
    more = list(js.train_loop(pipeline))
    assert [r.step for r in more] == [5, 6, 7, 8, 9]
    assert_same(losses + losses_of(more), plain())
    assert [step for _, step, _ in calls] == [2, 4]
