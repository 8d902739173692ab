"""The GPT as a list of layers: the same loss and gradients, and its tree both ways."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_layers, gpt_loss_fn, init_gpt
from support.exhaustive import sweep

SMALL = GPTConfig(num_layers=3, num_heads=2, embed_dim=16, context_length=8)
CONFIGS = {
    "untied": SMALL,
    "tied": dataclasses.replace(SMALL, tied=True),
    "remat": dataclasses.replace(SMALL, remat=True),
    "bfloat16": dataclasses.replace(SMALL, dtype="bfloat16"),
    "by head": dataclasses.replace(SMALL, qkv_by_head=True, tied=True),
}
BATCH = np.random.default_rng(0).integers(0, 256, (4, 9)).astype(np.uint8)


@pytest.mark.parametrize("name", sweep(CONFIGS, lambda name: name in ("tied", "bfloat16")))
def test_the_layers_are_the_model(name):
    config = CONFIGS[name]
    parts, params = gpt_layers(config), init_gpt(config)
    model = js.LayeredModel(parts.layers, parts.loss, tied=parts.tied)

    @jax.jit
    def both(params):
        layers = parts.split(params)
        whole = jax.value_and_grad(gpt_loss_fn(config))(params, BATCH)
        return whole, jax.value_and_grad(model)(layers, BATCH)

    (loss, gradients), (loss_of_layers, by_layer) = both(params)
    rounding = 2e-2 if config.dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(loss_of_layers, loss, rtol=rounding)
    joined = parts.join(by_layer)
    assert jax.tree.structure(joined) == jax.tree.structure(gradients)
    for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * rounding, atol=rounding)


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_there_and_back(name):
    parts, params = gpt_layers(CONFIGS[name]), init_gpt(CONFIGS[name])
    layers = parts.split(params)
    assert len(layers) == len(parts.layers) == SMALL.num_layers + 2
    assert parts.join(layers) == params
    for group in parts.tied:
        for layer, path in group:
            first, second = path.split("/")
            assert layers[layer][first][second] is params["embed"]["kernel"]
    assert bool(parts.tied) == (name == "tied")
    assert parts.layers[1] is parts.layers[2]


def test_windows_of_another_length_are_refused():
    parts = gpt_layers(SMALL)
    with pytest.raises(ValueError, match=r"context_length \+ 1\) = \(local_batch, 9\), got"):
        parts.layers[0](parts.split(init_gpt(SMALL))[0], jnp.zeros((2, 8), jnp.uint8))
