"""`skip_unused` leaves alone what no replica used, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.executions import lift

PARAMS = {"a": jnp.arange(1.0, 5.0), "b": jnp.ones((2, 3)), "s": jnp.float32(2.0)}


def replicas(fn, *args, count=2) -> Any:
    """`fn` on replicas with equal arguments; the first one's results."""
    lifted = jax.jit(
        jax.vmap(fn, axis_name="replica", axis_size=count, in_axes=(None,) * len(args))
    )
    return jax.tree.map(lambda x: np.asarray(x)[0], lifted(*args))


OPTIMIZERS = {
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "scheduled": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 10)),
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": False, "s": True}),
    "by kind": optax.multi_transform(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y", "s": "y"}
    ),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1, weight_decay=0.1)),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_if_the_parameter_were_not_there(name):
    """Entries of `b` stay to the bit, all others are as without it; counts go on."""
    tx = js.skip_unused(
        optax.chain(js.all_reduce_gradients("replica"), OPTIMIZERS[name]), "replica"
    )
    plain = optax.chain(js.all_reduce_gradients("replica"), OPTIMIZERS[name])
    grads = jax.tree.map(lambda p: 0.1 * p, PARAMS)
    unused = {**grads, "b": jnp.zeros((2, 3))}

    def run(params):
        varying = lambda g: jax.tree.map(lambda x: x * (1 + jax.lax.axis_index("replica")), g)  # noqa: E731
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
    kept = 0
    paths = jax.tree_util.tree_flatten_with_path(after.inner)[0]
    old, plain_leaves = jax.tree.leaves(state.inner), jax.tree.leaves(plain_after)
    for (path, x), before, expected in zip(paths, old, plain_leaves, strict=True):
        belongs = jax.tree_util.DictKey("b") in path
        assert np.array_equal(x, before if belongs else expected), path
        kept += belongs and not np.array_equal(before, expected)
    assert kept or name == "masked"


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_single_leaf_is_not_taken_for_a_count(shape):
    tx = js.skip_unused(optax.adam(0.1), "replica")

    def run(p):
        _, state = tx.update(p, tx.init(p), p)
        return tx.update(jnp.zeros_like(p), state, p)

    updates, state = replicas(run, jnp.ones(shape))
    assert not np.any(updates)
    assert state.inner[0].count == 2
    assert np.allclose(state.inner[0].mu, 0.1)


def test_state_of_the_reduction_is_not_touched():
    """Also where it looks like the parameters, and where buckets are given by position."""

    def init(bucket):
        return jnp.zeros((bucket.size,))

    def update(bucket, state):
        return jax.lax.pmean(bucket.flat, bucket.axis_name), state + 1

    hook = js.hooks.CommHook(init, update)
    order = js.ready_order(lambda p, x: jnp.sum(p[0] * x) + jnp.sum(p[1]), [jnp.ones(3)] * 2, 1.0)
    reduce = js.all_reduce_gradients(
        "replica", bucket_bytes=0, first_bucket_bytes=0, order=order, hook=hook
    )
    tx = js.skip_unused(optax.chain(reduce, optax.adam(0.1)), "replica")

    def run(params):
        state: Any = tx.init(params)
        for used in (False, [False, True]):
            _, state = tx.update([jnp.ones(3)] * 2, state, params, used=used)
        return state.inner

    reduction, (moments, _) = replicas(run, [jnp.ones(3)] * 2)
    assert reduction.count == 2
    assert all(np.array_equal(x, [2.0] * 3) for x in jax.tree.leaves(reduction.hook))
    assert not np.any(moments.mu[0])
    assert np.allclose(moments.mu[1], 0.1)


def test_uses_of_a_replica_that_has_run_out_do_not_count():
    """Its gradients are ignored, so none of them is a use; a NaN elsewhere is one."""
    reduce = js.all_reduce_gradients("replica", divide_by="active")
    tx = js.skip_unused(optax.chain(reduce, optax.sgd(1.0)), "replica")

    def run(params):
        last = jax.lax.axis_index("replica") == 1
        grads = {
            "a": jnp.where(last, jnp.nan, 0.0) * params["a"],
            "b": jnp.where(last, 0.0, jnp.nan) * params["b"],
            "s": params["s"],
        }
        return tx.update(grads, tx.init(params), params, weight=jnp.where(last, 0.0, 1.0))

    updates, state = replicas(run, PARAMS)
    assert list(state.used_by) == [0, 1, 1]
    assert not np.any(updates["a"])
    assert np.all(np.isnan(updates["b"]))
    assert updates["s"] == -2.0


@pytest.mark.parametrize("execution", ["vmap", "shard_map", "shard_map_unchecked"])
def test_two_levels(execution):
    """Used by one device of one replica is used by all; behind the reduction means tell."""
    axes = {"replica": 2, "device": 2}
    whole = optax.chain(js.all_reduce_gradients(tuple(axes)), optax.sgd(1.0))
    around = js.skip_unused(whole, tuple(axes))
    behind = js.skip_unused(optax.sgd(1.0), "replica")
    reduce = js.all_reduce_gradients(tuple(axes))

    def step(params, grads):
        state: Any
        other: Any
        found, state = around.update(grads, around.init(params), params)
        means, _ = reduce.update(grads, reduce.init(params), params)
        same, other = behind.update(means, behind.init(params), params)
        return found, state.used_by, same, other.used_by

    grads = {name: np.zeros((2, 2, 3), np.float32) for name in "ab"}
    grads["a"][1, 0] = 4.0
    params = {name: np.ones((2, 3), np.float32) for name in "ab"}
    out = lift(step, axes, execution, (False, True))(params, grads)
    found, used_by, same, behind_by = jax.tree.map(np.asarray, out)
    assert np.array_equal(used_by, [[1, 0]] * 2)
    assert np.array_equal(behind_by, [[2, 0]] * 2)
    for updates in (found, same):
        assert np.array_equal(updates["a"], np.full((2, 3), -1.0))
        assert not np.any(updates["b"])


def test_used_may_be_a_prefix():
    tx = js.skip_unused(optax.sgd(1.0), "replica")
    params = {"a": {"x": jnp.ones(2), "y": jnp.ones(2)}, "b": jnp.ones(3)}

    def run(params):
        masks = (True, {"a": False, "b": True}, {"a": {"x": True, "y": False}, "b": False})
        states: Any = [tx.update(params, tx.init(params), params, used=used)[1] for used in masks]
        return [state.used_by for state in states]

    assert np.array_equal(replicas(run, params), [[2, 2, 2], [0, 0, 2], [2, 0, 0]])


def test_make_train_step_and_names(mesh_of):
    """A head that only some examples reach; weight decay leaves it alone until one does."""
    mesh = mesh_of({"replica": 2})
    tx = js.skip_unused(
        optax.chain(
            js.all_reduce_gradients("replica"),
            optax.add_decayed_weights(0.5),
            optax.sgd(0.1, momentum=0.9),
        ),
        "replica",
    )

    def loss(params, batch):
        value = jnp.mean(batch["x"] @ params["trunk"])
        return value + jnp.mean(batch["flag"] * jnp.sum(params["rare"]["head"]))

    params = {"never": jnp.ones(2), "rare": {"head": jnp.ones(3)}, "trunk": jnp.ones(4)}
    step = js.make_train_step(loss, tx, mesh=mesh, donate=False)
    state = step.init(params)
    assert js.unused_names(state, params) == []
    seen = []
    for flag in ([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]):
        batch = {"x": np.ones((4, 4), np.float32), "flag": np.array(flag, np.float32)}
        before, (state, _) = state, step(state, batch)
        names = js.unused_names(state, params)
        ever = js.unused_names(state.opt_state, state.params, ever=True)
        moved = [
            not np.array_equal(x, y)
            for x, y in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True)
        ]
        seen.append((names, ever, moved))
    rare = "rare/head"
    assert seen == [
        (["never", rare], ["never", rare], [False, False, True]),
        (["never"], ["never"], [False, True, True]),
        (["never", rare], ["never"], [False, False, True]),
    ]
    # What can't be used at all is known before the first step.
    example = {"x": jnp.ones((2, 4)), "flag": jnp.ones(2)}
    assert js.unused_parameters(loss, params, example) == ["never"]


def test_one_small_all_reduce(mesh_of):
    tx = js.skip_unused(optax.adamw(0.1), "replica")
    lifted = jax.jit(
        jax.shard_map(
            lambda p: tx.update(p, tx.init(p), p)[0],
            mesh=mesh_of({"replica": 4}),
            in_specs=P("replica"),
            out_specs=P("replica"),
        )
    )
    shapes = {name: jax.ShapeDtypeStruct((4, 8), jnp.float32) for name in "abcde"}
    (row,) = js.comm_report(lifted, shapes).select(level="emitted")
    assert (row.axis, row.collective, row.count) == ("replica", "all-reduce", 1)
    assert row.bytes == 4 * 5


def test_errors():
    with pytest.raises(ValueError, match="`inner` must be an optimizer; put the parameter"):
        js.skip_unused(js.local_sgd("replica"), "replica")
    with pytest.raises(ValueError, match=r"`inner` must be an optax transform, got 0\.1"):
        js.skip_unused(0.1, "replica")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="can't tell which entries of the state of `inner`"):
        js.skip_unused(optax.sm3(0.1), "replica").init(PARAMS)
    tx = js.skip_unused(optax.sgd(0.1), "replica")

    def update(used, axis="replica"):
        step = lambda p: tx.update(p, tx.init(p), p, used=used)[0]  # noqa: E731
        jax.eval_shape(jax.vmap(step, axis_name=axis, axis_size=2, in_axes=None), PARAMS)

    with pytest.raises(ValueError, match="`axis_name` 'replica' is not a mapped axis here"):
        update(None, axis="device")
    with pytest.raises(ValueError, match=r"`used` must hold bools of shape \(\), got b \(float32"):
        update({"a": True, "b": jnp.ones(()), "s": True})
    with pytest.raises(ValueError, match=r"`used` must .* got a \(bool\[4\]\)"):
        update({"a": jnp.ones(4, bool), "b": True, "s": True})
    with pytest.raises(ValueError, match="`used` must be a tree of bools like the gradients"):
        update({"a": True, "c": True})
    with pytest.raises(ValueError, match=r"`state` must hold one SkipUnusedState.*got 0"):
        js.unused_names(optax.sgd(0.1).init(PARAMS), PARAMS)
    state = replicas(tx.init, PARAMS)
    with pytest.raises(ValueError, match="`params` must be the 3 leaves"):
        js.unused_names(state, {"a": PARAMS["a"]})
    assert js.unused_names((state, ()), PARAMS) == []
