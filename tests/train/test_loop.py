"""`js.train_loop`: the order of results, where it ends, when hooks run."""

import numpy as np
import pytest

import jaxslowmo as js
from train.small_loop import BATCHES, Note, make_step, start

step = make_step()


def test_results_and_hooks_come_in_the_order_of_steps():
    """Each hook when it is due, in the order given, before the result is yielded."""
    calls, found = [], []
    second = Note("b", calls, every=js.every(3, start=1, before="all"))
    for result in js.train_loop(
        step, start(step), BATCHES, hooks=(Note("a", calls, every=2), second)
    ):
        assert np.array_equal(result.state.step, [result.step] * 2)
        assert result.metrics["loss"].shape == (2,)
        found.append((result.step, result.phase, dict(result.reports)))
    assert calls == [("b", 1, {}), ("a", 2, {}), ("a", 4, {}), ("b", 4, {"a": 4}), ("a", 6, {})]
    average = ("average",)
    assert found == [
        (1, (), {"b": 1}),
        (2, average, {"a": 2}),
        (3, (), {}),
        (4, average, {"a": 4, "b": 4}),
        (5, (), {}),
        (6, average, {"a": 6}),
    ]


def test_stopping_early_takes_no_further_batch_and_goes_on_from_the_state():
    batches = iter(BATCHES)
    for result in js.train_loop(step, start(step), batches):
        if result.step == 3:
            break
    assert len(list(batches)) == 3
    assert np.array_equal(result.state.step, [3, 3])
    again = next(iter(js.train_loop(step, result.state, BATCHES)))
    assert np.array_equal(again.state.step, [4, 4])
    assert (again.step, again.phase) == (4, ("average",))


def test_num_steps_is_the_number_of_the_last_step():
    batches = iter(BATCHES)
    assert [r.step for r in js.train_loop(step, start(step), batches, num_steps=2)] == [1, 2]
    assert len(list(batches)) == 4
    assert list(js.train_loop(step, start(step), BATCHES, num_steps=0)) == []
    with pytest.raises(ValueError, match="after 6 of `num_steps`=9"):
        list(js.train_loop(step, start(step), BATCHES, num_steps=9))
    _, last = js.train_loop(step, start(step), BATCHES, num_steps=2)
    with pytest.warns(UserWarning, match=r"has done 2 .*`num_steps`=2 "):
        assert list(js.train_loop(step, last.state, BATCHES, num_steps=2)) == []
    loop = js.train_loop(step, last.state, BATCHES, num_steps=np.array(4))
    steps = [result.step for result in loop]
    assert (steps, {type(x) for x in steps}) == ([3, 4], {int})
