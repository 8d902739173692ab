"""An update whose ids are in no table, which only devices know, changes nothing."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep
from train.input.small import losses_of
from train.step.tables import DENSE, REPLICAS, batches, embeddings, loss, step_of

GOOD = [jax.tree.map(jnp.asarray, batch) for batch in batches(5)]
BAD = {**GOOD[1], "user": GOOD[1]["user"].at[3].set(24)}  # of the first replica
MESSAGE = "1 ids of feature 'user' were not in table 'user'.* An update .* is skipped"
IDLE = np.float32([0, 1])
MEAN = {"gradients": js.all_reduce_gradients("replica", hook=js.hooks.top_k(0.5))}
LOCAL = {"sync": js.local_sgd("replica", sync_every=4)}
SCALED = {**MEAN, "optimizer": js.dynamic_loss_scale(optax.adam(0.1), initial=8.0)}


def make(optimizer=None, shards=1, **options):
    mesh = js.virtual_mesh({"replica": REPLICAS}) if shards == 1 else None
    if mesh is None:
        devices = np.array(jax.devices()[: REPLICAS * shards]).reshape(REPLICAS, shards)
        mesh = jax.sharding.Mesh(devices, ("replica", "shard"))
    made = options.pop("embeddings", embeddings(axis=None if shards == 1 else "shard"))
    optimizer = optimizer or optax.adam(0.1)
    return js.make_train_step(loss, optimizer, mesh=mesh, embeddings=made, **options)


@functools.cache
def local_step():
    """The same compiled programs for all tests."""
    return make(**LOCAL)


@pytest.fixture(autouse=True)
def nothing_is_left_to_be_refused():
    """What a test has not asked for would be an error of the next that takes the same step."""
    yield
    while True:
        with contextlib.suppress(ValueError):
            local_step().refuse_ids()
            break


def of_replica(state, replica):
    """What an update changes, counters of exchanges and keys apart, on the host."""
    floats = [x for x in jax.tree.leaves(state.opt_state[0]) if jnp.issubdtype(x.dtype, float)]
    return jax.tree.map(
        lambda x: np.asarray(x[replica]), (state.params, state.opt_state[1], floats)
    )


def assert_kept(before, after, replicas):
    for replica in replicas:
        jax.tree.map(np.testing.assert_array_equal, before[replica], of_replica(after, replica))
    for leaf in jax.tree.leaves(after._replace(rng=())):
        assert np.all(np.isfinite(leaf)), "something is NaN"


def whole(state):
    return [of_replica(state, replica) for replica in range(REPLICAS)]


@pytest.mark.parametrize(
    ("options", "kept"),
    sweep(
        [
            (MEAN, (0, 1)),
            ({**MEAN, "shards": 2}, (0, 1)),
            (LOCAL, (0,)),
            ({**LOCAL, "shards": 2, "mode": "host"}, (0,)),
            ({**LOCAL, "optimizer": js.dynamic_loss_scale(optax.adam(0.1), initial=8.0)}, (0,)),
            (SCALED, (0, 1)),
            ({"sync": "none", "accumulate": 2}, (0,)),
        ],
        lambda options, kept: ("shards" in options and kept == (0, 1)) or options is SCALED,
    ),
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
    with pytest.raises(ValueError, match=MESSAGE):
        step(state, GOOD[3])
    assert_kept(between, state, range(REPLICAS))  # it was not given away
    state, metrics = step(state, GOOD[3])
    assert np.isfinite(metrics["loss"]).all()
    assert np.any(np.asarray(state.params.dense["w"][0]) != between[0][0].dense["w"])


def test_the_last_call_is_asked_at_the_end():
    step = local_step()
    state, _ = step(step.init(DENSE), BAD)
    with pytest.raises(ValueError, match=MESSAGE):
        step.refuse_ids()
    step.refuse_ids()  # told once
    step(state, GOOD[0])
    step.refuse_ids()


@pytest.mark.parametrize("of_last", sweep([False, True], lambda of_last: of_last))
def test_a_window_that_holds_them_is_skipped_as_a_whole(of_last):
    step = local_step()
    state, _ = step(step.init(DENSE), GOOD[0])
    before = whole(state)
    window, _ = step.collect(state, GOOD[2] if of_last else BAD)
    assert window.refused.tolist() == [0 if of_last else 1, 0]
    state, _ = step(state, BAD if of_last else GOOD[2], window=window)
    assert_kept(before, state, [0])
    with pytest.raises(ValueError, match=MESSAGE):
        step.refuse_ids()
    window, _ = step.collect(state, BAD)
    state, _ = step.apply(state, window)
    assert_kept(before, state, [0])
    with pytest.raises(ValueError, match=MESSAGE):
        step.refuse_ids()


def test_an_idle_replica_may_hold_anything():
    step = make(**MEAN)
    state, _ = step(step.init(DENSE), GOOD[0], np.ones(REPLICAS, np.float32))
    before = whole(state)
    state, metrics = step(state, BAD, np.array([0, 1], np.float32))
    assert np.isfinite(metrics["loss"]).all()
    jax.tree.map(np.testing.assert_array_equal, *whole(state))
    assert np.any(before[0][0].dense["w"] != state.params.dense["w"][0])


def test_ids_of_an_idle_replica_are_neither_counted_nor_refused():
    """Its batch may hold anything: the update is made, and nothing is raised after it."""
    step = local_step()
    state, _ = step(step.init(DENSE), GOOD[0])
    before = whole(state)
    state, metrics = step(state, BAD, IDLE)
    assert metrics["embeddings/user/invalid"].tolist() == [0, 0]
    assert metrics["embeddings/user/asked"][0] == 0 < metrics["embeddings/user/asked"][1]
    step.refuse_ids()
    window, _ = step.collect(state, GOOD[2], IDLE)
    state, _ = step(state, BAD, IDLE, window=window)
    window, _ = step.collect(state, BAD, IDLE)
    state, _ = step.apply(state, window)
    step.evaluate(state, BAD, IDLE)
    step.refuse_ids()
    assert np.any(before[1][0].dense["w"] != state.params.dense["w"][1])


def test_bad_ids_of_an_evaluation_are_not_said_to_be_of_an_update():
    """There was none that could be skipped."""
    step = local_step()
    step.evaluate(step.init(DENSE), BAD)
    with pytest.raises(ValueError, match=r"An update .* is skipped"):
        step.refuse_ids()


def test_ids_without_a_slot_are_skipped_likewise_unless_they_are_dropped():
    for overflow in ("error", "drop"):
        made = embeddings(axis=None, capacity={"item": 2, "user": 30}, overflow=overflow)
        step = make(embeddings=made, **LOCAL)
        state = step.init(DENSE)
        before = whole(state)
        state, _ = step(state, GOOD[0])
        if overflow == "error":
            assert_kept(before, state, range(REPLICAS))
            with pytest.raises(ValueError, match=r"had no slot: .* An update .* is skipped"):
                step.refuse_ids()
        else:
            assert np.any(before[0][0].dense["w"] != state.params.dense["w"][0])
            step.refuse_ids()


MODES = ["exact", "patched"]


@pytest.mark.parametrize("mode", sweep(MODES, lambda mode: mode == "patched"))
@pytest.mark.parametrize("place", sweep([1, 3], lambda place: place == 3))
def test_a_pipeline_loses_no_batch_and_goes_on(mode, place):
    """The results are those of a pipeline without the batch; also of the last one."""
    step = local_step() if mode == "patched" else step_of(2, **LOCAL)
    given = [*GOOD[:place], BAD, *GOOD[place:3]]
    wanted = js.TrainPipeline(step, step.init(DENSE), GOOD[:3], mode=mode)
    losses = losses_of(wanted)
    pipeline = js.TrainPipeline(step, step.init(DENSE), iter(given), mode=mode)
    found = []
    with pytest.raises(ValueError, match=MESSAGE):
        found.extend(np.asarray(result.metrics["loss"]) for result in pipeline)
    assert len(found) == min(place + 2, 4)
    found += losses_of(pipeline)
    assert len(found) == 4
    del found[place]
    # The other replica has been trained by the batch, and the first has not.
    np.testing.assert_allclose([x[0] for x in found], [x[0] for x in losses], rtol=1e-5)


def test_a_loop_raises_at_its_end():
    step = local_step()
    for options in ({}, {"num_steps": 2}, {"num_steps": 2, "prefetch": 2}):
        loop = js.train_loop(step, step.init(DENSE), [GOOD[0], BAD], **options)
        assert [next(loop).step, next(loop).step] == [1, 2]
        with pytest.raises(ValueError, match=MESSAGE):
            next(loop)
    state = step.init(DENSE)
    evaluation = js.TrainPipeline(step.evaluate, lambda: state, [BAD])
    next(evaluation)
    with pytest.raises(ValueError, match=MESSAGE):
        next(evaluation)


def test_a_stage_that_makes_ids():
    """Features, and their ranges, are looked at behind it: they were before it, and refused."""
    step = local_step()
    host = batches(3)
    words = [{**b, "user": b["user"].astype(np.int64) * 1_000_003} for b in host]

    @jax.jit
    def hashing(batch):
        return {**batch, "user": batch["user"] // 1_000_003}

    def missing(batch):
        return {**batch, "user": batch["name"]}

    wanted = losses_of(js.TrainPipeline(step, step.init(DENSE), host))
    renamed = [{"name": b["user"], "item": b["item"], "y": b["y"]} for b in host]
    for given, stage in ((words, hashing), (renamed, missing)):
        pipeline = js.TrainPipeline(step, step.init(DENSE), given, stages=[stage])
        found = losses_of(pipeline)
        np.testing.assert_array_equal(found, wanted)
    pipeline = js.TrainPipeline(step, step.init(DENSE), words, stages=[lambda batch: batch])
    with pytest.raises(ValueError, match="were not in table 'user'"):
        list(pipeline)


@pytest.mark.parametrize("options", sweep([{}, {"mode": "patched"}], lambda options: not options))
def test_what_a_stage_makes_is_refused_in_the_turn_of_its_batch(options):
    """The batch before it was lost, and the error was raised twice."""
    step, host = local_step(), batches(4)

    def numpy_stage(batch):
        batch = jax.tree.map(np.array, batch)
        if np.array_equal(batch["user"], host[1]["user"]):
            batch["user"][3] = 24
        return batch

    pipeline = js.TrainPipeline(step, step.init(DENSE), host, stages=[numpy_stage], **options)
    first = next(pipeline)
    with pytest.raises(ValueError, match="table 'user'"):
        next(pipeline)
    losses = [np.asarray(first.metrics["loss"]), *losses_of(pipeline)]
    wanted = losses_of(js.TrainPipeline(step, step.init(DENSE), [host[0], *host[2:]]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
