"""Blocks of layers for stages: the best ones, ColossalAI's, and what layers cost."""

import json
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.bad_input import warning_messages
from support.golden_peers import FOLDER


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


@given(st.lists(st.sampled_from([0, 1, 5, 30]), min_size=4, max_size=9), st.sampled_from([1, 2]))
def test_without_parts_stages_have_as_few_bytes_as_can_be(sizes, chunks):
    """A byte more for each layer distributes those without parameters evenly."""
    params = [jax.ShapeDtypeStruct((n,), np.dtype("float16")) if n else {} for n in sizes]
    model = js.LayeredModel([lambda p, x: x] * len(params), lambda x, batch: x.sum())
    schedule = js.schedules.interleaved(2, 2, chunks)
    pipe = js.pipelined(model, params, schedule, mesh=js.make_mesh({"stage": 2}))
    blocks = [tuple(block) for block in pipe.layout.blocks]
    assert blocks == best_of_all([1 + 2 * n for n in sizes], 2 * chunks)


CASES = json.loads((FOLDER / "pipeline_partition.json").read_text())["cases"]


@pytest.mark.parametrize("name", ["partition_uniform", "partition_balanced"])
def test_equal_to_colossalai(name):
    for case in (case for case in CASES if case["fn"] == name):
        what = case["num_items"] if name == "partition_uniform" else case["weights"]

        def split(case=case, what=what):
            return getattr(js, name)(what, case["pp_size"], case["num_chunks"])

        if "error" in case:
            with pytest.raises(ValueError, match=f"`num_chunks`={case['num_chunks']}"):
                split()
            continue
        found = []
        messages = warning_messages(lambda split=split, found=found: found.append(split()))
        assert found == [[[tuple(block) for block in blocks] for blocks in case["parts"]]]
        assert len(messages) == case["warnings"]


def test_products_and_the_loss_are_the_cost_and_equal_layers_are_compiled_once(compilations):
    def block(w, x):
        return jnp.tanh(x @ w)

    layers, loss = [lambda w, x: x @ w, *[block] * 5], lambda x, batch: jnp.sum(x * x + x)
    types = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 6
    before = compilations.count
    flops = js.pipeline.layer_flops(js.LayeredModel(layers, loss), types, np.zeros((8, 16)))
    assert compilations.count - before == 3 * 2  # the first, those between, the last
    product = 2 * 8 * 16 * 16
    assert flops[0].forward == product
    for layer in flops[1:5]:
        assert product <= layer.forward <= product + 3 * 8 * 16
        # Gradients of weights and of the input: a product each.
        assert 2 * product <= layer.backward <= 2 * product + 8 * 8 * 16
        assert layer.total == layer.forward + layer.backward
    assert flops[5].forward > flops[4].forward
    assert js.pipeline.layer_flops(layers, types, np.zeros((8, 16)))[5] == flops[4]


def test_elements_of_each_layer():
    dense = {"kernel": np.zeros((3, 5), np.float32), "bias": jnp.zeros(5)}
    types = jax.eval_shape(lambda: (jnp.zeros((2, 2), jnp.bfloat16), {"scale": jnp.zeros(())}))
    assert js.pipeline.count_layer_params([dense, types, {}, None, 1.5]) == [20, 5, 0, 0, 1]
    assert js.pipeline.count_layer_params(layer for layer in (dense, {})) == [20, 0]
