"""Ids that are in no table: of the host refused before the step, of devices an update skipped."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.input.small import losses_of
from train.step.tables import DENSE, REPLICAS, batches, embeddings, step_of

HOST = batches(5)
GOOD = [jax.tree.map(jnp.asarray, batch) for batch in HOST]
BAD = {**GOOD[1], "user": GOOD[1]["user"].at[3].set(24)}  # of the first replica
MESSAGE = r"skipped, 1 ids of feature 'user' were not in table 'user'"
IDLE, BOTH = np.float32([[0, 1], [1, 1]])
ADAM = optax.adam(0.1)
MEAN = {"gradients": js.all_reduce_gradients("replica", hook=js.hooks.top_k(0.5))}
LOCAL = {"sync": js.local_sgd("replica", sync_every=4)}


def make(optimizer=ADAM, **options):
    if "shards" in options:
        return step_of(optimizer=optimizer, **options)
    options = {"embeddings": embeddings(axis=None), **options}
    return step_of(1, mesh=js.virtual_mesh({"replica": REPLICAS}), optimizer=optimizer, **options)


@functools.cache
def local_step():
    """Make a step whose compiled programs all tests share."""
    return make(**LOCAL)


@pytest.fixture(autouse=True)
def nothing_is_left_to_be_refused():
    """Ask for errors that a test has left, which the next one of the same step would meet."""
    yield
    while True:
        with contextlib.suppress(ValueError):
            local_step().refuse_ids()
            break


def of_replica(state, replica):
    """Return what an update changes, on the host, without counters of exchanges and keys."""
    floats = [
        x for x in jax.tree.leaves(state.exchange.gradients) if jnp.issubdtype(x.dtype, float)
    ]
    return jax.tree.map(lambda x: np.asarray(x[replica]), (state.params, state.opt_state, floats))


def whole(state):
    return [of_replica(state, replica) for replica in range(REPLICAS)]


def assert_kept(before, after, replicas):
    for replica in replicas:
        jax.tree.map(np.testing.assert_array_equal, before[replica], of_replica(after, replica))
    for leaf in jax.tree.leaves(after._replace(rng=())):
        assert np.all(np.isfinite(leaf)), "something is NaN"


def refuses(call, match=MESSAGE):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({**MEAN, "shards": 2, "optimizer": js.dynamic_loss_scale(ADAM, initial=8.0)}, (0, 1)),
        ({**LOCAL, "mode": "host", "accumulate": 2}, (0,)),
    ],
)
def test_nothing_is_changed_and_the_second_call_after_it_raises(options, kept):
    step = make(**options)
    state, _ = step(step.init(DENSE), GOOD[0])
    before = whole(state)
    state, metrics = step(state, BAD)
    assert np.isnan(metrics["loss"][0])
    assert_kept(before, state, kept)
    state, _ = step(state, GOOD[2])
    between = whole(state)
    refuses(lambda: step(state, GOOD[3]))
    assert_kept(between, state, range(REPLICAS))  # it was not given away
    state, metrics = step(state, GOOD[3])
    assert np.isfinite(metrics["loss"]).all()
    assert np.any(np.asarray(state.params.dense["w"][0]) != between[0][0].dense["w"])


def test_ids_of_the_host_are_refused_before_the_step_by_name():
    step, wrong = local_step(), {**HOST[0], "user": HOST[0]["user"].copy()}
    wrong["user"][3] = 24
    refuses(lambda: step(step.init(DENSE), wrong), r"'user'.* below 24, got 24.* row 3")


def test_ids_of_devices_are_refused_after_every_kind_of_call_and_told_once():
    step = local_step()
    state, ahead = step.init(DENSE), step.ahead("patched")
    asked = ahead.prime(state, BAD)
    for call in (
        lambda: step.collect(state, BAD, BOTH),
        lambda: step.evaluate(state, BAD, BOTH),
        lambda: ahead(state, BAD, asked, None, collect=True),
        lambda: step(step.init(DENSE), BAD),
    ):
        call()
        refuses(step.refuse_ids)
        step.refuse_ids()


def test_ids_of_an_idle_replica_are_neither_counted_nor_refused():
    """Its batch may hold anything: the update is made, and nothing is raised after it."""
    step = local_step()
    state, _ = step(step.init(DENSE), GOOD[0])
    before = whole(state)
    state, metrics = step(state, BAD, IDLE)
    assert metrics["embeddings/user/invalid"].tolist() == [0, 0]
    assert metrics["embeddings/user/asked"][0] == 0 < metrics["embeddings/user/asked"][1]
    window, _ = step.collect(state, GOOD[2], IDLE)
    state, _ = step(state, BAD, IDLE, window=window)
    step.evaluate(state, BAD, IDLE)
    step.refuse_ids()
    assert np.any(before[1][0].dense["w"] != state.params.dense["w"][1])


def test_a_window_that_holds_them_is_skipped_as_a_whole():
    step = local_step()
    state, _ = step(step.init(DENSE), GOOD[0])
    before = whole(state)
    window, _ = step.collect(state, BAD, BOTH)
    assert window.refused.tolist() == [1, 0]
    state, _ = step(state, GOOD[2], BOTH, window=window)
    assert_kept(before, state, [0])
    refuses(step.refuse_ids)


@pytest.mark.parametrize("overflow", ["error", "drop"])
def test_ids_without_a_slot_are_skipped_likewise_unless_they_are_dropped(overflow):
    made = embeddings(axis=None, capacity={"item": 2, "user": 30}, overflow=overflow)
    step = make(optax.sgd(0.1), embeddings=made, **LOCAL)
    state = step.init(DENSE)
    before = np.asarray(state.params.dense["w"])
    state, _ = step(state, GOOD[0])
    assert np.array_equal(before, state.params.dense["w"]) == (overflow == "error")
    if overflow == "error":
        refuses(step.refuse_ids, r"skipped, .* had no slot: ")
    step.refuse_ids()


def test_a_pipeline_loses_no_batch_and_loops_raise_at_their_end():
    """The results are those of a pipeline without the batch."""
    step, given = local_step(), [GOOD[0], BAD, *GOOD[1:3]]
    losses = losses_of(js.TrainPipeline(step, step.init(DENSE), GOOD[:3], mode="patched"))
    pipeline, found = js.TrainPipeline(step, step.init(DENSE), iter(given), mode="patched"), []
    refuses(lambda: found.extend(map(np.asarray, (r.metrics["loss"] for r in pipeline))))
    assert len(found) == 3
    found += losses_of(pipeline)
    del found[1]
    # The other replica has been trained by the batch, and the first has not.
    np.testing.assert_allclose([x[0] for x in found], [x[0] for x in losses], rtol=1e-5)
    loop = js.train_loop(step, step.init(DENSE), [GOOD[0], BAD], num_steps=2, prefetch=2)
    assert [next(loop).step, next(loop).step] == [1, 2]
    refuses(lambda: next(loop))
