"""Tests of `js.train_loop`: order of results, where it ends, when hooks run."""

import re

import numpy as np
import pytest

import jaxslowmo as js
from train.small_loop import BATCHES, Note, make_step, start


@pytest.fixture(scope="module")
def step():
    return make_step()


def test_results_come_in_the_order_of_steps(step):
    results = []
    for result in js.train_loop(step, start(step), BATCHES):
        assert np.array_equal(result.state.step, [result.step] * 2)
        assert result.metrics["loss"].shape == (2,)
        results.append((result.step, result.phase))
    assert results == [(t, ("average",) if t % 2 == 0 else ()) for t in range(1, 7)]


def test_a_plain_function_is_refused_as_a_hook(step):
    """A function has no `every`; the error comes before the first batch is drawn."""

    def note(result):
        return None

    with pytest.raises(ValueError, match=r"`hooks` must .* attribute `every`.* got note without"):
        js.train_loop(step, start(step), BATCHES, hooks=[note])


def test_hooks_run_in_order_before_the_yield(step):
    calls = []
    hooks = (
        Note("a", calls, every=2),
        Note("b", calls, every=js.every(3, start=1, before="all")),
    )
    reports = [
        (r.step, dict(r.reports)) for r in js.train_loop(step, start(step), BATCHES, hooks=hooks)
    ]
    assert calls == [("b", 1, {}), ("a", 2, {}), ("a", 4, {}), ("b", 4, {"a": 4}), ("a", 6, {})]
    assert reports == [
        (1, {"b": 1}),
        (2, {"a": 2}),
        (3, {}),
        (4, {"a": 4, "b": 4}),
        (5, {}),
        (6, {"a": 6}),
    ]


def test_stopping_early_runs_no_further_step(step):
    taken = []

    def batches():
        for i, batch in enumerate(BATCHES):
            taken.append(i)
            yield batch

    for result in js.train_loop(step, start(step), batches()):
        if result.step == 3:
            break
    assert taken == [0, 1, 2]
    assert np.array_equal(result.state.step, [3, 3])
    again = next(iter(js.train_loop(step, result.state, BATCHES)))
    assert np.array_equal(again.state.step, [4, 4])
    assert (again.step, again.phase) == (1, ("average",))


def test_num_steps_takes_no_batch_too_many(step):
    batches = iter(BATCHES)
    results = list(js.train_loop(step, start(step), batches, num_steps=2))
    assert [r.step for r in results] == [1, 2]
    assert len(list(batches)) == 4
    assert list(js.train_loop(step, start(step), BATCHES, num_steps=0)) == []


def test_batches_that_end_early_raise_after_the_last_step(step):
    loop = js.train_loop(step, start(step), BATCHES[:2], num_steps=3)
    assert [next(loop).step, next(loop).step] == [1, 2]
    with pytest.raises(ValueError, match=r"`batches` ended after 2 of `num_steps`=3 steps"):
        next(loop)


@pytest.mark.parametrize("argument", ["num_steps", "start"])
@pytest.mark.parametrize("value", [-1, 2.5, float("nan"), True, "2"])
def test_what_counts_no_steps_is_refused_at_the_call(step, argument, value):
    rule = f"`{argument}` counts steps and must be an int >= 0, got {value!r}."
    with pytest.raises(ValueError, match=re.escape(rule)):
        js.train_loop(step, start(step), BATCHES, **{argument: value})


def test_any_integers_count_steps(step):
    loop = js.train_loop(step, start(step), BATCHES, num_steps=np.array(3), start=np.int8(1))
    steps = [result.step for result in loop]
    assert (steps, {type(x) for x in steps}) == ([2, 3], {int})


@pytest.mark.parametrize("every", [0, "2", 2.5, True])
def test_what_is_no_period_is_refused_when_a_hook_is_made(every):
    mesh = js.virtual_mesh({"replica": 2})
    for make in (
        lambda: js.Log(print, every=every),
        lambda: js.Evaluate(lambda params, model_state: {}, mesh=mesh, every=every),
    ):
        with pytest.raises(ValueError, match=f"`every` .* >= 1, got {every!r}"):
            make()


def test_your_own_hook_with_a_period_below_one_is_refused(step):
    class OwnHook:
        every = 0

    with pytest.raises(ValueError, match=r"`every` .* >= 1, got 0"):
        next(js.train_loop(step, start(step), BATCHES, hooks=(OwnHook(),)))
