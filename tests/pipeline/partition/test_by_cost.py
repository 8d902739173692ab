"""The best split, against all splits."""

import math
from itertools import combinations, pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js


def best_of_all(costs, num_blocks):
    """The block ends: cheapest largest block, then least sum of squares, then earliest ends."""

    def rank(inner):
        ends = (0, *inner, len(costs))
        loads = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(loads), sum(load**2 for load in loads), ends

    return min(map(rank, combinations(range(1, len(costs)), num_blocks - 1)))


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
    largest, squares, ends = best_of_all(costs, num_blocks)
    assert blocks == list(pairwise(ends))
    loads = [sum(costs[a:b]) for a, b in blocks]
    assert (max(loads), sum(load**2 for load in loads)) == (largest, squares)


def test_an_expensive_embedding_and_loss_leave_the_middle_to_others():
    costs = [4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    assert js.partition_by_cost(costs, 4) == [[(0, 1)], [(1, 4)], [(4, 7)], [(7, 8)]]


@given(st.lists(st.integers(1, 20), min_size=5, max_size=12), st.integers(2, 4))
def test_the_heaviest_block_is_that_of_the_balanced_rule(weights, num_stages):
    def loads(parts):
        return [sum(weights[a:b]) for ((a, b),) in parts]

    ours, theirs = (f(weights, num_stages) for f in (js.partition_by_cost, js.partition_balanced))
    assert max(loads(ours)) == max(loads(theirs))
    assert sum(x**2 for x in loads(ours)) <= sum(x**2 for x in loads(theirs))


def test_hundreds_of_layers():
    parts = js.partition_by_cost([1 + i % 7 for i in range(300)], 16, 2)
    loads = [sum(1 + i % 7 for i in range(a, b)) for blocks in parts for a, b in blocks]
    assert sum(loads) == sum(1 + i % 7 for i in range(300))
    assert max(loads) - sum(loads) / 32 < 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 4), r"got 3 layers for `num_stages`=4 times `num_chunks`=1"),
        (([1, 2, 3], 2, 2), r"got 3 layers for `num_stages`=2 times `num_chunks`=2"),
        (([1, -2.5], 2), r"`costs` must be finite and >= 0, got -2.5 for layer 1"),
        (([math.nan, 1], 2), r"`costs` must be finite and >= 0, got nan for layer 0"),
        (([1, math.inf], 2), r"`costs` must be finite and >= 0, got inf for layer 1"),
        (({1: 2, 3: 4}, 1), r"`costs` must hold one number per layer"),
        (({"a": 1}, 1), r"`costs` must hold one number per layer"),
        (([True, False], 1), r"`costs` must hold one number per layer"),
        (([1, 2], 0), r"`num_stages` must be an int >= 1, got 0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"partition_by_cost: .*{message}"):
        js.partition_by_cost(*arguments)


def test_costs_may_be_of_any_number_type():
    costs = [1.0, 2.0, 3.0, 5.0]
    for found in (jnp.asarray(costs, jnp.bfloat16), np.asarray(costs, np.float16), iter(costs)):
        assert js.partition_by_cost(found, 2) == js.partition_by_cost(costs, 2)
