"""The loop around a pipeline, and threads of loops that end in an error."""

import itertools

import jax
import numpy as np
import pytest

import jaxslowmo as js
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


def test_the_loop_around_a_pipeline():
    """Which goes on where the loop ended: with its batches, state and numbers of the loop."""
    calls, pipeline = [], pipeline_of(BATCHES, stages=[jax.jit(lambda b: b)])
    hooks = [Note("a", calls, every=2)]
    losses = losses_of(js.train_loop(pipeline, num_steps=4, hooks=hooks))
    more = [(r.step, np.asarray(r.metrics["loss"])) for r in js.train_loop(pipeline)]
    assert [t for t, _ in more] == [5, 6, 7, 8, 9]
    assert_same(losses + [loss for _, loss in more], plain())
    assert [step for _, step, _ in calls] == [2, 4]
    with pytest.raises(ValueError, match="after 9 of `num_steps`=11"):
        list(js.train_loop(pipeline, num_steps=11))


def test_an_error_in_a_hook_ends_the_thread():
    def fail(result):
        raise OSError("full")

    fail.every, step = 2, small_step()
    loop = js.train_loop(step, start(step), itertools.cycle(BATCHES), hooks=[fail], prefetch=2)
    with pytest.raises(OSError, match="full"):
        list(loop)
    assert loaders() == []
