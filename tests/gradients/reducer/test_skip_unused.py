"""`skip_unused` leaves alone what no replica used, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import lift

PARAMS = {"a": jnp.arange(1.0, 5.0), "b": jnp.ones((2, 3)), "s": jnp.float32(2.0)}


def replicas(fn, arg) -> Any:
    """`fn` on replicas with equal arguments; the first one's results."""
    lifted = jax.jit(jax.vmap(fn, axis_name="replica", axis_size=2, in_axes=None))
    return jax.tree.map(lambda x: np.asarray(x)[0], lifted(arg))


OPTIMIZERS = {
    "by kind": optax.multi_transform(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y", "s": "y"}
    ),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_if_the_parameter_were_not_there(name):
    """Entries of `b` stay to the bit, all others are as without it; counts go on."""
    tx = js.gradients.skip_unused(
        optax.chain(js.all_reduce_gradients("replica"), OPTIMIZERS[name]), "replica"
    )
    plain = optax.chain(js.all_reduce_gradients("replica"), OPTIMIZERS[name])
    grads = jax.tree.map(lambda p: 0.1 * p, PARAMS)
    unused = {**grads, "b": jnp.zeros((2, 3))}

    def run(params):
        factor = 1.0 + jax.lax.axis_index("replica").astype(jnp.float32)
        varying = lambda g: jax.tree.map(lambda x: x * factor, g)  # noqa: E731
        first, state = tx.update(varying(grads), tx.init(params), params)
        start, plain_state = plain.update(varying(grads), plain.init(params), params)
        second, after = tx.update(varying(unused), state, params)
        reference, plain_after = plain.update(varying(unused), plain_state, params)
        return first, start, second, reference, state, after, plain_after

    first, start, second, reference, state, after, plain_after = replicas(run, PARAMS)
    assert list(state.used_by) == [2, 2, 2]
    assert list(after.used_by) == [2, 0, 2]
    assert list(after.times_used) == [2, 1, 2]
    jax.tree.map(np.testing.assert_array_equal, first, start)
    assert not np.any(second["b"])
    for leaf in "as":
        # Programs that differ may round differently.
        np.testing.assert_allclose(second[leaf], reference[leaf], rtol=1e-6)
    paths = jax.tree_util.tree_flatten_with_path(after.inner)[0]
    old, plain_leaves = jax.tree.leaves(state.inner), jax.tree.leaves(plain_after)
    for (path, x), before, expected in zip(paths, old, plain_leaves, strict=True):
        belongs = jax.tree_util.DictKey("b") in path
        assert np.array_equal(x, before if belongs else expected), path


def test_state_of_the_reduction_is_not_touched():
    """Also where it looks like the parameters."""

    def update(bucket, state):
        return jax.lax.pmean(bucket.flat, bucket.axis_name), state + 1

    hook = js.hooks.CommHook(lambda bucket: jnp.zeros(bucket.size), update)
    reduce = js.all_reduce_gradients("replica", bucket_bytes=0, first_bucket_bytes=0, hook=hook)
    tx = js.gradients.skip_unused(optax.chain(reduce, optax.adam(0.1)), "replica")

    def run(params):
        state: Any = tx.init(params)
        for used in (False, [False, True]):
            _, state = tx.update(params, state, params, used=used)
        return state.inner

    reduction, (moments, _) = replicas(run, [jnp.ones(3)] * 2)
    assert reduction.count == 2
    assert all(np.array_equal(x, [2.0] * 3) for x in jax.tree.leaves(reduction.hook))
    assert not np.any(moments.mu[0])
    assert np.allclose(moments.mu[1], 0.1)


def test_names_of_what_is_not_used():
    """In the last update, and in any; before it nothing is known."""
    tx = js.gradients.skip_unused(optax.sgd(0.1), "replica")
    params = {"a": {"x": 1.0, "y": 1.0}, "b": 1.0}
    update = jax.jit(jax.vmap(tx.update, in_axes=(None, 0), axis_name="replica", axis_size=2))
    state, names = jax.vmap(tx.init, axis_size=2, in_axes=None)(params), []
    for used in (None, (0.0, 0.0, 1.0), (0.0, 3.0, 0.0)):
        if used is not None:
            _, state = update({"a": {"x": used[0], "y": used[1]}, "b": used[2]}, state)
        names.append([js.gradients.unused_names((state,), params, ever=x) for x in (False, True)])
    assert names == [[[], []], [["a/x", "a/y"]] * 2, [["a/x", "b"], ["a/x"]]]
    # What can't be used at all is known before the first step.
    loss = lambda params, batch: params["b"] * batch  # noqa: E731
    assert js.gradients.unused_parameters(loss, params, 1.0) == ["a/x", "a/y"]


def test_one_small_all_reduce():
    tx = js.gradients.skip_unused(optax.adamw(0.1), "replica")
    update = lift(lambda p: tx.update(p, tx.init(p), p)[0], {"replica": 4}, "shard_map", (False,))
    shapes = {name: jax.ShapeDtypeStruct((4, 8), jnp.float32) for name in "abcde"}
    (row,) = js.comm_report_of(update.lower(shapes), compile=False).select(level="emitted")
    assert (row.axis, row.collective, row.count) == ("replica", "all-reduce", 1)
    assert row.bytes == 4 * 5
