"""Costs of layers: operations against those of their matrix products, elements of parameters."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js

BATCH, WIDTH, WORDS = 8, 16, 32


def embed(table, tokens):
    return {"x": table[tokens["tokens"]], "seen": jnp.sum(tokens["tokens"])}


def block(weights, x):
    return {**x, "x": jnp.maximum(x["x"] @ weights["w"], 0)}


def head(weights, x):
    return x["x"] @ weights


def loss(logits, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], 1)
    return -chosen.mean(), {"largest": logits.max()}


MODEL = js.LayeredModel([embed, block, block, head], loss)
TYPES = [
    jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32),
    {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)},
    {"w": np.zeros((WIDTH, WIDTH), np.float32)},
    jnp.zeros((WIDTH, WORDS)),
]
TOKENS = {name: jax.ShapeDtypeStruct((BATCH,), jnp.int32) for name in ("tokens", "labels")}


def test_products_make_up_a_block_and_embedding_and_loss_count():
    flops = js.pipeline.layer_flops(MODEL, TYPES, TOKENS)
    product = 2 * BATCH * WIDTH * WIDTH
    for layer in flops[1:3]:
        assert product <= layer.forward <= product + 3 * BATCH * WIDTH
        # Gradients of weights and of the input: a product each.
        assert 2 * product <= layer.backward <= 2 * product + 8 * BATCH * WIDTH
        assert layer.total == layer.forward + layer.backward
    first, *_, last = flops
    assert first.forward < BATCH * WORDS  # a sum of integers and bounds: nothing to multiply
    product = 2 * BATCH * WIDTH * WORDS
    assert last.forward > product + BATCH * WORDS
    assert last.backward > 2 * product + BATCH * WORDS
    parts = js.partition_by_cost([layer.total for layer in flops], 2)
    assert parts == [[(0, 3)], [(3, 4)]]


def test_equal_layers_are_compiled_once(compilations):
    layers = [lambda w, x: x @ w] + [lambda w, x: jnp.tanh(x @ w)] * 5
    weights = [np.eye(WIDTH, dtype=np.float32)] * 6
    before = compilations.count
    found = js.pipeline.layer_flops(layers, weights, np.zeros((3, WIDTH)))
    assert compilations.count - before == 3 * 2  # the first, those between, the last
    assert found[0].forward == 2 * 3 * WIDTH * WIDTH


def test_elements_of_each_layer():
    dense = {"kernel": np.zeros((3, 5), np.float32), "bias": jnp.zeros(5)}
    types = jax.eval_shape(lambda: (jnp.zeros((2, 2), jnp.bfloat16), {"scale": jnp.zeros(())}))
    assert js.pipeline.count_layer_params([dense, types, {}, None, 1.5]) == [20, 5, 0, 0, 1]
    assert js.pipeline.count_layer_params(layer for layer in (dense, {})) == [20, 0]
