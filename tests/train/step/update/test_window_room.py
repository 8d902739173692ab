"""Windows of gradients beside tables: as many programs for many batches as for few."""

import warnings

import jax
import numpy as np
import pytest

import jaxslowmo as js
from train.step.tables import DENSE, batches, step_of

BATCHES = batches(6)


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_programs_do_not_grow_with_the_batches_of_an_update(compilations, prefetch):
    def programs(accumulate):
        step = step_of(2, gradients=js.all_reduce_gradients("replica"))
        state = step.init(DENSE)

        made, before = batches(2 * accumulate + 1), compilations.count
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of buffers that were donated in vain
            list(js.train_loop(step, state, made, accumulate=accumulate, prefetch=prefetch))
        return compilations.count - before

    assert programs(3) == programs(9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "num_batches", [pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 9)] + [3]
)
def test_room_changes_no_result(num_batches, weighted):
    """Too little, enough, and too much of it, with a batch of another shape in between."""
    step = step_of(2, sync=js.local_sgd("replica", sync_every=2), donate=False)
    weights = [[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [1.0, 1.0]] if weighted else [None] * 4
    other = batches(1, seed=5, rows=2 * 4)[0]
    inputs = [BATCHES[0], BATCHES[1], other, BATCHES[2]]

    def updated(**room):
        window = None
        for batch, weight in zip(inputs, weights, strict=True):
            window, _ = step.collect(state, batch, weight, window=window, **room)
        return step(state, BATCHES[3], weights[0], window=window), step.apply(state, window)

    state, _ = step(step.init(DENSE), BATCHES[4])
    pairs = map(jax.tree.leaves, (updated(), updated(num_batches=num_batches)))
    for one, other_one in zip(*pairs, strict=True):
        if not jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            # A batch for which there was no room is added last, whenever it came.
            np.testing.assert_allclose(one, other_one, rtol=1e-5, atol=1e-6)


def test_a_count_that_is_none():
    step = step_of(1, sync="none")
    with pytest.raises(ValueError, match=r"`num_batches` counts batches.*>= 0, got -1"):
        step.collect(step.init(DENSE), BATCHES[0], num_batches=-1)
