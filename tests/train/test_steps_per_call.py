"""`js.train_loop(steps_per_call=K)`: the loop of single calls, with K updates in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.refusals import Refusal, each
from train.small_loop import BATCHES, Note, make_step, start
from train.step.tables import DENSE
from train.step.tables import batches as batches_of_ids
from train.step.tables import step_of as step_with_tables

MANY = np.random.default_rng(1).normal(size=(11, 8, 3)).astype(np.float32)


def refilled():
    """An iterator that fills one array again and again."""
    array = np.empty_like(MANY[0])
    for batch in MANY:
        array[...] = batch
        yield {"x": array}


def step_of(mesh, mode, **options):
    return js.make_train_step(
        lambda p, b: (jnp.mean((jnp.tanh(b["x"]) @ p["w"] - 1) ** 2), {"mean": b["x"].mean(0)}),
        optax.adam(0.1),
        sync=js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6),
        mesh=mesh,
        mode=mode,
        **options,
    )


def copied(result):
    """What a hook sees, whose buffers the next call donates."""
    return jax.tree.map(np.array, (result.state, result.last_metrics))


def same(found, wanted):
    """XLA of jax 0.12 adds in another order inside of a loop."""
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode", "prefetch"), [("virtual", "traced", 0), ("devices", "host", 2)]
)
def test_results_are_those_of_single_calls(mesh_of, kind, mode, prefetch):
    axes = {"replica": 4}
    step = step_of(js.virtual_mesh(axes) if kind == "virtual" else mesh_of(axes), mode)
    single = {}
    for result in js.train_loop(step, start(step), refilled(), hooks=[]):
        single[result.step] = *copied(result), result.phase
    notes, ends = [], []
    hooks = [Note("a", notes, every=5)]
    loop = js.train_loop(
        step, start(step), refilled(), hooks=hooks, prefetch=prefetch, steps_per_call=4
    )
    for result in loop:
        first = result.step - result.num_updates + 1
        ends.append((first, result.step))
        state, metrics, phase = single[result.step]
        jax.tree.map(same, copied(result), (state, metrics))
        assert result.phase == phase
        for i, t in enumerate(range(first, result.step + 1)):
            of_update = jax.tree.map(lambda x, i=i: np.asarray(x[i]), result.metrics)
            jax.tree.map(same, of_update, single[t][1])
    assert ends == [(1, 4), (5, 5), (6, 9), (10, 10), (11, 11)]
    assert [step for _, step, _ in notes] == [5, 10]


def halve(result):
    params = jax.tree.map(lambda x: x / 2, result.state.params)
    result.state = result.state._replace(params=params)


halve.every = 2


def test_hooks_see_what_single_calls_show_them_and_change_the_state():
    step = make_step()

    def run(**options):
        written = []
        evaluate = js.train.Evaluate(lambda p, s: {"w": p["w"].sum()}, mesh=step.mesh, every=3)
        hooks = [evaluate, js.train.Log(written.append, every=2), halve]
        results = list(js.train_loop(step, start(step), BATCHES, hooks=hooks, **options))
        return written, {r.step: r.reports for r in results if r.reports}

    jax.tree.map(same, run(steps_per_call=10), run())


def test_a_call_takes_no_batch_that_it_does_not_run():
    step, batches = make_step(), iter(BATCHES)
    loop = js.train_loop(step, start(step), batches, num_steps=5, steps_per_call=3)
    assert next(loop).step == 3
    assert len(list(batches)) == 3


def test_a_call_ends_before_a_batch_of_another_shape_and_before_an_error():
    step = make_step()

    def batches():
        yield from BATCHES[:2]
        yield from jnp.asarray(BATCHES[2:5, :2])
        raise KeyError("lost")

    loop = js.train_loop(step, start(step), batches(), steps_per_call=4)
    assert [next(loop).step, next(loop).step] == [2, 5]
    with pytest.raises(KeyError, match="lost"):
        next(loop)
    loop = js.train_loop(step, start(step), BATCHES, num_steps=8, steps_per_call=4)
    assert [next(loop).step, next(loop).step] == [4, 6]
    with pytest.raises(ValueError, match="after 6 of `num_steps`=8"):
        next(loop)


def looped(step=None, state=None, batches=BATCHES, **options):
    step = make_step() if step is None else step
    if not isinstance(step, js.TrainPipeline):
        options |= {"state": start(step) if state is None else state, "batches": batches}
    return list(js.train_loop(step, **{"steps_per_call": 2, **options}))


def with_tables():
    step = step_with_tables(2, sync=js.local_sgd("replica"))
    looped(step, step.init(DENSE), batches_of_ids(2))


def weighted():
    shares = [list(BATCHES[:, :2]), list(BATCHES[:3, :2])]
    looped(batches=js.train.uneven_batches(shares, mesh=make_step().mesh))


REFUSED = {
    "accumulate": Refusal(lambda: looped(accumulate=2), "`accumulate`", 2),
    "weights": Refusal(weighted, "js.train.WeightedBatch"),
    "a pipeline": Refusal(lambda: looped(js.TrainPipeline(make_step(), None, [])), "TrainPipeline"),
    "tables": Refusal(with_tables, "`embeddings`"),
}


@each(REFUSED)
def test_refused(refusal):
    refusal.check()
