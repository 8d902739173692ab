"""Pipelines that ask the tables for the next batch beside a step: the results of a plain loop."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.input.small import rest_of
from train.step.tables import DENSE, batches, loss, step_of

BATCHES = batches(7)
LOCAL = js.local_sgd("replica", sync_every=2)
# Some first updates overflow.
SCALED = js.dynamic_loss_scale(optax.sgd(0.02), initial=2.0**126, max_scale=2.0**126)


def large(params, batch, *, embedded):
    return 16 * loss(params, batch, embedded=embedded)


def same(found, expected):
    """As the suite compiles (no optimization of loops) some sums differ in their last bit."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def losses_of(results):
    return np.stack([result.metrics["loss"] for result in results])


@functools.cache
def made():
    options = {"sync": LOCAL, "mode": "host", "optimizer": SCALED, "loss_fn": large}
    return step_of(2, shard="column", **options)


@functools.cache
def plainly(accumulate=1):
    """Return losses and the state of a loop over `collect` and `step`."""
    step = made()
    state, window, losses = step.init(DENSE), None, []
    for count, batch in enumerate(BATCHES, 1):
        if count % accumulate:
            window, metrics = step.collect(state, batch, window=window)
        else:
            state, metrics = step(state, batch, window=window)
            window = None
        losses.append(metrics["loss"])
    if window is not None:
        state, _ = step.apply(state, window)
    return np.stack(losses), jax.tree.map(np.asarray, state._replace(rng=state.step))


@pytest.mark.parametrize(
    ("mode", "accumulate", "drain"), [("exact", 1, True), ("patched", 2, False)]
)
def test_results_are_those_of_a_plain_loop(mode, accumulate, drain):
    """Over two iterators, with evaluations between; also where a loss scale skips an update."""
    step = made()
    losses, state = plainly(accumulate)
    options = {"mode": mode, "accumulate": accumulate, "drain": drain}
    pipeline = js.TrainPipeline(step, step.init(DENSE), **options)
    evaluation, found = js.TrainPipeline(step.evaluate, pipeline, iter(BATCHES * 3)), []
    for iterator in (iter(BATCHES[:4]), iter(BATCHES[4:])):
        for result in rest_of(pipeline, iterator):
            found.append(result)
            if len(found) % 3 == 1:
                next(evaluation)
    same(losses_of(found), losses[: len(found)])
    assert len(found) == len(BATCHES) - 2 * (not drain)
    if drain:
        done = pipeline.state
        jax.tree.map(same, jax.tree.map(np.asarray, done._replace(rng=done.step)), state)
    pipeline.close(), evaluation.close()
    assert (pipeline.report().resent_share is None) == (mode == "exact")


def test_another_state_is_looked_up_anew_also_of_a_measured_step():
    """Rows of the state that was there before must not be used."""
    step, (expected, _) = made(), plainly()
    measured = js.reports.measured(step)
    given_ = iter(BATCHES[4:] + BATCHES[:3])
    pipeline = js.TrainPipeline(measured, step.init(DENSE), given_, mode="patched")
    for _ in range(3):
        next(pipeline)
    pipeline.state = step.init(DENSE)
    same(losses_of(pipeline), expected[:3])
    report = measured.report()
    assert (report.iteration, report.missed) == (6, ())
    assert report.average.forward_compute_time > 0


def test_what_was_asked_for_another_batch_is_refused():
    """It gave the batch rows of the other one, silently. Equal ids in other arrays are the same."""
    step, (expected, _) = made(), plainly()
    ahead, state = step.ahead("patched"), step.init(DENSE)
    asked = ahead.prime(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"`asked`.*'item'"):
        ahead(state, BATCHES[1], asked, None)
    one_other = {**BATCHES[0], "user": BATCHES[0]["user"][::-1]}
    with pytest.raises(ValueError, match=r"`asked`.*'user'"):
        ahead(state, one_other, asked, None)
    assert (BATCHES[0]["item"] == -1).any()
    other = np.where(BATCHES[0]["item"] < 0, -2, BATCHES[0]["item"]).astype(np.int16)
    again = {**jax.tree.map(np.copy, BATCHES[0]), "item": other}
    state, metrics, asked = ahead(state, again, asked, BATCHES[1])
    same(metrics["loss"], expected[0])
    with pytest.raises(ValueError, match="`asked`"):
        ahead(state, BATCHES[2], asked, None)
    _, metrics, asked = ahead(state, BATCHES[1], asked, None)
    same(metrics["loss"], expected[1])
    assert asked is None


def test_stale_rows_are_one_update_old():
    """Against NumPy: of an update the first batch sees rows of before the last one, others not."""
    num_exact, accumulate = 4, 3
    tables_of = js.embeddings(
        {"user": js.Table(24, 4)}, axis_name="shard", optimizer=js.rowwise_sgd(0.5)
    )

    def loss(params, batch, *, embedded):
        return ((embedded["user"] @ params["w"] - batch["y"]) ** 2).mean()

    mesh = js.make_mesh({"replica": 1, "shard": 2})
    step = js.make_train_step(loss, optax.sgd(0.1), mesh=mesh, embeddings=tables_of)
    state = step.init({"w": np.ones(4, np.float32)})
    tables = jax.tree.map(lambda x: x[0], state.params.tables)
    now, w, expected = np.array(tables_of.over(2).read(tables)["user"]), np.ones(4), []
    before = now.copy()  # the last update
    of_rows, of_w = np.zeros_like(now), np.zeros(4)
    for i, batch in enumerate(BATCHES):
        is_stale = i >= num_exact and i % accumulate == 0
        ids, y = batch["user"], batch["y"]
        vectors = (before if is_stale else now)[ids]
        error = vectors @ w - y
        expected.append(np.mean(error**2))
        np.add.at(of_rows, ids, 2 / len(y) * error[:, None] * w)
        of_w += 2 / len(y) * error @ vectors
        if (i + 1) % accumulate == 0:
            before = now.copy()
            now -= 0.5 * of_rows / accumulate
            w = w - 0.1 * of_w / accumulate
            of_rows, of_w = np.zeros_like(now), np.zeros(4)
    options = {"mode": "stale", "num_exact": num_exact, "accumulate": accumulate}
    pipeline = js.TrainPipeline(step, state, BATCHES, **options)
    np.testing.assert_allclose(losses_of(pipeline)[:, 0], expected, rtol=2e-5)
