"""The best split, against all splits; without `parts` a pipeline takes that of the bytes."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js


def best_of_all(costs, num_blocks):
    """The block ends: cheapest largest block, then least sum of squares, then earliest ends."""

    def rank(inner):
        ends = (0, *inner, len(costs))
        loads = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(loads), sum(load**2 for load in loads), ends

    return list(pairwise(min(map(rank, combinations(range(1, len(costs)), num_blocks - 1)))[2]))


@settings(max_examples=100)
@given(st.data())
def test_no_split_is_better(data):
    num_stages = data.draw(st.integers(1, 4))
    num_chunks = data.draw(st.integers(1, 2))
    num_blocks = num_stages * num_chunks
    # Eighths: their sums are exact. Zeros and equal costs: ties.
    numbers = st.integers(0, 24).map(lambda n: n / 8)
    costs = data.draw(st.lists(numbers, min_size=num_blocks, max_size=num_blocks + 5))
    parts = js.partition_by_cost(costs, num_stages, num_chunks)
    blocks = [parts[k % num_stages][k // num_stages] for k in range(num_blocks)]
    assert blocks == best_of_all(costs, num_blocks)


def test_costs_may_be_of_any_number_type():
    costs = [1.0, 2.0, 3.0, 5.0]
    for found in (jnp.asarray(costs, jnp.bfloat16), np.asarray(costs, np.float16), iter(costs)):
        assert js.partition_by_cost(found, 2) == js.partition_by_cost(costs, 2)


@given(st.lists(st.sampled_from([0, 1, 5, 30]), min_size=4, max_size=9), st.sampled_from([1, 2]))
def test_without_parts_stages_have_as_few_bytes_as_can_be(sizes, chunks):
    """A byte more for each layer distributes those without parameters evenly."""
    params = [jax.ShapeDtypeStruct((n,), np.dtype("float16")) if n else {} for n in sizes]
    model = js.LayeredModel([lambda p, x: x] * len(params), lambda x, batch: x.sum())
    schedule = js.schedules.interleaved(2, 2, chunks)
    pipe = js.pipelined(model, params, schedule, mesh=js.make_mesh({"stage": 2}))
    blocks = [tuple(block) for block in pipe.layout.blocks]
    assert blocks == best_of_all([1 + 2 * n for n in sizes], 2 * chunks)
