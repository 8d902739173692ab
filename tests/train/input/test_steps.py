"""Steps and batches of every kind, wrapped, uneven, of several processes; and the loop."""

import itertools
import json

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.pairs import two_processes
from train.input.small import (
    BATCHES,
    assert_same,
    loaders,
    losses_of,
    plain,
    small_step,
    start,
)
from train.small_loop import Note


def test_a_measured_step():
    step = small_step("devices")
    measured = js.measured(step, rate=100)
    pipeline = js.TrainPipeline(measured, start(step), BATCHES[:3])
    assert_same(losses_of(pipeline), plain("devices")[:3])
    assert measured.report().iteration == 3


def test_a_step_of_ones_own_is_bounded():
    """Of one made by `jax.jit`, donated, few are unfinished at once on CPU."""

    @jax.jit
    def step(state, batch):
        return jax.tree.map(lambda x: x + batch.sum(), state), {"loss": batch.mean()}

    for kind in (step, js.bounded(step)):
        pipeline = js.TrainPipeline(
            kind, {"w": jnp.zeros(())}, itertools.islice(itertools.cycle(BATCHES), 40)
        )
        losses = [float(r.metrics["loss"]) for r in pipeline]
        np.testing.assert_allclose(losses[:9], BATCHES.mean(axis=(1, 2)), rtol=1e-5)
        assert len(losses) == 40


def test_uneven_batches_bring_their_weights():
    step = small_step("devices")
    shares = [list(BATCHES[:3, :2]), list(BATCHES[:5, 2:])]

    def uneven():
        return js.uneven_batches([iter(s) for s in shares], mesh=step.mesh)

    state, wanted = start(step), []
    for batch, weight in uneven():
        state, metrics = step(state, batch, weight)
        wanted.append(np.asarray(metrics["loss"]))
    pipeline = js.TrainPipeline(step, start(step), uneven())
    assert_same(losses_of(pipeline), wanted)
    assert len(wanted) == 5


def test_grain_goes_on_where_it_was_trained():
    """In the middle of an epoch, with batches that were loaded and not trained."""

    def batches():
        order = grain.MapDataset.range(9).shuffle(seed=3)
        return iter(order.map(lambda i: BATCHES[i]).to_iter_dataset())

    step = small_step()
    wanted = losses_of(js.TrainPipeline(step, start(step), batches()))
    first = js.TrainPipeline(step, start(step), batches(), depth=3)
    losses = losses_of(itertools.islice(first, 4))
    state, position = first.state, first.position
    first.close()
    again = batches()
    again.set_state(position)
    losses += losses_of(js.TrainPipeline(step, state, again, depth=3))
    assert_same(losses, wanted)


# In the loop


@pytest.mark.parametrize("prefetch", [0, 2, 30])
def test_the_loop_with_and_without(prefetch):
    step, calls = small_step(), []
    hooks = [Note("a", calls, every=4)]
    loop = js.train_loop(
        step, start(step), iter(BATCHES), num_steps=9, start=2, hooks=hooks, prefetch=prefetch
    )
    results = [(r.step, r.reports, np.asarray(r.metrics["loss"])) for r in loop]
    assert [r[0] for r in results] == list(range(3, 10))
    assert [name for name, _, _ in calls] == ["a", "a"]
    assert results[1][1] == {"a": 4}
    assert_same([r[2] for r in results], plain()[:7])


def test_the_loop_around_a_pipeline():
    """Which goes on where the loop ended: with its batches, state and numbers of the loop."""
    step, calls = small_step(), []
    pipeline = js.TrainPipeline(step, start(step), BATCHES, stages=[jax.jit(lambda b: b)])
    hooks = [Note("a", calls, every=2)]
    losses = losses_of(js.train_loop(pipeline, num_steps=4, hooks=hooks))
    more = [(r.step, np.asarray(r.metrics["loss"])) for r in js.train_loop(pipeline, start=4)]
    assert [t for t, _ in more] == [5, 6, 7, 8, 9]
    assert_same(losses + [loss for _, loss in more], plain())
    assert [step for _, step, _ in calls] == [2, 4]
    with pytest.raises(ValueError, match="ended after 10 of `num_steps`=11"):
        list(js.train_loop(pipeline, num_steps=11, start=10))


def test_what_the_loop_refuses():
    step = small_step()
    pipeline = js.TrainPipeline(step, start(step), BATCHES)
    with pytest.raises(ValueError, match="`prefetch`, `accumulate` and `partial` out"):
        js.train_loop(pipeline, prefetch=2)
    with pytest.raises(ValueError, match=r"js\.train_loop\(pipeline\)"):
        js.train_loop(step, start(step), pipeline)
    with pytest.raises(ValueError, match="`batches` must be given"):
        js.train_loop(step, start(step))
    evaluating = js.TrainPipeline(step.evaluate, pipeline, BATCHES)
    with pytest.raises(ValueError, match="that evaluates"):
        js.train_loop(evaluating)


def test_an_error_in_a_hook_ends_the_thread():
    step = small_step()

    def fail(result):
        raise OSError("full")

    fail.every = 2
    loop = js.train_loop(step, start(step), itertools.cycle(BATCHES), hooks=[fail], prefetch=2)
    with pytest.raises(OSError, match="full"):
        list(loop)
    assert loaders() == []


# Several processes

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

def start():
    return step.init({"w": np.ones(3, np.float32)})

def values(metrics):
    return [np.asarray(s.data).tolist() for s in metrics["loss"].addressable_shards]

def batches():
    for i, batch in enumerate(BATCHES):
        time.sleep(0.02 * ((i + here) % 2))  # who is late changes
        yield batch[here * 4 : here * 4 + 4]

# A stage with a collective over all processes, and an evaluation between steps.
@jax.jit
def centred(batch):
    return batch - batch.mean(axis=0)

def run(depth):
    training = js.TrainPipeline(step, start(), batches(), depth=depth, stages=[centred])
    evaluating = js.TrainPipeline(step.evaluate, training, itertools.cycle(
        [BATCHES[0, here * 4 : here * 4 + 4]]), depth=depth)
    found = []
    for result in training:
        found += [values(result.metrics), values(next(evaluating))]
    evaluating.close()
    return found

def uneven(depth):
    counts = [2, 3, 5, 4][here * 2 : here * 2 + 2]
    shares = [list(BATCHES[:n, :2]) for n in counts]
    joined = js.uneven_batches(shares, mesh=mesh)
    return [values(r.metrics) for r in js.TrainPipeline(step, start(), joined, depth=depth)]

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

said = {"same": run(0) == run(3), "uneven": uneven(0) == uneven(3), "wrong": wrong(2),
        "accumulated": accumulated(0) == accumulated(2) and [w for _, w in accumulated(1)]}
print(json.dumps(said))
"""


def test_two_processes(tmp_path):
    """Whoever is late: the same results with and without threads, and errors on both alike."""
    printed = two_processes(PROGRAM, tmp_path, devices=2)
    for text, weights in zip(printed, ([4, 0, 0], [6, 4, 0]), strict=True):
        said = json.loads(text.splitlines()[-1])
        assert said["accumulated"] == weights  # of the first replica of each process
        assert (said["same"], said["uneven"]) == (True, True)
        done, error = said["wrong"]
        assert done == 2
        assert "what processes give does not make one batch" in error
