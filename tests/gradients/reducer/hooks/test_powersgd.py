"""PowerSGD: what it computes, remembers, refuses and sends."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.gradients.reducer.hooks._powersgd import draw_normal, orthogonal
from support.executions import lift

WORLD = 4
AXES = {"replica": WORLD}
SHAPES = {"a": (8, 6), "b": (5,), "d": (6, 2, 4), "e": (8, 6), "s": ()}


def grads_like(shapes, seed, dtype=np.float32, world=WORLD):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(world, *s)).astype(dtype) for name, s in shapes.items()}


def repeated(hook, grads, steps, execution="vmap", **layout):
    """Reduced gradients and hook states of updates that all get the same gradients."""
    tx: Any = js.all_reduce_gradients("replica", hook=hook, **layout)

    def replica(grads):
        def step(state, _):
            reduced, state = tx.update(grads, state)
            return state, (reduced, state.hook)

        return jax.lax.scan(step, tx.init(grads), None, length=steps)[1]

    return jax.tree.map(np.asarray, lift(replica, AXES, execution, (False,))(grads))


def means(grads):
    return {name: np.mean(g, axis=0) for name, g in grads.items()}


def now(reduced, *index):
    return {name: x[index] for name, x in reduced.items()}


def close(found, wanted, tolerance=1e-5):
    def leaf(x, y):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    jax.tree.map(leaf, found, wanted)


def test_full_rank_reproduces_the_mean():
    """Rank above every min(n, m), which also takes the QR; in several buckets."""
    hook = js.hooks.powersgd(99, 2, min_compression_rate=1e-3)
    grads = grads_like(SHAPES, 0)
    reduced, states = repeated(
        hook, grads, 4, "shard_map", bucket_bytes=300, first_bucket_bytes=100
    )
    assert len(states) == 2
    assert sum(q.shape[2] for bucket in states for q in bucket.q) == len(SHAPES)
    for t in range(4):
        close(now(reduced, 0, t), means(grads))
    for x in reduced.values():  # replicas agree to the bit
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


@functools.cache
def three_replicas(rank, feedback):
    """(init, step) over shapes of which "a" and "d" are compressed, up to a rank."""
    hook = js.hooks.powersgd(rank, 2, error_feedback=feedback, min_compression_rate=1.0, seed=rank)
    tx: Any = js.all_reduce_gradients("replica", hook=hook)
    step = jax.vmap(lambda g, s: tx.update(g, s), axis_name="replica")
    return jax.jit(jax.vmap(tx.init, axis_name="replica")), jax.jit(step)


@given(st.sampled_from([(1, True), (2, False), (3, True)]), st.integers(0, 99))
def test_update_is_one_power_iteration(kind, seed):
    """Against NumPy, for what is compressed; the mean for the rest."""
    (rank, feedback), shapes = kind, {"a": (8, 6), "b": (5,), "d": (4, 3, 2)}
    init, step = three_replicas(rank, feedback)
    grads = grads_like(shapes, seed, world=3)
    state = init(grads)
    for t in range(4):
        before, (reduced, state) = state, step(grads, state)
        reduced = jax.tree.map(np.asarray, reduced)
        close(reduced["b"][1], means(grads)["b"])
        if t < 2:
            close(now(reduced, 0), means(grads))
            continue
        # The last leaf comes first in the bucket. "d", (4, 6), is too small for ranks above 2.
        compressed = ["d", "a"] if rank <= 2 else ["a"]
        assert len(state.hook[0].q) == len(compressed)
        for i, name in enumerate(compressed):
            own = grads[name].reshape(3, shapes[name][0], -1)
            if feedback:
                own = own + np.asarray(before.hook[0].error[i][:, 0])
            q, _ = np.linalg.qr(np.asarray(before.hook[0].q[i][0, 0]))
            p, _ = np.linalg.qr(np.mean(own @ q, axis=0))
            product = p @ np.mean(own.transpose(0, 2, 1) @ p, axis=0).T
            close(reduced[name][2].reshape(product.shape), product, 1e-4)
            if feedback:  # the memory is what is missing
                close(np.asarray(state.hook[0].error[i][:, 0]), own - product, 1e-4)


def test_with_error_feedback_nothing_is_lost_for_good():
    """The sum of t reduced gradients stays near t means; without, it drifts away with t."""
    grads, steps = grads_like({"a": (10, 8)}, 3), 120
    sums = {}
    for feedback in (True, False):
        hook = js.hooks.powersgd(1, 2, error_feedback=feedback)
        reduced, states = repeated(hook, grads, steps)
        total = np.cumsum(reduced["a"][0], axis=0)
        wanted = means(grads)["a"] * np.arange(1, steps + 1)[:, None, None]
        sums[feedback] = np.linalg.norm(total - wanted, axis=(1, 2))
        if feedback:
            # What is missing is what the memories hold.
            missing = wanted[-1] - total[-1]
            np.testing.assert_allclose(
                states[0].error[0][:, -1, 0].mean(axis=0), missing, rtol=1e-3, atol=1e-3
            )
        else:
            assert states[0].error == ()
    norm = np.linalg.norm(means(grads)["a"])
    assert sums[True][steps // 2 :].max() < 10 * norm
    assert sums[True][-1] / steps < 0.1 * norm
    assert sums[False][-1] > 0.4 * norm * steps


def test_without_warm_start_each_update_draws_anew():
    grads = grads_like({"a": (10, 8)}, 4)
    cold, states = repeated(
        js.hooks.powersgd(1, 2, error_feedback=False, warm_start=False), grads, 5
    )
    assert states[0] == ((), ())
    assert not np.allclose(cold["a"][0, 2], cold["a"][0, 3], atol=1e-3)
    assert not np.allclose(cold["a"][0, 3], cold["a"][0, 4], atol=1e-3)
    # Warm, it works its way to the best approximation.
    warm, _ = repeated(js.hooks.powersgd(1, 2, error_feedback=False), grads, 60)
    u, s, v = np.linalg.svd(means(grads)["a"])
    best = s[0] * np.outer(u[:, 0], v[0])
    np.testing.assert_allclose(warm["a"][0, -1], best, atol=0.05)
    assert not np.allclose(warm["a"][0, 2], best, atol=0.05)


def test_draws_depend_on_all_that_they_should():
    draws = jax.jit(
        lambda count: [
            draw_normal(seed, count, bucket, index, (1, 3, 2))
            for seed in (0, 1)
            for bucket in (0, 1)
            for index in (0, 1)
        ]
    )
    found = np.concatenate([np.asarray(draws(count)) for count in (0, 1, 2)])
    assert len(np.unique(found)) == found.size == 3 * 8 * 6
    np.testing.assert_array_equal(np.asarray(draws(1)), found[8:16])


def test_it_starts_at_once_on_request():
    grads = grads_like({"a": (8, 6)}, 5)
    hook = js.hooks.powersgd(1, 0, error_feedback=False, warm_start=False, min_compression_rate=1.0)
    reduced, _ = repeated(hook, grads, 2)
    for t in range(2):
        assert np.linalg.matrix_rank(reduced["a"][0, t], tol=1e-4) == 1


def test_an_overflow_does_not_stay_in_the_memory():
    grads = grads_like({"a": (10, 8), "b": (5,)}, 6)
    tx: Any = js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, 2))
    step = lift(lambda g, s: tx.update(g, s), AXES, "vmap", (False, False))
    state = lift(tx.init, AXES, "vmap", (False,))(grads)
    for _ in range(3):
        _, state = step(grads, state)
    bad = {"a": grads["a"].copy(), "b": grads["b"]}
    bad["a"][1, 0, 0] = np.inf
    reduced, after = step(bad, state)
    assert not np.any(np.isfinite(reduced["a"]))
    np.testing.assert_allclose(reduced["b"][0], means(grads)["b"], rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after.hook, state.hook)
    assert int(after.count[0]) == 4
    reduced, after = step(grads, after)
    assert np.all(np.isfinite(reduced["a"]))
    assert not np.array_equal(after.hook[0].error[0], state.hook[0].error[0])


def test_factors_travel_in_half_precision():
    grads = grads_like({"a": (16, 8), "b": (5,)}, 7)
    full, _ = repeated(js.hooks.powersgd(2, 2), grads, 4)
    for compress in (js.hooks.bf16_compress, js.hooks.fp16_compress):
        half, states = repeated(compress(js.hooks.powersgd(2, 2)), grads, 4)
        assert half["a"].dtype == np.float32
        assert {x.dtype for x in jax.tree.leaves(states)} == {np.dtype(np.float32)}
        close(now(half, 0), now(full, 0), 4e-2)
        assert not np.array_equal(half["a"], full["a"])


def test_gradients_of_half_precision_keep_float32_errors():
    grads = grads_like({"a": (16, 8)}, 8, dtype=jnp.bfloat16)
    reduced, states = repeated(js.hooks.powersgd(1, 2), grads, 3)
    assert reduced["a"].dtype == jnp.bfloat16
    assert states[0].error[0].dtype == states[0].q[0].dtype == np.float32


def test_zero_gradients_stay_zero():
    grads = {"a": np.zeros((WORLD, 16, 8), np.float32), "none": np.zeros((WORLD, 0, 3), np.float32)}
    reduced, states = repeated(js.hooks.powersgd(3, 2, min_compression_rate=0.5), grads, 4)
    assert reduced["none"].shape == (WORLD, 4, 0, 3)
    np.testing.assert_array_equal(reduced["a"], 0)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states))


columns_of = jax.jit(orthogonal)


@given(st.integers(1, 4), st.sampled_from([1e-30, 1e-10, 1.0, 1e30]), st.integers(0, 99))
def test_orthogonal_columns(columns, scale, seed):
    x = np.random.default_rng(seed).normal(size=(2, 7, columns)).astype(np.float32)
    q = np.asarray(columns_of(x * np.float32(scale)))
    np.testing.assert_allclose(
        q.transpose(0, 2, 1) @ q, np.broadcast_to(np.eye(columns), (2, columns, columns)), atol=1e-5
    )
    # They span what x does.
    np.testing.assert_allclose(q @ (q.transpose(0, 2, 1) @ x), x, atol=1e-4)


def test_dependent_columns_do_not_count_twice():
    x = np.random.default_rng(0).normal(size=(1, 7, 1)).astype(np.float32)
    q = np.asarray(columns_of(np.concatenate([x, x * np.float32(0.3)], axis=-1)))[0]
    gram = q.T @ q
    np.testing.assert_allclose(gram[0], [1, 0], atol=1e-5)
    assert min(abs(gram[1, 1]), abs(gram[1, 1] - 1)) < 1e-5
    np.testing.assert_array_equal(columns_of(np.zeros((1, 7, 2), np.float32)), 0)


def test_split_leaves_are_vectors():
    grads = grads_like({"a": (64, 64)}, 9)
    reduced, states = repeated(
        js.hooks.powersgd(1, 2),
        grads,
        3,
        bucket_bytes=8192,
        first_bucket_bytes=8192,
        split_large=True,
    )
    assert len(states) == 2
    assert jax.tree.leaves(states) == []
    close(now(reduced, 0, 2), means(grads))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "`rank` must be an int >= 1, got 0"),
        ({"rank": 1.5}, "`rank`"),
        ({"rank": True}, "`rank`"),
        (
            {"start_step": 1},
            "`start_step` .* error feedback or warm start .* >= 2, got 1",
        ),
        ({"start_step": 1, "warm_start": False}, "`start_step`"),
        ({"start_step": 0, "error_feedback": False}, "`start_step`"),
        ({"start_step": -1, "error_feedback": False, "warm_start": False}, "`start_step` .* >= 0"),
        ({"min_compression_rate": 0.0}, "`min_compression_rate` must be a finite number > 0"),
        ({"min_compression_rate": math.nan}, "`min_compression_rate`"),
        ({"min_compression_rate": "2"}, "`min_compression_rate`"),
        ({"seed": 0.5}, "`seed` must be an int"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        js.hooks.powersgd(**arguments)
