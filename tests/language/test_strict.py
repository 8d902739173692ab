"""The language model trains the same under jax's debugging settings."""

import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_loss_fn, init_gpt
from support.strict import SETTINGS, assert_equal_bits

CONFIG = GPTConfig(num_layers=2, num_heads=2, embed_dim=16, context_length=8)
WINDOWS = np.random.default_rng(0).integers(0, 256, (2, 4, 9)).astype(np.uint8)


def program(mesh, params):
    step = js.make_train_step(
        gpt_loss_fn(CONFIG),
        optax.adamw(1e-2),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=mesh,
        policy=js.gradients.Policy("bfloat16"),
    )
    state = step.init(params)
    for windows in WINDOWS:
        state, metrics = step(state, windows)
    return metrics, state.params


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_language_model_trains_alike(setting):
    mesh = js.make_mesh({"replica": 2})
    params = init_gpt(CONFIG, 0)
    expected = program(mesh, params)
    with SETTINGS[setting](mesh):
        assert_equal_bits(program(mesh, params), expected)
