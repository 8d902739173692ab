"""Gradients of several calls as one update; `test_golden_ddp.py` has sums, and post-local SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support.executions import lift

REPLICAS = 4
WEIGHTED = js.gradients.accumulate(
    optax.chain(js.all_reduce_gradients("replica", divide_by="active"), optax.sgd(1.0)), every=3
)


def updates_of(tx):
    """Compile `(gradients, weights) -> updates` of every call, (calls, replicas, ...)."""

    def one_replica(grads, weights):
        def call(state, given):
            g, w = given
            updates, state = tx.update(g, state, g, **({} if w is None else {"weight": w}))
            return state, updates

        return jax.lax.scan(call, tx.init(grads[0]), (grads, weights))[1]

    return jax.jit(jax.vmap(one_replica, axis_name="replica", in_axes=1, out_axes=1))


weighted = updates_of(WEIGHTED)
GRADS = np.random.default_rng(0).normal(size=(6, REPLICAS, 3)).astype(np.float32)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 3.0, 32.0]), min_size=6 * REPLICAS, max_size=6 * REPLICAS)
)
def test_weights_of_calls(flat):
    weights = np.float32(flat).reshape(6, REPLICAS)
    grads = np.where(weights[..., None] > 0, GRADS, np.nan).astype(np.float32)
    updates = np.asarray(weighted(grads, weights))
    for part in (slice(0, 3), slice(3, 6)):  # what the first window held is gone
        total = weights[part].sum()
        mean = np.tensordot(weights[part], GRADS[part], 2) / total if total else np.zeros(3)
        last = updates[part][-1]
        np.testing.assert_allclose(last, np.tile(-mean, (REPLICAS, 1)), rtol=1e-4, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    ones = np.full((400, 1, 1), 1.0, jnp.bfloat16)  # a bfloat16 sum would stop at 256
    tx = js.gradients.accumulate(optax.sgd(1.0), every=400, average=False)
    updates = updates_of(tx)(ones, None)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates[-1].astype(np.float32), -400)


def test_only_calls_that_update_communicate():
    tx = js.gradients.accumulate(js.all_reduce_gradients("replica"), every=2)

    def program(step):
        one = lambda x: tx.update(x, tx.init(x), x, step=step)[0]  # noqa: E731
        return str(jax.make_jaxpr(lift(one, {"replica": 4}, "shard_map", (False,)))(jnp.ones(4)))

    assert "psum" not in program(False)
    assert "psum" in program(True)
