"""Several batches of a pipeline as one update: which, and what becomes of those at the end."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.exhaustive import sweep
from train.input import windows
from train.input.small import BATCHES, Counted, assert_same, host, losses_of, small_step
from train.input.small import start as small_start
from train.input.windows import NUM, Updates, batch_of, telling_step

DOCS = Path(__file__).parents[3] / "docs"
PARTIALS = "step", "discard", "error"


def pipeline_of(batches=None, **options):
    return js.TrainPipeline(telling_step(), windows.start(), batches, **options)


def batches_of(numbers):
    return map(batch_of, numbers)


@pytest.mark.parametrize("case", windows.recorded(), ids=lambda case: str(case["id"]))
def test_recorded_calls_by_the_rule(case):
    """Training and evaluation take turns on one iterator, as there; evaluation counts nothing."""
    size, calls = case["grad_accum"] or 1, len(case["calls"]) - 1
    iterator = batches_of(range(calls))
    training = pipeline_of(accumulate=size, depth=0, partial="discard")
    evaluation = js.TrainPipeline(telling_step().evaluate, training, depth=0)
    updates, trained = Updates(), []
    for i, mode in zip(range(calls), case["modes"], strict=False):
        if mode == "eval":
            evaluation.progress(iterator)
            continue
        trained.append(i)
        result = training.progress(iterator)
        assert result.is_update == (len(trained) % size == 0)
        assert result.step == len(trained) // size
        updates.see(training.state)
    assert updates.found == windows.windows(trained, size)
    there = [update["batches"] for update in case["updates"]]
    if size == 2 or case["grad_accum"] is None:
        assert updates.found == there
    else:  # none that it makes of whole windows is lost here
        assert set(itertools.chain(*there)) <= set(itertools.chain(*updates.found)) | set(
            trained[len(trained) // size * size :]
        )


def test_the_page_has_the_table():
    assert windows.table() in (DOCS / "accumulation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("partial", PARTIALS)
def test_what_becomes_of_the_batches_at_the_end(partial, depth):
    batches = Counted([batch_of(i) for i in range(5)])
    pipeline = pipeline_of(batches, accumulate=3, partial=partial, depth=depth)
    updates, results = Updates(), []
    for _ in range(5):
        results.append(pipeline.progress())
        updates.see(pipeline.state)
    assert [r.is_update for r in results] == [False, False, True, False, False]
    assert [r.step for r in results] == [0, 0, 1, 1, 1]
    before = {"next_index": 0}
    assert [r.position for r in results] == [before] * 2 + [{"next_index": 3}] * 3
    if partial == "error":
        with pytest.raises(ValueError, match="ended after 2 of the 3 of an update"):
            pipeline.progress()
        pipeline.progress(batches_of([5]))  # they waited for it
        updates.see(pipeline.state)
        assert updates.found == [[0, 1, 2], [3, 4, 5]]
        return
    for _ in range(2):
        assert next(pipeline, None) is None
        updates.see(pipeline.state)
    assert updates.found == ([[0, 1, 2], [3, 4]] if partial == "step" else [[0, 1, 2]])
    assert pipeline.position == {"next_index": 5 if partial == "step" else 3}


def test_the_update_of_a_partial_window_is_told():
    pipeline = pipeline_of(batches_of(range(3)), accumulate=2)
    losses = [np.asarray(result.metrics["loss"]) for result in pipeline]
    told = pipeline.partial_update
    assert told.is_update
    assert told.step == 2
    assert told.state is pipeline.state
    np.testing.assert_array_equal(told.metrics["loss"], losses[2])
    assert next(pipeline, None) is None  # asked again
    assert pipeline.partial_update is None


@st.composite
def runs(draw):
    """Lengths of iterators, and where an evaluation comes between two calls."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    return {
        "lengths": lengths,
        "accumulate": draw(st.sampled_from([1, 2, 3, 5])),
        "partial": draw(st.sampled_from(PARTIALS)),
        "drain": draw(st.booleans()),
        "depth": draw(st.sampled_from([0, 1, 3])),
        "evaluations": draw(st.sets(st.integers(0, 12))),
    }


def by_calls(run):
    """The same by calls of the step, and no pipeline: losses, number of updates, final state."""
    step, state = small_step(), small_start(small_step())
    losses, window, held, updates = [], [], [], 0
    numbers = iter(range(100))

    def update(state, window):
        gathered = None
        for i in window:
            gathered, _ = step.collect(state, BATCHES[i % 9], window=gathered)
        return step.apply(state, gathered)[0]

    for length in run["lengths"]:
        held += [next(numbers) for _ in range(length)]
        kept = 0 if run["drain"] else run["depth"]
        while len(held) > kept:
            i = held.pop(0)
            losses.append(np.asarray(step.evaluate(state, BATCHES[i % 9])["loss"]))
            window.append(i)
            if len(window) == run["accumulate"]:
                gathered = None
                for j in window[:-1]:
                    gathered, _ = step.collect(state, BATCHES[j % 9], window=gathered)
                state, _ = step(state, BATCHES[i % 9], window=gathered)
                window, updates = [], updates + 1
        if run["drain"] and window and run["partial"] != "error":
            if run["partial"] == "step":
                state, updates = update(state, window), updates + 1
            window = []
    return losses, updates, host(state)


@settings(max_examples=25, deadline=None)
@given(runs())
def test_a_pipeline_is_the_calls_it_stands_for(run):
    """Bit for bit, over several iterators, with evaluation in between, held or drained."""
    step = small_step()
    training = js.TrainPipeline(
        step, small_start(step), accumulate=run["accumulate"], partial=run["partial"],
        drain=run["drain"], depth=run["depth"],
    )  # fmt: skip
    evaluation = js.TrainPipeline(
        step.evaluate, training, itertools.cycle(BATCHES), depth=run["depth"]
    )
    numbers, results = iter(range(100)), []
    with training, evaluation:
        for length in run["lengths"]:
            iterator = iter([BATCHES[next(numbers) % 9] for _ in range(length)])
            while True:
                if len(results) in run["evaluations"]:
                    next(evaluation)
                try:
                    results.append(training.progress(iterator))
                except StopIteration:
                    break
                except ValueError as error:
                    if run["partial"] != "error" or "of an update" not in str(error):
                        raise
                    break
        losses, updates, state = by_calls(run)
        assert_same(losses_of(results), losses)
        assert int(training.state.step[0]) == updates
        assert_same(host(training.state), state)


@pytest.mark.parametrize("at", range(6))
def test_a_run_that_is_resumed_in_the_middle_of_an_update_trains_every_batch_once(at):
    numbers = [batch_of(i) for i in range(7)]
    pipeline = pipeline_of(Counted(numbers), accumulate=3)
    updates = Updates()
    for _ in range(at):
        pipeline.progress()
        updates.see(pipeline.state)
    batches = Counted(numbers)
    batches.set_state(pipeline.position)
    resumed = js.TrainPipeline(telling_step(), pipeline.state, batches, accumulate=3)
    for _ in resumed:
        updates.see(resumed.state)
    updates.see(resumed.state)
    assert updates.found == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterator_that_raises_in_the_middle_of_an_update_loses_nothing(depth):
    class Broken:
        def __init__(self):
            self.items = iter([0, 1, 2, 3, OSError("gone"), 4, 5])

        def __iter__(self):
            return self

        def __next__(self):
            item = next(self.items)
            if isinstance(item, Exception):
                raise item
            return batch_of(item)

    pipeline, updates, errors = pipeline_of(Broken(), accumulate=3, depth=depth), Updates(), 0
    for _ in range(7):
        try:
            pipeline.progress()
        except OSError:
            errors += 1
        updates.see(pipeline.state)
    assert errors == 1
    assert updates.found == [[0, 1, 2], [3, 4, 5]]


def test_replicas_with_different_amounts_of_data():
    """Means over all examples of an update, by hand; one replica is idle in all of the last."""
    shares = [[np.eye(NUM, dtype=np.float32)[[i, i]] for i in range(5)],
              [np.eye(NUM, dtype=np.float32)[[i, i]] for i in (8, 9, 10)]]  # fmt: skip
    mesh = telling_step().mesh
    batches = js.uneven_batches(shares, mesh=mesh)
    found, before = [], np.zeros(NUM)
    for result in js.train_loop(telling_step(), windows.start(), batches, accumulate=2):
        now = np.asarray(result.state.params["w"])
        np.testing.assert_array_equal(now[0], now[1])
        found.append(before - now[0])
        before = now[0]
        np.testing.assert_array_equal(
            result.metrics["weight"], [[4, 4], [4, 2], [2, 0]][result.step - 1]
        )
    expected = np.zeros((3, NUM))
    expected[0, [0, 1, 8, 9]] = 1 / 4
    expected[1, [2, 3, 10]] = 1 / 3
    expected[2, 4] = 1
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_loop_yields_updates_with_means_of_their_metrics(size):
    step = small_step()
    seen = []

    class Hook:
        every = 2

        def __call__(self, result):
            seen.append(result.step)

    pipeline = js.TrainPipeline(step, small_start(step), iter(BATCHES), accumulate=size)
    each = losses_of(pipeline)
    results = js.train_loop(step, small_start(step), list(BATCHES), accumulate=size, hooks=[Hook()])
    found = [(r.step, np.asarray(r.metrics["loss"]), bool(r.phase)) for r in results]
    count = -(-len(BATCHES) // size)
    assert [f[0] for f in found] == list(range(1, count + 1))
    assert [f[2] for f in found] == [t % 2 == 0 for t in range(1, count + 1)]  # updates count
    assert seen == list(range(2, count + 1, 2))
    for t, loss, _ in found:
        mean = np.mean(each[(t - 1) * size : t * size], axis=0)
        np.testing.assert_allclose(loss, mean, rtol=1e-6)


def test_a_loop_tells_of_the_loss_scale():
    step = js.make_train_step(
        lambda p, b: jnp.mean(b @ p["w"]),
        js.dynamic_loss_scale(optax.sgd(0.1), initial=8.0, growth_interval=1),
        sync=js.local_sgd("replica"),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    results = js.train_loop(step, small_start(step), list(BATCHES[:5]), accumulate=2)
    told = [(r.metrics["loss_scale"], r.metrics["skipped_updates"]) for r in results]
    np.testing.assert_array_equal(told, [[[2.0**k] * 2, [0, 0]] for k in (3, 4, 5)])


def test_a_loop_takes_the_batches_of_its_steps_and_no_more():
    step, batches = small_step(), Counted()
    loop = js.train_loop(
        step, small_start(step), batches, num_steps=3, start=1, accumulate=4, prefetch=2
    )
    assert [(r.step, r.position) for r in loop] == [
        (2, {"next_index": 4}), (3, {"next_index": 8}),
    ]  # fmt: skip
    assert batches.next_index == 8
    with pytest.raises(ValueError, match=r"ended after 3 of `num_steps`=5"):
        list(js.train_loop(step, small_start(step), Counted(), num_steps=5, accumulate=4))
    pipeline = js.TrainPipeline(step, small_start(step), Counted(), accumulate=4)
    next(pipeline)
    assert [r.step for r in js.train_loop(pipeline)] == [1, 2, 3]
    with pytest.raises(ValueError, match="ended after 1 of the 4"):
        list(js.train_loop(step, small_start(step), BATCHES, accumulate=4, partial="error"))


TRANSFORMS = {
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "slowmo": js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=1), sync_every=2, learning_rate=0.1
    ),
    "sgp": js.sgp("replica"),
    "diloco": js.diloco("replica", sync_every=2),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    sweep(
        itertools.product(TRANSFORMS, ("traced", "host")),
        lambda name, mode: (name, mode) in {("sgp", "host"), ("slowmo", "traced")},
    ),
)
def test_updates_are_those_of_one_large_batch(name, mode):
    """Their number, and so what is exchanged when, is that of a step that splits its batch."""

    def made(**options):
        return js.make_train_step(
            lambda params, batch: np.float32(1) * ((batch @ params["w"]) ** 2).mean(),
            optax.sgd(0.05, momentum=0.9),
            sync=TRANSFORMS[name],
            mesh=js.virtual_mesh({"replica": 2}),
            mode=mode,
            **options,
        )

    step, whole = made(), made(accumulate=2)
    large = [
        np.concatenate([part for pair in zip(*(np.split(b, 2) for b in two), strict=True)
                        for part in pair])
        for two in zip(BATCHES[:8:2], BATCHES[1:8:2], strict=True)
    ]  # fmt: skip
    found = list(js.train_loop(step, small_start(step), BATCHES[:8], accumulate=2))
    wanted = list(js.train_loop(whole, small_start(whole), large))
    assert [r.phase for r in found] == [r.phase for r in wanted]
    for one, other in zip(host(found[-1].state), host(wanted[-1].state), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)


def test_a_measured_step_accumulates():
    step = js.measured(small_step("devices"))
    results = list(js.train_loop(step, small_start(step), BATCHES[:4], accumulate=2))
    plain = list(js.train_loop(small_step("devices"), small_start(step), BATCHES[:4], accumulate=2))
    assert_same(losses_of(results), losses_of(plain))
    assert step.report().measured == (1, 2)


def test_wrong_arguments_are_named():
    step = small_step()
    state = small_start(step)
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ValueError, match="`accumulate` counts batches"):
            js.TrainPipeline(step, state, accumulate=wrong)
        with pytest.raises(ValueError, match="`accumulate` counts batches"):
            js.train_loop(step, state, BATCHES, num_steps=3, accumulate=wrong)
    with pytest.raises(ValueError, match=r'`partial` must be "step", "discard" or "error"'):
        js.TrainPipeline(step, state, partial="drop")
    with pytest.raises(ValueError, match=r"needs a step of js\.make_train_step"):
        js.TrainPipeline(lambda state, batch: (state, {}), state, accumulate=2)
    with pytest.raises(ValueError, match="a pipeline that evaluates makes none"):
        js.TrainPipeline(step.evaluate, lambda: state, accumulate=2)
    with pytest.raises(ValueError, match="`prefetch`, `accumulate` and `partial` out"):
        js.train_loop(js.TrainPipeline(step, state), accumulate=2)
