"""Loops over layers inside a stage, whose backward pass is divided as that of the layers is."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxslowmo.pipeline.stage import split_stage
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
    return x + jnp.tanh(x @ up) @ down + bias


def stacked(w: Any, x: jax.Array, _: None) -> jax.Array:
    """A layer per iteration."""
    return lax.scan(lambda x, own: (layer(own, x), None), x, w)[0]


def checkpointed(w: Any, x: jax.Array, _: None) -> jax.Array:
    again = jax.checkpoint(layer)
    return lax.scan(lambda x, own: (again(own, x), None), x, w, reverse=True)[0]


def shared(w: Any, x: jax.Array, _: None) -> jax.Array:
    """One layer again and again, whose gradient the loop adds up."""
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(w, x) * (1 + i), x)


def nested(w: Any, x: jax.Array, _: None) -> jax.Array:
    """A loop in a loop, and all intermediate results."""
    _, every = lax.scan(lambda x, own: (stacked(w, layer(own, x), None), x), x, w, unroll=2)
    return every.sum(0) * stacked(w, x, None)


@pytest.mark.parametrize(
    ("fn", "remat"), [(stacked, False), (checkpointed, False), (shared, True), (nested, False)]
)
def test_gradients_are_those_of_the_whole_backward_pass(fn: Any, remat: bool) -> None:
    weights = SHARED if fn is shared else STACKED
    run = compiled_stage(fn, weights, X, None, remat=remat)
    assert_close(run.gradients, run.expected)
    if fn is not nested:
        # What is left for W are activations, and no gradients that B had to compute on its way.
        own = {w.shape for w in jax.tree.leaves(weights)}
        assert not [t.shape for t in run.program.kept if t.shape in own]
        assert run.flops["W"] > 0


def test_each_part_does_its_own_products() -> None:
    weights, text = STACKED, {}
    program = split_stage(stacked, weights, X, None)
    _, stash = jax.eval_shape(program.forward, weights, X, None)
    _, kept = jax.eval_shape(program.backward_input, weights, None, stash, X)
    for name, part, last in (
        ("B", program.backward_input, X),
        ("W", program.backward_weight, kept),
        ("BW", program.backward, X),
    ):
        found = str(jax.make_jaxpr(part)(weights, None, stash, last))
        text[name] = found.count("dot_general["), found.count(" scan[")
    # Each part is one loop, also the whole backward pass: dividing it there would only cost time.
    assert text == {"B": (2, 1), "W": (2, 1), "BW": (4, 1)}


def test_casts_of_weights_inside_a_loop_are_not_stashed() -> None:
    run = compiled_stage(stacked, STACKED, X.astype(jnp.bfloat16), None)
    assert_close(run.gradients, run.expected, 0.02)
    shapes = [t.shape for t in (*run.program.stash, *run.program.kept)]
    assert (LAYERS, WIDTH, 2 * WIDTH) not in shapes
    assert (LAYERS, 2 * WIDTH, WIDTH) not in shapes
