"""A model of layers equals the same written as one function."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from support.layered import assert_close

PARAMS = [{"w": jnp.full((2, 3), 0.5)}, {"w": jnp.full((3, 3), 0.3)}, {"w": jnp.full((3,), 2.0)}]
BATCH = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2), "y": np.ones(4, np.float32)}


def first(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def middle(params, x):
    return jnp.tanh(x @ params["w"])


def last(params, x):
    return x @ params["w"]


def squared(output, batch):
    error = output - batch["y"]
    return jnp.mean(error**2), {"bias": jnp.mean(error)}


def test_the_model_is_its_layers_one_after_the_other_and_the_loss():
    whole = js.LayeredModel([first, middle, last], squared)
    found = whole(PARAMS, BATCH)
    output = np.tanh(np.tanh(BATCH["x"] @ PARAMS[0]["w"]) @ PARAMS[1]["w"]) @ PARAMS[2]["w"]
    assert_close(found, (np.mean((output - 1) ** 2), {"bias": np.mean(output - 1)}))
    x = whole.stage(0, 1)(PARAMS[:1], None, BATCH)
    assert whole.stage(1, 3)(PARAMS[1:], x, BATCH).loss(1).to_output(as_quotient=False) == found


def test_layers_with_a_key_draw_their_own_and_the_same_again():
    def noisy(params, x, *, key):
        return x if key is None else x + jax.random.normal(key, x.shape)

    whole = js.LayeredModel([first, noisy, noisy], lambda x, _: jnp.mean(x))
    params, key = [PARAMS[0], {}, {}], jax.random.key(3)
    clean, drawn = whole(params, BATCH), whole(params, BATCH, rng=key)
    noise = [jax.random.normal(jax.random.fold_in(key, i), (4, 3)).mean() for i in (1, 2)]
    assert_close(drawn, clean + sum(noise))
