"""Pipelines that ask the tables for the next batch beside a step: the results of a plain loop."""

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support.exhaustive import sweep
from support.pairs import two_processes
from train.input.small import Gated, ctrl_c, next_in_time
from train.step.tables import DENSE, batches, step_of

ROOT = Path(__file__).parents[3]
BATCHES = batches(7)
WAYS = {
    "local_sgd": lambda: {"sync": js.local_sgd("replica", sync_every=2)},
    "host": lambda: {"sync": js.local_sgd("replica", sync_every=2), "mode": "host"},
    "gradients": lambda: {"gradients": js.all_reduce_gradients("replica")},
    "slowmo": lambda: {
        "sync": js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    },
}


def same(found, expected):
    """Bit for bit, with the compiler as users have it.

    As the suite has it (no optimization of loops) some sums of products differ in their last bit.
    """
    if "XLA_FLAGS" in os.environ:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


@functools.cache
def step_for(shard, shards, way):
    return step_of(shards, shard=shard, **WAYS[way]())


def plain(step, accumulate, steps=None):
    """Losses and the state of a loop over `collect` and `step`."""
    state, window, losses = step.init(DENSE), None, []
    for count, batch in enumerate(BATCHES[:steps], 1):
        if count % accumulate:
            window, metrics = step.collect(state, batch, window=window)
        else:
            state, metrics = step(state, batch, window=window)
            window = None
        losses.append(metrics["loss"])
    if window is not None:
        state, _ = step.apply(state, window)
    return losses, state


@functools.cache
def plainly(shard, shards, way, accumulate):
    losses, state = plain(step_for(shard, shards, way), accumulate)
    return np.stack(losses), jax.tree.map(np.asarray, state._replace(rng=state.step))


def check(shard, shards, way, mode, accumulate, drain=True, evaluate=()):
    step = step_for(shard, shards, way)
    losses, state = plainly(shard, shards, way, accumulate)
    pipeline = js.TrainPipeline(
        step, step.init(DENSE), mode=mode, accumulate=accumulate, drain=drain
    )
    evaluation = js.TrainPipeline(step.evaluate, pipeline, iter(BATCHES * 3))
    first, rest = iter(BATCHES[:4]), iter(BATCHES[4:])
    found = []
    for iterator in (first, rest, iter(())):
        while True:
            if len(found) in evaluate:
                next(evaluation)
            try:
                found.append(pipeline.progress(iterator).metrics["loss"])
            except StopIteration:
                break
        if drain and len(found) == len(BATCHES):
            break
    same(np.stack(found), losses[: len(found)])
    if drain:
        assert len(found) == len(BATCHES)
        done = pipeline.state
        jax.tree.map(same, jax.tree.map(np.asarray, done._replace(rng=done.step)), state)
    pipeline.close(), evaluation.close()
    return pipeline.report()


@pytest.mark.parametrize(
    ("shard", "shards", "way", "mode"),
    sweep(
        itertools.product(["row", "column", "table"], [2, 4], WAYS, ["exact", "patched"]),
        lambda *case: case == ("row", 2, "local_sgd", "patched"),
    ),
)
@pytest.mark.parametrize("accumulate", sweep([1, 2, 3, 5], lambda a: a == 2))
def test_results_are_those_of_a_plain_loop(shard, shards, way, mode, accumulate):
    if accumulate == 2 or 4 % accumulate == 0:  # windows do not end with the first iterator
        check(shard, shards, way, mode, accumulate)


@given(
    mode=st.sampled_from(["exact", "patched"]),
    drain=st.booleans(),
    evaluate=st.sets(st.integers(0, 6)),
)
def test_drained_or_not_and_evaluated_between(mode, drain, evaluate):
    report = check("row", 2, "local_sgd", mode, 1, drain, evaluate)
    assert (report.resent_share is None) == (mode == "exact")
    assert mode == "exact" or 0 < report.resent_share <= 1


def test_another_state_is_looked_up_anew():
    """Rows of the state that was there before must not be used."""
    step = step_for("row", 2, "local_sgd")
    expected, _ = plain(step, 1, 3)
    pipeline = js.TrainPipeline(
        step, step.init(DENSE), iter(BATCHES[4:] + BATCHES[:3]), mode="patched"
    )
    for _ in range(3):
        next(pipeline)
    pipeline.state = step.init(DENSE)
    found = [result.metrics["loss"] for result in pipeline]
    same(np.stack(found), np.stack(expected))


def test_ctrl_c_in_the_wait_for_the_batch_behind_loses_none():
    step, batches = step_for("row", 2, "local_sgd"), Gated(2, BATCHES)
    expected, _ = plainly("row", 2, "local_sgd", 1)
    pipeline = js.TrainPipeline(step, step.init(DENSE), batches)
    found = [next(pipeline)]
    with ctrl_c(), pytest.raises(KeyboardInterrupt):
        next(pipeline)
    batches.gate.set()
    found += pipeline
    same(np.stack([result.metrics["loss"] for result in found]), expected)


def test_a_batch_that_is_late_is_not_looked_ahead_for():
    """The one before it is trained, and nothing is lost."""
    step, batches = step_for("row", 2, "local_sgd"), Gated(2, BATCHES)
    expected, _ = plainly("row", 2, "local_sgd", 1)
    pipeline = js.TrainPipeline(step, step.init(DENSE), batches, timeout=0.2)
    found = [next_in_time(pipeline), next_in_time(pipeline)]
    with pytest.raises(TimeoutError):
        next(pipeline)
    batches.gate.set()
    found += iter(lambda: next_in_time(pipeline), None)
    same(np.stack([result.metrics["loss"] for result in found]), expected)


def test_a_measured_step():
    step = step_for("row", 2, "local_sgd")
    measured, batches = js.measured(step), itertools.cycle(BATCHES)
    expected, _ = plainly("row", 2, "local_sgd", 1)
    with js.TrainPipeline(measured, step.init(DENSE), batches, mode="patched") as pipeline:
        found = [next(pipeline).metrics["loss"] for _ in range(2)]
        assert pipeline.report().resent_share > 0
    same(np.stack(found), expected[:2])
    report = measured.report()
    assert (report.iteration, report.measured, report.missed) == (2, (1, 2), ())
    assert report.average.forward_compute_time > 0


def test_what_was_asked_must_be_there():
    step = step_for("row", 2, "local_sgd")
    with pytest.raises(ValueError, match=r"`asked` must be what .* got NoneType"):
        step.ahead("exact")(step.init(DENSE), BATCHES[0], None, BATCHES[1])


@pytest.mark.parametrize("mode", sweep(["exact", "patched"], lambda mode: mode == "patched"))
def test_what_was_asked_for_another_batch_is_refused(mode):
    """It gave the batch rows of the other one, silently. Equal ids in other arrays are the same."""
    step = step_for("row", 2, "local_sgd")
    ahead, state = step.ahead(mode), step.init(DENSE)
    asked = ahead.prime(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"`asked` is for another batch: .* feature 'item'"):
        ahead(state, BATCHES[1], asked, None)
    one_other = {**BATCHES[0], "user": BATCHES[0]["user"][::-1]}
    with pytest.raises(ValueError, match=r"`asked` is for another batch: .* feature 'user'"):
        ahead(state, one_other, asked, None)
    again = {**jax.tree.map(np.copy, BATCHES[0]), "y": BATCHES[0]["y"]}
    expected, _ = plainly("row", 2, "local_sgd", 1)
    state, metrics, asked = ahead(state, again, asked, BATCHES[1])
    same(metrics["loss"], expected[0])
    with pytest.raises(ValueError, match="`asked` is for another batch"):
        ahead(state, BATCHES[2], asked, None)
    _, metrics, asked = ahead(state, BATCHES[1], asked, None)
    same(metrics["loss"], expected[1])
    assert asked is None


def test_other_dtypes_and_paddings_of_the_ids_that_were_asked_for():
    """The carry is of the same rows, so the results are those of a plain loop."""
    step = step_for("row", 2, "local_sgd")
    ahead, state = step.ahead("patched"), step.init(DENSE)
    asked = ahead.prime(state, BATCHES[0])
    assert (BATCHES[0]["item"] == -1).any()
    other = np.where(BATCHES[0]["item"] < 0, -2, BATCHES[0]["item"]).astype(np.int16)
    _, metrics, _ = ahead(state, {**BATCHES[0], "item": other}, asked, None)
    same(metrics["loss"], plainly("row", 2, "local_sgd", 1)[0][0])


def test_a_step_that_looks_ahead_inside_of_jit():
    """Ids that are traced are not compared: nobody knows them yet."""
    step = step_for("row", 2, "local_sgd")
    ahead = step.ahead("exact")

    @jax.jit
    def both(state, first, again, second):
        state, metrics, asked = ahead(state, again, ahead.prime(state, first), second)
        return metrics["loss"], ahead(state, second, asked, None)[1]["loss"]

    again = jax.tree.map(np.copy, BATCHES[0])
    found = both(step.init(DENSE), BATCHES[0], again, BATCHES[1])
    expected, _ = plainly("row", 2, "local_sgd", 1)
    np.testing.assert_allclose(np.stack(found), expected[:2], rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["local_sgd", "host", "gradients"])
@pytest.mark.parametrize("shard", ["row", "column", "table"])
def test_bits_are_those_of_a_plain_loop(shard, way):
    """In a process of its own, with the compiler's usual options."""
    program = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
        "from train.input.test_beside import check\n"
        f"[check({shard!r}, 2, {way!r}, m, a) for m in ('exact', 'patched') for a in (1, 2)]"
    )
    own = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", program], check=True, env=own, cwd=ROOT / "tests")


PROGRAM = """
sys.path.insert(0, {tests!r})
import json
import numpy as np
import jaxslowmo as js
from train.step.tables import DENSE, batches, step_of

# Of each process two devices, one per replica: both hold a part of either replica's tables.
devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id))).reshape(2, 2).T
mesh = jax.sharding.Mesh(devices, ("replica", "shard"))
step = step_of(2, mesh=mesh, sync=js.local_sgd("replica", sync_every=2))
parts = [slice(4 * part, 4 * part + 4) for part in (rank, 2 + rank)]
own = [{{n: np.concatenate([x[p] for p in parts]) for n, x in b.items()}} for b in batches(4)]

def values(x):
    return [np.asarray(shard.data).ravel().tolist() for shard in x.addressable_shards]

def run(**options):
    pipeline = js.TrainPipeline(step, step.init(DENSE), own, **options)
    losses = [values(result.metrics["loss"]) for result in pipeline]
    shares.append(pipeline.report().resent_share)
    return losses, [values(x) for x in jax.tree.leaves(pipeline.state.params)]

shares = []
plain = run(depth=0)
print(json.dumps([plain == run(), plain == run(mode="patched"), plain[0], shares]))
"""


@pytest.mark.exhaustive
def test_tables_that_two_processes_share(tmp_path):
    program = PROGRAM.format(tests=str(ROOT / "tests"))
    printed = two_processes(program, tmp_path, seconds=240, devices=2)
    said = [json.loads(text.splitlines()[-1]) for text in printed]
    for exact, patched, losses, shares in said:
        assert (exact, patched) == (True, True)
        assert losses == said[0][2]  # of a replica, on all its devices
        assert shares[:2] == [None, None]
        assert 0 < shares[2] <= 1


@pytest.mark.parametrize(
    ("num_exact", "accumulate"), sweep([(0, 1), (3, 1), (0, 3)], lambda n, a: (n, a) == (0, 3))
)
def test_stale_rows_are_one_update_old(num_exact, accumulate):
    """Against NumPy: of an update the first batch sees rows of before the last one, others not."""
    made = js.embeddings(
        {"user": js.Table(24, 4)}, axis_name="shard", optimizer=js.rowwise_sgd(0.5)
    )

    def loss(params, batch, *, embedded):
        return ((embedded["user"] @ params["w"] - batch["y"]) ** 2).mean()

    step = js.make_train_step(
        loss, optax.sgd(0.1), mesh=js.make_mesh({"replica": 1, "shard": 2}), embeddings=made
    )
    state = step.init({"w": np.ones(4, np.float32)})
    sized = made.over(2)
    table = np.asarray(sized.read(jax.tree.map(lambda x: x[0], state.params.tables))["user"])
    now, w, expected = table.copy(), np.ones(4), []
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
    found = [result.metrics["loss"][0] for result in pipeline]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "late"}, "`mode`"),
        ({"mode": "stale", "depth": 0}, "`depth` > 0"),
        ({"mode": "exact", "num_exact": 2}, "`num_exact`"),
        ({"mode": "stale", "num_exact": -1}, "`num_exact`"),
        ({"mode": "patched", "room": 0.0}, "`room`"),
        ({"mode": "patched", "room": "half"}, "`room`"),
    ],
)
def test_modes_that_cannot_be(options, message):
    step = step_for("row", 2, "local_sgd")
    with pytest.raises(ValueError, match=message):
        js.TrainPipeline(step, step.init(DENSE), BATCHES, **options)


def test_modes_are_of_steps_with_tables():
    step = js.make_train_step(
        lambda params, batch: (params["w"] * batch).mean(),
        optax.sgd(0.1),
        sync="none",
        mesh=js.virtual_mesh({"replica": 2}),
    )
    with pytest.raises(ValueError, match="none: make it with"):
        js.TrainPipeline(step, step.init({"w": np.ones(2)}), [np.ones((2, 2))], mode="patched")
