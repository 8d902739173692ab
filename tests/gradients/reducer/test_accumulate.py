"""Gradients of several calls as one update; gradient transforms that change at a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support.executions import lift

REPLICAS = 4
CHAIN = optax.chain(js.all_reduce_gradients("replica"), optax.sgd(1.0))


def calls(tx, grads, weights=None):
    """Updates of every call, (calls, replicas, ...)."""

    def one_replica(grads, weights):
        def call(state, given):
            g, w = given
            extra = {} if w is None else {"weight": w}
            updates, state = tx.update(g, state, g, **extra)
            return state, updates

        return jax.lax.scan(call, tx.init(grads[0]), (grads, weights))[1]

    mapped = jax.vmap(one_replica, axis_name="replica", in_axes=1, out_axes=1)
    return np.asarray(jax.jit(mapped)(grads, weights))


GRADS = np.random.default_rng(0).normal(size=(6, REPLICAS, 3)).astype(np.float32)


def test_every_third_call_updates_with_the_sum():
    """As torch does; the weighted mean is below."""
    updates = calls(js.accumulate(CHAIN, every=3, average=False), GRADS)
    assert not updates[[0, 1, 3, 4]].any()
    for last in (2, 5):
        whole = GRADS[last - 2 : last + 1].sum(0).mean(0)
        np.testing.assert_allclose(updates[last], np.tile(-whole, (REPLICAS, 1)), rtol=1e-5)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 3.0, 32.0]), min_size=6 * REPLICAS, max_size=6 * REPLICAS)
)
def test_weights_of_calls(flat):
    weights = np.float32(flat).reshape(6, REPLICAS)
    grads = np.where(weights[..., None] > 0, GRADS, np.nan).astype(np.float32)
    chain = optax.chain(js.all_reduce_gradients("replica", divide_by="active"), optax.sgd(1.0))
    updates = calls(js.accumulate(chain, every=3), grads, weights)
    for part in (slice(0, 3), slice(3, 6)):  # what the first window held is gone
        total = weights[part].sum()
        mean = np.tensordot(weights[part], GRADS[part], 2) / total if total else np.zeros(3)
        last = updates[part][-1]
        np.testing.assert_allclose(last, np.tile(-mean, (REPLICAS, 1)), rtol=1e-4, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    ones = np.full((400, REPLICAS, 1), 1.0, jnp.bfloat16)  # a bfloat16 sum would stop at 256
    updates = calls(js.accumulate(CHAIN, every=400, average=False), ones)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates[-1].astype(np.float32), -400)


def test_only_calls_that_update_communicate():
    tx = js.accumulate(CHAIN, every=2)

    def program(step):
        one = lambda x: tx.update(x, tx.init(x), x, step=step)[0]  # noqa: E731
        return str(jax.make_jaxpr(lift(one, {"replica": 4}, "shard_map", (False,)))(jnp.ones(4)))

    assert "psum" not in program(False)
    assert "psum" in program(True)


def test_gradients_are_averaged_up_to_the_start():
    tx = js.post_local_gradients(js.every(2, start=2), js.all_reduce_gradients("replica"))
    out = calls(tx, GRADS)
    np.testing.assert_allclose(out[:2], np.repeat(GRADS[:2].mean(1, keepdims=True), 4, 1), 1e-5)
    np.testing.assert_array_equal(out[2:], GRADS[2:])


def test_the_inner_chain_is_traced_once():
    traced = []

    def update(updates, state, params=None):
        traced.append(1)
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = js.accumulate(inner, every=2)
    jax.make_jaxpr(lambda g: tx.update(g, tx.init(g), g))(jnp.ones(3))
    assert len(traced) == 1
