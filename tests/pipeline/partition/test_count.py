"""Elements of the parameters of a layer, whatever holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxslowmo as js


def test_elements_of_each_layer():
    dense = {"kernel": np.zeros((3, 5), np.float32), "bias": jnp.zeros(5)}
    types = jax.eval_shape(lambda: (jnp.zeros((2, 2), jnp.bfloat16), {"scale": jnp.zeros(())}))
    assert js.pipeline.count_layer_params([dense, types, {}, None, 1.5]) == [20, 5, 0, 0, 1]
    assert js.pipeline.count_layer_params(layer for layer in (dense, {})) == [20, 0]


def test_states_of_nnx():
    block = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    params = nnx.state(block, nnx.Param)
    count = nnx.state(block, nnx.RngCount)
    assert js.pipeline.count_layer_params([params]) == [16]
    # The counter of a generator is an array as others are; its key is none.
    assert js.pipeline.count_layer_params([nnx.state(block)]) == [16 + len(jax.tree.leaves(count))]


@pytest.mark.parametrize("layers", [{"a": np.zeros(3)}, np.zeros((2, 3)), 3])
def test_one_tree_is_no_sequence(layers):
    with pytest.raises(ValueError, match=r"`layers` must be a sequence of one tree of .* got a"):
        js.pipeline.count_layer_params(layers)


def test_what_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"count_layer_params: layer 1: .*got fn \(builtin"):
        js.pipeline.count_layer_params([{}, {"fn": len, "w": np.zeros(3)}])
