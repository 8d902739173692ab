"""A pipeline is the plain loop, whatever its depth; what it holds, drains and hands on."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.exhaustive import sweep
from train.input.small import (
    BATCHES,
    Counted,
    assert_same,
    host,
    loaders,
    losses_of,
    next_of,
    plain,
    small_step,
    start,
)


@pytest.mark.parametrize(
    ("kind", "depth"),
    sweep(
        itertools.product(["virtual", "devices"], [0, 1, 2, 12]),
        lambda *case: case in [("virtual", 0), ("devices", 2), ("virtual", 12)],
    ),
)
def test_results_are_those_of_the_plain_loop(kind, depth):
    step = small_step(kind)
    pipeline = js.TrainPipeline(step, start(step), iter(BATCHES), depth=depth)
    results = []
    for result in pipeline:
        assert result.state is pipeline.state
        results.append((result.step, result.phase, np.asarray(result.metrics["loss"])))
    assert [r[0] for r in results] == list(range(1, 10))
    assert [bool(r[1]) for r in results] == [t % 2 == 0 for t in range(1, 10)]
    assert_same([r[2] for r in results], plain(kind))
    assert loaders() == []
    assert next(pipeline, None) is None


@pytest.mark.parametrize("depth", [1, 2, 12])
def test_without_drain_the_last_batches_lead_the_next_iterator(depth):
    """torchrec's: N batches, N - depth trained; nothing is lost, not even of a short iterator."""
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), depth=depth, drain=False)
    losses = []
    for part, so_far in ((BATCHES[:4], 4), (BATCHES[4:5], 5), (BATCHES[5:], 9)):
        iterator = iter(part)
        while (result := next_of(pipeline, iterator)) is not None:
            losses += losses_of([result])
        assert len(losses) == max(0, so_far - depth)
    assert_same(losses, plain()[: max(0, 9 - depth)])


def test_another_iterator_comes_after_what_is_held():
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), depth=3)
    first, second = Counted(BATCHES[:6]), iter(BATCHES[6:])
    losses = losses_of([pipeline.progress(first), pipeline.progress(first)])
    losses += losses_of(iter(lambda: next_of(pipeline, second), None))
    # What had been loaded of the first by then is trained, in its order, and the rest is left.
    taken = first.next_index
    assert 3 <= taken <= 6
    assert_same(losses, plain("virtual", (*range(taken), 6, 7, 8)))


def test_an_iterator_that_goes_on_after_its_end_is_asked_again():
    """As loops over epochs do."""

    epochs = iter([*BATCHES[:4], None, *BATCHES[4:]])

    class Epochs:
        def __iter__(self):
            return self

        def __next__(self):
            if (batch := next(epochs)) is None:
                raise StopIteration
            return batch

    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), Epochs())
    assert [len(list(pipeline)) for _ in range(3)] == [4, 5, 0]


def test_the_position_is_that_of_what_was_trained():
    step, batches = small_step(), Counted()
    pipeline = js.TrainPipeline(step, start(step), batches, depth=4)
    assert pipeline.position == {"next_index": 0}
    for result in itertools.islice(pipeline, 3):
        assert result.position == pipeline.position == {"next_index": result.step}
    state = jax.tree.map(jnp.copy, pipeline.state)
    wanted = losses_of(pipeline)
    again = Counted()
    again.set_state({"next_index": 3})
    assert_same(losses_of(js.TrainPipeline(step, state, again)), wanted)


def test_evaluation_reads_the_state_at_each_call():
    step = small_step()
    training = js.TrainPipeline(step, start(step), iter(BATCHES))
    evaluating = js.TrainPipeline(step.evaluate, training, itertools.cycle(BATCHES[:2]))
    by_function = js.TrainPipeline(
        step.evaluate, lambda: training.state, itertools.cycle(BATCHES[:2])
    )
    found = []
    for _ in training:
        metrics = next(evaluating)
        found.append(np.asarray(metrics["loss"]))
        assert_same([found[-1]], [np.asarray(next(by_function)["loss"])])
        assert evaluating.state is training.state
    state, wanted = start(step), []
    for i, batch in enumerate(BATCHES):
        state, _ = step(state, batch)
        wanted.append(np.asarray(step.evaluate(state, BATCHES[i % 2])["loss"]))
    assert_same(found, wanted)
    assert_same(host(training.state), host(state))
    for pipeline in (evaluating, by_function):
        pipeline.close()
    with pytest.raises(ValueError, match="set it where it is trained"):
        evaluating.state = state


def test_the_state_may_be_replaced():
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), iter(BATCHES))
    losses_of(itertools.islice(pipeline, 3))
    pipeline.state = start(step)
    assert_same(losses_of(pipeline), plain("virtual", tuple(range(3, 9))))


def test_weights_travel_with_their_batches():
    step = small_step()
    batches = [
        js.WeightedBatch(b, np.asarray([i % 2, 1], np.float32)) for i, b in enumerate(BATCHES)
    ]
    state, wanted = start(step), []
    for batch, weight in batches:
        state, metrics = step(state, batch, weight)
        wanted.append(np.asarray(metrics["loss"]))
    double = jax.jit(lambda batch: batch * 2)
    half = jax.jit(lambda batch: batch / 2)
    pipeline = js.TrainPipeline(step, start(step), batches, stages=[double, half])
    assert_same(losses_of(pipeline), wanted)


def test_any_function_is_a_step():
    """Of any state and of batches that hold more than arrays."""

    def step(state, batch):
        return {"sum": state["sum"] + batch["x"].sum()}, (batch["name"], type(batch["x"]))

    batches = [{"x": b, "name": str(i)} for i, b in enumerate(BATCHES)]
    pipeline = js.TrainPipeline(step, {"sum": 0.0}, batches)
    names = [r.metrics for r in pipeline]
    assert [name for name, _ in names] == [str(i) for i in range(9)]
    assert all(issubclass(kind, jax.Array) for _, kind in names)
    np.testing.assert_allclose(pipeline.state["sum"], BATCHES.sum(), rtol=1e-5)


def test_a_pipeline_that_nobody_holds_ends_its_thread():
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), itertools.cycle(BATCHES))
    next(pipeline)
    (thread,) = loaders()
    gone = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    thread.join(5)
    assert gone() is None
    assert loaders() == []


def test_the_thread_ends_with_the_block():
    step = small_step()
    with js.TrainPipeline(step, start(step), itertools.cycle(BATCHES)) as pipeline:
        next(pipeline)
        assert len(loaders()) == 1
    assert loaders() == []
    assert pipeline.state.step.tolist() == [1, 1]
    with pytest.raises(ValueError, match="was closed"):
        next(pipeline)


def test_the_report_counts():
    step = small_step()
    stage = jax.jit(lambda batch: batch)
    pipeline = js.TrainPipeline(step, start(step), BATCHES[:5], stages=[stage, stage])
    empty = pipeline.report()
    assert (empty.batches, empty.seconds) == (0, 0.0)
    losses_of(itertools.islice(pipeline, 4))
    report = pipeline.report()
    assert [s.name for s in report.stages] == ["load", "place", "<lambda> 1", "<lambda> 2", "step"]
    assert report.batches == 4
    assert report.held in (0, 1)  # the fifth, if it was loaded in time
    assert [s.batches for s in report.stages[1:]] == [4 + report.held] * 3 + [4]
    for s in report.stages:
        assert s.busy_seconds > 0
        np.testing.assert_allclose(s.busy_seconds + s.idle_seconds, report.seconds, rtol=1e-6)
    busy = sum(s.busy_seconds for s in report.stages[1:])
    assert busy + report.waiting_seconds + report.caller_seconds <= report.seconds
    assert report.slowest in {"load", "place", "<lambda> 1", "<lambda> 2", "step", "caller"}
    assert str(report).startswith("4 batches in ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -1}, "`depth` .*got -1"),
        ({"depth": True}, "`depth` .*got True"),
        ({"timeout": 0}, "`timeout` .*Got 0"),
        ({"timeout": 1.0, "depth": 0}, "`timeout` .*`depth`=0"),
        ({"stages": [1]}, r"`stages` must be a sequence of functions .*got \[1\]"),
        ({"stages": len}, "`stages` must be a sequence of functions .*got <built-in"),
        ({"timeout": "5"}, "`timeout` must be a number of seconds > 0.*Got '5'"),
        ({"batches": 7}, "`batches` must be an iterator.*got int"),
        ({"step": 3}, "`step` must be a function, got int"),
    ],
)
def test_bad_arguments(options, message):
    given = {"step": small_step(), "state": None, "batches": BATCHES, **options}
    with pytest.raises(ValueError, match=message):
        js.TrainPipeline(given.pop("step"), given.pop("state"), given.pop("batches"), **given)


def test_misuse_is_told():
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step))
    with pytest.raises(ValueError, match="`iterator` must be given"):
        next(pipeline)
    with pytest.raises(ValueError, match="must be an iterator, such as iter"):
        pipeline.progress(list(BATCHES))
    with pytest.raises(ValueError, match=r"`state` must be a js\.TrainState"):
        next(js.TrainPipeline(step, {"w": 1.0}, BATCHES))
    with pytest.raises(ValueError, match=r"must return `\(state, metrics\)`"):
        next(js.TrainPipeline(step.evaluate, start(step), BATCHES))
