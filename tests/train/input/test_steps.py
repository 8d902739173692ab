"""Steps and batches of every kind, wrapped, by grain, of several processes; and the loop."""

import itertools
import json

import jax
import numpy as np
import pytest

import jaxslowmo as js
from support.pairs import two_processes
from train.input.small import (
    BATCHES,
    assert_same,
    loaders,
    losses_of,
    pipeline_of,
    plain,
    small_step,
    start,
)
from train.small_loop import Note


@pytest.mark.parametrize("prefetch", [0, 30])
def test_the_loop_with_and_without(prefetch):
    step, calls = small_step(), []
    hooks = [Note("a", calls, every=4)]
    loop = js.train_loop(
        step, start(step), iter(BATCHES), num_steps=9, start=2, hooks=hooks, prefetch=prefetch
    )
    results = [(r.step, r.reports, np.asarray(r.metrics["loss"])) for r in loop]
    assert [r[0] for r in results] == list(range(3, 10))
    assert [step for _, step, _ in calls] == [4, 8]
    assert results[1][1] == {"a": 4}
    assert_same([r[2] for r in results], plain()[:7])


def test_the_loop_around_a_pipeline():
    """Which goes on where the loop ended: with its batches, state and numbers of the loop."""
    calls, pipeline = [], pipeline_of(BATCHES, stages=[jax.jit(lambda b: b)])
    hooks = [Note("a", calls, every=2)]
    losses = losses_of(js.train_loop(pipeline, num_steps=4, hooks=hooks))
    more = [(r.step, np.asarray(r.metrics["loss"])) for r in js.train_loop(pipeline, start=4)]
    assert [t for t, _ in more] == [5, 6, 7, 8, 9]
    assert_same(losses + [loss for _, loss in more], plain())
    assert [step for _, step, _ in calls] == [2, 4]
    with pytest.raises(ValueError, match="after 10 of `num_steps`=11"):
        list(js.train_loop(pipeline, num_steps=11, start=10))


def test_an_error_in_a_hook_ends_the_thread():
    def fail(result):
        raise OSError("full")

    fail.every, step = 2, small_step()
    loop = js.train_loop(step, start(step), itertools.cycle(BATCHES), hooks=[fail], prefetch=2)
    with pytest.raises(OSError, match="full"):
        list(loop)
    assert loaders() == []


PROGRAM = """
import itertools
import json
import time
import numpy as np
import optax
import jaxslowmo as js

here = jax.process_index()
BATCHES = np.random.default_rng(1).normal(size=(7, 8, 3)).astype(np.float32)
mesh = js.make_mesh({"replica": 4})
step = js.make_train_step(
    lambda p, b: ((b @ p["w"]) ** 2).mean(), optax.sgd(0.1),
    sync=js.local_sgd("replica", sync_every=2), mesh=mesh,
)
start = lambda: step.init({"w": np.ones(3, np.float32)})
values = lambda metrics: [np.asarray(s.data).tolist() for s in metrics["loss"].addressable_shards]

def batches():
    for i, batch in enumerate(BATCHES):
        time.sleep(0.02 * ((i + here) % 2))  # who is late changes
        yield batch[here * 4 : here * 4 + 4]

# A stage with a collective over all processes, and an evaluation between steps.
centred = jax.jit(lambda batch: batch - batch.mean(axis=0))

def run(depth):
    training = js.TrainPipeline(step, start(), batches(), depth=depth, stages=[centred])
    evaluating = js.TrainPipeline(step.evaluate, training, itertools.cycle(
        [BATCHES[0, here * 4 : here * 4 + 4]]), depth=depth)
    found = [x for r in training for x in (values(r.metrics), values(next(evaluating)))]
    evaluating.close()
    return found

def accumulated(depth):
    # Updates of three batches, the last of one, where replicas run out at different times.
    counts = [2, 7, 5, 6][here * 2 : here * 2 + 2]
    joined = js.uneven_batches([list(BATCHES[:n, :2]) for n in counts], mesh=mesh)
    loop = js.train_loop(step, start(), joined, accumulate=3, prefetch=depth)
    return [(values(r.metrics), np.asarray(r.metrics["weight"].addressable_data(0))[0].item())
            for r in loop]

def wrong(depth):
    rows = [4, 4, 6 - 4 * here]
    short = (b[:n] + here for b, n in zip(BATCHES, rows))
    pipeline, done = js.TrainPipeline(step, start(), short, depth=depth), 0
    try:
        for _ in pipeline:
            done += 1
    except ValueError as error:
        return done, str(error)

print(json.dumps({"same": run(0) == run(3), "wrong": wrong(2),
    "accumulated": accumulated(0) == accumulated(2) and [w for _, w in accumulated(1)]}))
"""


def test_two_processes(tmp_path):
    """Whoever is late: the same results with and without threads, and errors on both alike."""
    printed = two_processes(PROGRAM, tmp_path, devices=2)
    for text, weights in zip(printed, ([4, 0, 0], [6, 4, 0]), strict=True):
        said = json.loads(text.splitlines()[-1])
        assert said["accumulated"] == weights  # of the first replica of each process
        assert said["same"]
        done, error = said["wrong"]
        assert done == 2
        assert "`batch`" in error
