"""A stage whose backward pass is whole is the stage whose backward pass is split, put together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.pipeline.stage import split_stage, whole_stage

WIDTH = 4


def draw(*shape: int) -> jax.Array:
    return jnp.float32(np.random.default_rng(sum(shape)).normal(size=shape))


def dense(weights: Any, x: Any, microbatch: Any) -> Any:
    return {"x": jnp.tanh(x["x"] @ weights["w"]), "place": x["place"] + microbatch["shift"]}


def loss(weights: Any, x: Any, microbatch: Any) -> Any:
    y = jnp.tanh(x["x"] @ weights["w"]) * (x["place"] % 3)[:, None]
    return jnp.mean((y - microbatch["y"]) ** 2), {"largest": jnp.max(y)}


def looped(weights: Any, x: Any, microbatch: Any) -> Any:
    """Equal layers in a loop, which casts its weights."""
    del microbatch

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    return {"x": jax.lax.scan(layer, x["x"].astype(jnp.bfloat16), weights["w"])[0]}


X = {"x": draw(8, WIDTH), "place": jnp.arange(8)}
MICROBATCH = {"shift": jnp.int32(2), "y": draw(8, WIDTH)}


@pytest.mark.parametrize(
    ("fn", "weights", "remat", "reads"),
    [
        (dense, {"w": draw(WIDTH, WIDTH)}, True, (True, False)),
        (loss, {"w": draw(WIDTH, WIDTH)}, False, (False, True)),
        (looped, {"w": draw(6, WIDTH, WIDTH)}, False, (False, False)),
        (looped, {"w": draw(6, WIDTH, WIDTH)}, True, (False, False)),
    ],
)
def test_both_passes_are_those_of_a_split_stage(fn: Any, weights: Any, remat: bool, reads: Any):
    options = {"loss": fn is loss, "remat": remat}
    whole = whole_stage(fn, weights, X, MICROBATCH, **options)
    split = split_stage(fn, weights, X, MICROBATCH, **options)
    assert (whole.y, whole.stash) == (split.y, split.stash)
    assert whole.reads == split.reads == reads  # of "shift" and "y"
    assert whole.kept == ()
    results = []
    for stage in (whole, split):
        y, stash = stage.forward(weights, X, MICROBATCH)
        dy = 1.0 if fn is loss else {**dict.fromkeys(y), "x": jnp.ones_like(y["x"])}
        results.append((y, stage.backward(weights, MICROBATCH, stash, dy)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert not any(x.shape == weights["w"].shape for x in whole.stash)
