"""Loops inside a stage, whose backward pass is not divided."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxslowmo.pipeline import split_stage
from support.split_stages import assert_close, compiled_stage

KEYS = jax.random.split(jax.random.key(1), 4)
LAYERS, WIDTH, BATCH = 3, 8, 2
STACKED = {
    "up": jax.random.normal(KEYS[0], (LAYERS, WIDTH, 2 * WIDTH)) / 4,
    "down": jax.random.normal(KEYS[1], (LAYERS, 2 * WIDTH, WIDTH)) / 4,
    "bias": jax.random.normal(KEYS[2], (LAYERS, WIDTH)),
}
SHARED = jax.tree.map(lambda x: x[0], STACKED)
X = jax.random.normal(KEYS[3], (BATCH, WIDTH))


def layer(w: Any, x: jax.Array) -> jax.Array:
    up, down, bias = (w[n].astype(x.dtype) for n in ("up", "down", "bias"))
    return x + jnp.tanh(x @ up) @ down + bias[None]


def stacked(w: Any, x: jax.Array, _: None) -> jax.Array:
    """A layer per iteration."""
    return lax.scan(lambda x, own: (layer(own, x), None), x, w)[0]


def shared(w: Any, x: jax.Array, _: None) -> jax.Array:
    """One layer again and again, whose gradient the loop adds up."""
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(w, x) * (1.0 + i.astype(x.dtype)), x)


def nested(w: Any, x: jax.Array, _: None) -> jax.Array:
    """A loop in a loop, checkpointed, and all intermediate results."""
    again = jax.checkpoint(lambda own, x: stacked(w, layer(own, x), None))
    _, every = lax.scan(lambda x, own: (again(own, x), x), x, w, reverse=True)
    return every.sum(0) * stacked(w, x, None)


@pytest.mark.parametrize(("fn", "remat"), [(shared, True), (nested, False)])
def test_gradients_are_those_of_the_whole_backward_pass(fn: Any, remat: bool) -> None:
    weights = SHARED if fn is shared else STACKED
    run = compiled_stage(fn, weights, X, None, remat=remat)
    assert_close(run.gradients, run.expected)


def test_a_loop_that_x_needs_belongs_to_one_part() -> None:
    weights, text = STACKED, {}
    program = split_stage(stacked, weights, X, None)
    _, stash = jax.eval_shape(program.forward, weights, X, None)
    _, kept = jax.eval_shape(program.backward_input, weights, None, stash, X)
    for name, part, last in (
        ("B", program.backward_input, X),
        ("W", program.backward_weight, kept),
        ("BW", program.backward, X),
    ):
        text[name] = str(jax.make_jaxpr(part)(weights, None, stash, last)).count("dot_general[")
    assert text == {"B": 4, "W": 0, "BW": 4}


def test_casts_of_weights_inside_a_loop_are_not_stashed() -> None:
    run = compiled_stage(stacked, STACKED, X.astype(jnp.bfloat16), None)
    assert_close(run.gradients, run.expected, 0.02)
    shapes = [t.shape for t in run.program.stash]
    assert (LAYERS, WIDTH, 2 * WIDTH) not in shapes
    assert (LAYERS, 2 * WIDTH, WIDTH) not in shapes
