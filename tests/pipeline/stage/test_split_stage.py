"""A stage's backward pass in two parts: equal gradients, no work twice, nothing kept in vain."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxslowmo.pipeline import split_stage
from support.split_stages import assert_close, compiled_stage

WIDTH, HEADS, LENGTH, BATCH = 64, 2, 16, 2
KEYS = jax.random.split(jax.random.key(0), 8)


def normal(key: int, *shape: int) -> jax.Array:
    """Random weights or activations."""
    return jax.random.normal(KEYS[key], shape) / 8


def norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer norm with scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normed * p["scale"][None, None] + p["bias"][None, None]


def block(w: dict[str, Any], x: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
    """A transformer block whose products run in the type of `x`."""
    kind = x.dtype
    h = norm(w["norm"], x.astype(jnp.float32)).astype(kind)
    split = (h @ w["qkv"].astype(kind)).reshape(*x.shape[:2], 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    q, k, v = split
    segments = microbatch["segments"]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    scores = jnp.where(same, q @ k.swapaxes(2, 3), jnp.asarray(-1e9, kind))
    mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + mixed @ w["out"].astype(kind)
    hidden = x @ w["up"].astype(kind) + w["bias"][None, None].astype(kind)
    return x + jax.nn.gelu(hidden) @ w["down"].astype(kind)


WEIGHTS = {
    "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
    "qkv": normal(0, WIDTH, 3 * WIDTH),
    "out": normal(1, WIDTH, WIDTH),
    "up": normal(2, WIDTH, 4 * WIDTH),
    "bias": normal(3, 4 * WIDTH),
    "down": normal(4, 4 * WIDTH, WIDTH),
}
MICROBATCH = {"segments": jnp.arange(LENGTH)[None] // 8 + jnp.zeros((BATCH, 1), jnp.int32)}


def test_no_work_is_done_twice_and_nothing_kept_that_is_at_hand() -> None:
    run = compiled_stage(block, WEIGHTS, normal(5, BATCH, LENGTH, WIDTH), MICROBATCH)
    assert_close(run.gradients, run.expected)
    flops, program = run.flops, run.program
    assert flops["B"] + flops["W"] <= 1.001 * flops["BW"]
    # Each part does its share: a product for the input and one for the weights per product of F.
    assert 0.4 * flops["BW"] < flops["W"] < 0.6 * flops["BW"]
    weight_shapes = {w.shape for w in jax.tree.leaves(WEIGHTS)}
    weight_shapes |= {shape[::-1] for shape in weight_shapes}
    between = [*program.stash, *program.kept]
    assert not [t for t in between if t.shape in weight_shapes]
    # No mask, which the microbatch determines, and no integer of it.
    assert {t.dtype for t in between} == {jnp.dtype("float32")}


def test_remat_stashes_the_input_alone() -> None:
    x = normal(5, BATCH, LENGTH, WIDTH).astype(jnp.bfloat16)
    run = compiled_stage(block, WEIGHTS, x, MICROBATCH, remat=True)
    assert [(t.shape, t.dtype) for t in run.program.stash] == [(x.shape, x.dtype)]
    assert_close(run.gradients, run.expected, 0.02)
    flops = run.flops
    assert flops["B"] + flops["W"] <= 1.002 * flops["BW"]  # casts of the few weights, in both parts
    assert flops["W"] < 0.4 * flops["BW"]


def dense(w: Any, x: jax.Array, _: Any) -> jax.Array:
    return jnp.tanh(x @ w["k"] + w["b"][None])


SMALL = {"k": normal(0, 4, 4), "b": normal(1, 4)}


def test_checkpointed_calls_are_opened() -> None:
    fn = jax.checkpoint(lambda w, x: dense(w, jnp.sin(x), None))
    run = compiled_stage(lambda w, x, _: fn(w, fn(w, x)), SMALL, normal(2, 3, 4), None)
    assert_close(run.gradients, run.expected)
    assert [t.shape for t in run.program.stash] == [(3, 4)] * 2
    assert all(t.shape == (3, 4) for t in run.program.kept)  # activations, no gradient of weights


def embed(w: Any, x: Any, tokens: Any) -> jax.Array:
    return w["table"][tokens] @ w["k"]


def test_a_first_stage_of_tokens_is_all_weights() -> None:
    tokens, weights = jnp.arange(6) % 5, {"table": normal(2, 5, 4), "k": SMALL["k"]}
    program = split_stage(embed, weights, None, tokens)
    y, stash = program.forward(weights, None, tokens)
    dx, kept = program.backward_input(weights, tokens, stash, jnp.cos(y))
    assert dx is None
    assert_close(list(kept), [jnp.cos(y)])
    assert len(program.stash) == 1  # the rows that were looked up
    expected = jax.grad(lambda w: jnp.sin(embed(w, None, tokens)).sum())(weights)
    assert_close(program.backward_weight(weights, tokens, stash, kept), expected)


LAYERS, SIZE = 3, 8
STACKED = {
    "up": 2 * normal(0, LAYERS, SIZE, 2 * SIZE),
    "down": 2 * normal(1, LAYERS, 2 * SIZE, SIZE),
    "bias": normal(2, LAYERS, SIZE),
}
X = normal(3, BATCH, SIZE)


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
    weights = jax.tree.map(lambda x: x[0], STACKED) if fn is shared else STACKED
    run = compiled_stage(fn, weights, X, None, remat=remat)
    assert_close(run.gradients, run.expected)


def test_a_loop_that_x_needs_belongs_to_one_part() -> None:
    weights, text = STACKED, {}
    program = split_stage(stacked, weights, X, None)
    _, stash = jax.eval_shape(program.forward, weights, X, None)
    _, kept = jax.eval_shape(program.backward_input, weights, None, stash, X)
    lasts = {"backward_input": X, "backward_weight": kept, "backward": X}
    for name, last in lasts.items():
        part = jax.make_jaxpr(getattr(program, name))(weights, None, stash, last)
        text[name] = str(part).count("dot_general[")
    assert text == {"backward_input": 4, "backward_weight": 0, "backward": 4}
