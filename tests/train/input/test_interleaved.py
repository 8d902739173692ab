"""Training and evaluation pipelines on one state, called in any order, are the plain loops."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from train.input.small import BATCHES, assert_same, host, small_step, start

# Which pipeline is called next: the one that trains, or one that evaluates.
CALLS = st.lists(st.sampled_from(["train", "train", "metrics", "function"]), max_size=24)
EPOCHS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    calls=CALLS,
    epochs=EPOCHS,
    depths=st.tuples(*[st.integers(0, 4)] * 3),
    drain=st.booleans(),
    weighted=st.booleans(),
)
def test_any_order_is_the_plain_loop(calls, epochs, depths, drain, weighted):
    step = small_step()
    ends = list(itertools.accumulate(epochs))
    batches = [BATCHES[i % 9] for i in range(ends[-1])]
    if weighted:
        weights = [np.asarray([1 + i % 2, i % 3], np.float32) for i in range(len(batches))]
        batches = [js.WeightedBatch(b, w) for b, w in zip(batches, weights, strict=True)]
    parts = [iter(batches[e - n : e]) for n, e in zip(epochs, ends, strict=True)]
    train = js.TrainPipeline(step, start(step), depth=depths[0], drain=drain)
    metrics = js.TrainPipeline(step.evaluate, train, itertools.cycle(BATCHES[:3]), depth=depths[1])
    function = js.TrainPipeline(
        lambda state, batch: int(np.asarray(state.step)[0]) + batch,
        lambda: train.state,
        itertools.count(),
        depth=depths[2],
    )
    state, done, evaluated, counted, current = start(step), 0, 0, 0, 0
    for call in calls:
        if call == "train":
            result = None
            while result is None and current < len(parts):
                try:
                    result = train.progress(parts[current])
                except StopIteration:
                    current += 1
            kept = 0 if drain else depths[0]
            assert (result is not None) == (done < len(batches) - kept)
            if result is not None:
                given_, weight = batches[done] if weighted else (batches[done], None)
                state, wanted = step(state, given_, weight)
                done += 1
                assert_same(*[list(map(np.asarray, m.values())) for m in (result.metrics, wanted)])
                assert result.step == done
        elif call == "metrics":
            wanted = step.evaluate(state, BATCHES[evaluated % 3])["loss"]
            evaluated += 1
            assert_same([np.asarray(next(metrics)["loss"])], [np.asarray(wanted)])
        else:
            assert next(function) == done + counted
            counted += 1
        assert_same(host(train.state), host(state))
    for pipeline in (train, metrics, function):
        pipeline.close()
