"""Several batches of a pipeline as one update: which, and what becomes of those at the end."""

import itertools
import json
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.golden_peers import FOLDER
from train.input.small import (
    BATCHES,
    Counted,
    assert_same,
    host,
    losses_of,
    pipeline_of,
    small_step,
)
from train.input.small import start as small_start

PARTIALS = "step", "discard", "error"


# Calls of torchrec's pipelines, changed for accumulation, with the updates that they make.
CASES = json.loads((FOLDER / "grad_accum_calls.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_recorded_calls_by_the_rule(case):
    """Training and evaluation take turns on one iterator, as there; evaluation counts nothing."""
    size, calls = case["grad_accum"] or 1, len(case["calls"]) - 1
    step, iterator = small_step(), itertools.cycle(BATCHES)
    options = {"accumulate": size, "partial": "discard"}
    training = js.TrainPipeline(step, small_start(step), depth=0, **options)
    evaluation = js.TrainPipeline(step.evaluate, training, depth=0)
    updates, held, trained = [], [], []
    for i, mode in zip(range(calls), case["modes"], strict=False):
        if mode == "eval":
            evaluation.progress(iterator)
            continue
        result = training.progress(iterator)
        held, trained = [*held, i], [*trained, i]
        assert result.step == len(trained) // size
        if result.is_update:
            updates, held = [*updates, held], []
    whole = len(trained) // size * size
    assert updates == [trained[i : i + size] for i in range(0, whole, size)]
    there = [update["batches"] for update in case["updates"]]
    if size == 2 or case["grad_accum"] is None:
        assert updates == there
    else:  # none that it makes of whole windows is lost here
        assert set(itertools.chain(*there)) <= set(trained)


class Plain:
    """The calls of a step for which a pipeline stands."""

    def __init__(self, accumulate):
        self.step, self.size = small_step(), accumulate
        self.state, self.window, self.held, self.updates = small_start(self.step), None, 0, 0

    def train(self, batch, weight):
        self.held += 1
        if self.held < self.size:
            self.window, metrics = self.step.collect(self.state, batch, weight, self.window)
        else:
            self.state, metrics = self.step(self.state, batch, weight, window=self.window)
            self.window, self.held, self.updates = None, 0, self.updates + 1
        return metrics

    def end(self, partial):
        if partial == "step" and self.held:
            self.state, _ = self.step.apply(self.state, self.window)
            self.updates += 1
        if partial != "error":
            self.window, self.held = None, 0


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    accumulate=st.sampled_from([1, 2, 3, 5]),
    partial=st.sampled_from(PARTIALS),
    drain=st.booleans(),
    depth=st.sampled_from([0, 1, 3]),
    weighted=st.booleans(),
    evaluations=st.sets(st.integers(0, 12)),
)
def test_a_pipeline_is_the_calls_it_stands_for(
    lengths, accumulate, partial, drain, depth, weighted, evaluations
):
    """Bit for bit, over several iterators, evaluated in between by a step and by a function.

    Without drain as in torchrec: of N batches N - depth are trained, and the rest lead the next
    iterator, be it shorter.
    """
    plain, step = Plain(accumulate), small_step()
    options = {"accumulate": accumulate, "partial": partial, "drain": drain, "depth": depth}
    training = js.TrainPipeline(step, small_start(step), **options)
    evaluation = js.TrainPipeline(step.evaluate, training, itertools.cycle(BATCHES), depth=depth)
    function = js.TrainPipeline(
        lambda state, i: int(np.asarray(state.step)[0]) + i,
        lambda: training.state,
        itertools.count(),
        depth=depth,
    )
    number, trained, evaluated, held = itertools.count(), 0, 0, deque()
    with training, evaluation, function:
        for length in lengths:
            given_ = []
            for i in itertools.islice(number, length):
                weight = np.float32([1 + i % 2, i % 3]) if weighted else None
                held.append((BATCHES[i % 9], weight))
                given_.append(js.train.WeightedBatch(*held[-1]) if weighted else BATCHES[i % 9])
            iterator = iter(given_)
            while True:
                if trained in evaluations:
                    wanted = step.evaluate(plain.state, BATCHES[evaluated % 9])["loss"]
                    assert_same([np.asarray(next(evaluation)["loss"])], [np.asarray(wanted)])
                    assert next(function) == plain.updates + evaluated
                    evaluated += 1
                try:
                    result = training.progress(iterator)
                except StopIteration:
                    break
                except ValueError:
                    if partial != "error" or not plain.held:
                        raise
                    break
                wanted = plain.train(*held.popleft())
                trained += 1
                assert_same(*[list(map(np.asarray, m.values())) for m in (result.metrics, wanted)])
                assert (result.step, result.is_update) == (plain.updates, plain.held == 0)
                assert result.state is training.state
            if drain:
                plain.end(partial)
            assert len(held) == (0 if drain else min(len(held) + trained, depth))
            assert_same(host(training.state), host(plain.state))


def test_a_loop_yields_updates_with_means_of_their_metrics_and_takes_no_batch_more():
    """Also of a measured step, and of a pipeline that has begun."""
    step, batches = small_step(), Counted()
    each = losses_of(js.TrainPipeline(step, small_start(step), iter(BATCHES), accumulate=4))
    measured = js.reports.measured(step)
    loop = js.train_loop(
        measured, small_start(step), batches, num_steps=2, accumulate=4, prefetch=2
    )
    for i, result in enumerate(loop, 1):
        assert (result.step, result.position["next_index"]) == (i, 4 * i)
        mean = np.mean(each[4 * i - 4 : 4 * i], axis=0)
        np.testing.assert_allclose(result.metrics["loss"], mean, rtol=1e-6)
    assert batches.next_index == 8
    assert measured.report().measured == (1, 2)
    with pytest.raises(ValueError, match="after 3 of `num_steps`=5"):
        list(js.train_loop(step, small_start(step), Counted(), num_steps=5, accumulate=4))
    pipeline = js.TrainPipeline(step, small_start(step), Counted(), accumulate=4)
    next(pipeline)
    assert [r.step for r in js.train_loop(pipeline)] == [1, 2, 3]


def test_the_partial_update_at_the_end_is_told():
    pipeline = pipeline_of(Counted(BATCHES[:5]), accumulate=3)
    results = [pipeline.progress() for _ in range(5)]
    assert [r.is_update for r in results] == [False, False, True, False, False]
    assert [r.position["next_index"] for r in results] == [0, 0, 3, 3, 3]
    assert next(pipeline, None) is None
    told = pipeline.partial_update
    assert (told.step, told.state, told.is_update) == (2, pipeline.state, True)
    np.testing.assert_allclose(told.metrics["loss"], np.mean(losses_of(results[3:]), axis=0))
    assert pipeline.position == {"next_index": 5}
    assert next(pipeline, None) is None  # asked again
    assert pipeline.partial_update is None
