"""What layers are called with, and what losses and modules may be."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.layered import assert_close

WIDTH = 3
PARAMS = [jnp.full((2, WIDTH), 0.5), jnp.full((WIDTH, WIDTH), 0.3)]
BATCH = np.arange(8.0, dtype=np.float32).reshape(4, 2) / 8


def dense(params, x):
    return jnp.tanh(x @ params)


def noisy(params, x, *, key=None):
    y = dense(params, x)
    return y if key is None else y + jax.random.normal(key, y.shape)


def mean(x, _):
    return jnp.mean(x)


def wrapped(layer):
    """Return a layer whose own signature does not say what it takes."""

    def layer_with_any(params, x, **kwargs):
        return layer(params, x, **kwargs)

    return layer_with_any


# Which keywords a layer is given.

LAYERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "partial": (functools.partial(lambda a, p, x, *, key=None: noisy(p, x, key=key), 1), None),
    "jit": (jax.jit(noisy), None),
    "wraps in jit": (jax.jit(functools.wraps(noisy)(wrapped(noisy))), None),
    "said for one": (wrapped(noisy), [(), ["key"]]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_take_a_key_get_it(name):
    layer, takes = LAYERS[name]
    model = js.LayeredModel([dense, layer], mean, takes=takes)
    known = js.LayeredModel([dense, noisy], mean)
    assert model.takes_key
    assert not model.takes_state
    assert model.takes[1] == ("key",)
    for key in (None, jax.random.key(3)):
        assert_close(model(PARAMS, BATCH, rng=key), known(PARAMS, BATCH, rng=key))


def test_equal_layers_that_take_different_keywords_are_not_one_run(mesh_of):
    """A run and a kind of stages are called with one set of keywords."""
    params, batch = [jnp.full((2, 2), 0.4)] * 8, BATCH[:2]
    takes = [(), *[("key",)] * 3, *[()] * 4]
    known = js.LayeredModel([noisy if names else dense for names in takes], mean)
    model = js.LayeredModel([noisy] * 8, mean, takes=takes)
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 1), mesh=mesh_of({"stage": 2}))
    rng = jax.random.key(5)
    found = jax.jit(jax.value_and_grad(pipe))(params, batch, rng=rng)
    of_microbatch = jax.random.fold_in(rng, 0)
    assert_close(found, jax.jit(jax.value_and_grad(known))(params, batch, rng=of_microbatch))


def test_the_model_is_its_layers_one_after_the_other_with_keys_of_their_own():
    def loss(y, batch):
        return jnp.mean(y), {"most": jnp.max(y), "seen": jnp.sum(batch)}

    key = jax.random.key(3)
    x = BATCH
    for i, own in enumerate(PARAMS):
        x = dense(own, x) + jax.random.normal(jax.random.fold_in(key, i), (4, WIDTH))
    found = js.LayeredModel([noisy, noisy], loss)(PARAMS, BATCH, rng=key)
    assert_close(found, loss(x, BATCH))


# What a loss returns: its function of the outputs, and the value that it means.
LOSSES: dict[str, tuple[Callable[[jax.Array], Any], Any]] = {
    "float": (lambda x: 0.5, 0.5),
    "pair with bool": (lambda x: (x.sum() * 0 + 6, True), 6),
    "weight of 0": (lambda x: (x.sum() * 0, 0), 0),
    "metrics": (
        lambda x: (1.0, {"a": 0.5, "b": np.int64(4), "c": jnp.sum(x > 2), "d": (x.size, 8)}),
        (1, {"a": 0.5, "b": 4, "c": 0, "d": 1.5}),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_weights_and_metrics_become_float32_unless_they_float(name):
    loss, expected = LOSSES[name]
    model = js.LayeredModel([dense, dense], lambda x, _: loss(x))
    found = model(PARAMS, BATCH)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    half = js.LayeredModel([dense, dense], lambda *_: jnp.bfloat16(1))
    assert half(PARAMS, BATCH).dtype == jnp.bfloat16
    assert_close(found, jax.tree.map(np.float32, expected))
