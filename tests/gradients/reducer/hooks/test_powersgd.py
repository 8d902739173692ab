"""PowerSGD: what it compresses and draws, and overflows; `test_golden.py` has what it computes."""

from typing import Any

import jax
import numpy as np

import jaxslowmo as js
from jaxslowmo.gradients.hooks._powersgd import draw_normal, orthogonal

WORLD = 4


def grads_like(shapes, seed, world=WORLD):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(world, *s)).astype(np.float32) for name, s in shapes.items()}


def means(grads):
    return {name: np.mean(g, axis=0) for name, g in grads.items()}


def test_only_what_saves_enough_is_compressed():
    """(n + m) r times the rate is below n m: 28 against 48. Parts of leaves are vectors."""
    grads = grads_like({"a": (8, 6), "b": (48,), "c": (1, 48), "large": (64, 64)}, 0)
    shapes = [(WORLD, 1, 64, 64), (WORLD, 1, 8, 6)]
    for rate, split, wanted in [(1.71, False, 2), (48 / 28, False, 1), (1.71, True, 0)]:
        hook = js.hooks.powersgd(2, 2, min_compression_rate=rate)
        limits = {"bucket_bytes": 8192, "first_bucket_bytes": 8192, "split_large": split}
        tx: Any = js.all_reduce_gradients("replica", hook=hook, **limits)
        states = jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), grads).hook
        found = [x.shape for state in states for x in state.error]
        assert found == (shapes[:wanted] if wanted else shapes[1:])


def test_draws_depend_on_all_that_they_should():
    """A draw depends on the seed, the bucket, the place of the shape and the update."""
    kinds = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    draws = jax.jit(lambda n: [draw_normal(a, n, b, c, (1, 3, 2)) for a, b, c in kinds])
    found = np.concatenate([np.asarray(draws(count)) for count in (0, 1, 2)])
    assert len(np.unique(found)) == found.size == 3 * 8 * 6


def test_an_overflow_does_not_stay_in_the_memory():
    grads = grads_like({"a": (10, 8), "b": (5,)}, 6)
    tx: Any = js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, 2))
    step = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="replica"))
    state = jax.vmap(tx.init, axis_name="replica")(grads)
    for _ in range(3):
        _, state = step(grads, state)
    bad = {"a": grads["a"].copy(), "b": grads["b"]}
    bad["a"][1, 0, 0] = np.inf
    reduced, after = step(bad, state)
    assert not np.any(np.isfinite(reduced["a"]))
    np.testing.assert_allclose(reduced["b"][0], means(grads)["b"], rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after.hook, state.hook)
    reduced, after = step(grads, after)
    assert np.all(np.isfinite(reduced["a"]))
    assert not np.array_equal(after.hook[0].error[0], state.hook[0].error[0])


def test_dependent_columns_do_not_count_twice():
    columns_of = jax.jit(orthogonal)
    x = np.random.default_rng(0).normal(size=(1, 7, 1)).astype(np.float32)
    q = np.asarray(columns_of(np.concatenate([x, x * np.float32(0.3)], axis=-1)))[0]
    gram = q.T @ q
    np.testing.assert_allclose(gram[0], [1, 0], atol=1e-5)
    assert min(abs(gram[1, 1]), abs(gram[1, 1] - 1)) < 1e-5
    np.testing.assert_array_equal(columns_of(np.zeros((1, 7, 2), np.float32)), 0)
