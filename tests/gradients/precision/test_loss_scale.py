"""Tests of `js.dynamic_loss_scale`: what it divides, when it skips, and who skips together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.gradients.precision import check_nesting
from support.executions import lift
from support.promotion import promoting

REPLICAS = 4
PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(3)}


def scaled(optimizer, axes=(), **options):
    return js.dynamic_loss_scale(optimizer, axes, **{"initial": 8.0} | options)


def updates_of(tx, gradients, **extra):
    """Return (updates, state) of each call, with gradients that are scaled as by a scaled loss."""

    @jax.jit
    def update(gradient, state):
        big = jax.tree.map(lambda x: x * js.loss_scale_of(state), gradient)
        return tx.update(big, state, PARAMS, **extra)

    state, results = tx.init(PARAMS), []
    for gradient in gradients:
        updates, state = update(gradient, state)
        results.append((updates, state))
    return results


def like_params(x):
    return jax.tree.map(lambda p: jnp.full_like(p, x), PARAMS)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_an_overflow_is_skipped_and_the_rest_is_the_optimizer():
    plain = promoting(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    state, update = plain.init(PARAMS), jax.jit(plain.update)
    bad = like_params(1.0) | {"b": jnp.asarray([1.0, jnp.nan, 1.0])}
    gradients = [like_params(0.3), bad, like_params(-1.7), bad, like_params(5.0)]
    results = updates_of(scaled(plain), gradients)
    for t, (updates, after) in enumerate(results):
        want = like_params(0.0)
        if t % 2 == 0:
            want, state = update(gradients[t], state, PARAMS)
        assert_equal(updates, want)
        assert_equal(after.inner, state)
    assert [int(s.skipped) for _, s in results] == [0, 1, 1, 2, 2]
    assert [bool(s.skipped_last) for _, s in results] == [False, True, False, True, False]
    assert [float(s.loss_scale) for _, s in results] == [8, 4, 4, 2, 2]


def test_finite_given_by_the_caller_decides_what_is_skipped():
    for finite, skips in ((True, 0), (np.bool_(False), 1), (jnp.asarray(True), 0)):
        (updates, state), *_ = updates_of(scaled(optax.sgd(1.0)), [like_params(1.0)], finite=finite)
        assert int(state.skipped) == skips
        assert_equal(updates, like_params(0.0 if skips else -1.0))


def test_gradients_are_divided_in_float32():
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = js.dynamic_loss_scale(optax.identity())
    updates, _ = tx.update({"w": jnp.float16([6e4, 6e-5])}, tx.init(params), params)
    assert updates["w"].dtype == jnp.float16
    np.testing.assert_array_equal(updates["w"], np.float16([6e4 / 65536, 0]))
    assert updates["w"][0] > 0  # 65536 itself is infinite in float16


@pytest.mark.parametrize("unscaled", [False, True])
def test_extra_arguments_pass_through_and_only_gradients_are_divided(unscaled):
    heard = {}

    def update(updates, state, params=None, **extra):
        heard.update(extra)
        return updates, state

    tx = scaled(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    grads = {"rows": jnp.arange(3), "values": jnp.full(3, 16.0)}
    extra = {"grad": grads, "value": 5.0, "weight": 2.0}
    updates, _ = tx.update(grads, tx.init(grads), grads, unscaled=unscaled, **extra)
    want = grads if unscaled else {"rows": jnp.arange(3), "values": jnp.full(3, 2.0)}
    assert_equal((updates, heard), (want, extra | {"grad": want}))


def reduce(hook=None):
    return optax.chain(js.all_reduce_gradients("replica", hook=hook), optax.sgd(1.0))


TOGETHER = {
    "over axes": scaled(optax.sgd(1.0), "replica"),
    "reduced with a memory": scaled(reduce(js.hooks.top_k(1.0))),
    # A collective in a conditional on a counter: alone in a skipped call a replica would miss it.
    "collected": scaled(js.gradients.accumulate(reduce(), 2)),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_replicas_that_exchange_gradients_or_have_an_axis_skip_together(name):
    """Replica 1 overflows in the second of three updates."""
    tx, axes = TOGETHER[name], {"replica": REPLICAS}
    execution = "shard_map" if name == "collected" else "vmap"

    def step(params, state, bad):
        scale = js.loss_scale_of(state)
        grads = jax.tree.map(lambda p: jnp.where(bad, jnp.inf, scale) * jnp.ones_like(p), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    state = lift(tx.init, axes, execution, (False,))(params)
    program = lift(step, axes, execution, (False,) * 3)
    for t in range(3):
        params, state = program(params, state, np.arange(REPLICAS) == (1 if t == 1 else -1))
    np.testing.assert_array_equal(state.skipped, [1] * REPLICAS)
    np.testing.assert_array_equal(state.loss_scale, [4] * REPLICAS)
    steps = 1 if name == "collected" else 2
    np.testing.assert_allclose(params["b"], np.full((REPLICAS, 3), 1.0 - steps))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_window_around_it_is_skipped_as_a_whole():
    tx = js.gradients.accumulate(scaled(optax.sgd(1.0)), 2)
    results = updates_of(tx, [like_params(x) for x in (1.0, jnp.inf, 2.0, 4.0)])
    assert_equal(results[1][0], like_params(0.0))
    assert_equal(results[3][0], like_params(-3.0))
    assert int(results[3][1].inner.skipped) == 1


def test_one_flag_is_sent_and_none_without_axes():
    grads = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    for axes, calls in ((("replica",), 1), ((), 0)):
        tx = scaled(optax.adam(0.1), axes)
        run = lambda g, tx=tx: tx.update(g, tx.init(g), g)[0]  # noqa: E731
        lowered = lift(run, {"replica": REPLICAS}, "shard_map", (False,)).lower(grads)
        assert lowered.as_text().count("stablehlo.all_reduce") == calls


def test_an_optimizer_may_map_over_axes_of_its_own(mesh_of):
    """Their collectives bind axes that the wrapper does not have."""
    mesh, sharded = mesh_of({"replica": 2, "fsdp": 4}), jax.sharding.PartitionSpec("fsdp")

    def normed(x):
        total = jax.lax.psum(jnp.sum(jnp.abs(x)), "fsdp")
        return jnp.where(total > 0, x / total, x)

    def update(grads, params):
        how = {"in_specs": sharded, "out_specs": sharded, "axis_names": {"fsdp"}}
        return jax.tree.map(jax.shard_map(normed, **how), grads)

    tx = js.dynamic_loss_scale(optax.chain(optax.stateless(update), optax.sgd(1.0)))
    step = js.make_train_step(
        lambda p, b: jnp.sum(p["w"]) * jnp.mean(b),
        tx, mesh=mesh, sync=js.local_sgd("replica", sync_every=1),
    )  # fmt: skip
    state = step.init({"w": jax.device_put(np.ones(8), jax.NamedSharding(mesh, sharded))})
    for x in (1.0, np.inf):
        state, _ = step(state, np.full(8, x, np.float32))
    np.testing.assert_allclose(state.params["w"], 7 / 8)


def test_the_scale_is_found_wherever_the_wrapper_stands():
    found = scaled(optax.sgd(0.1))
    for tx in (
        optax.named_chain(("scaled", found)),
        js.chain(found, js.local_sgd("replica")),
        js.gradients.accumulate(found, 2),
        optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(0.1),
    ):
        state = tx.init(PARAMS)
        assert js.loss_scale_of(state) == 8
        check_nesting(state)
    assert js.loss_scale_of(optax.adam(0.1).init(PARAMS)) is None
    stacked = found.init(PARAMS)._replace(loss_scale=np.float32([8, 4]))
    np.testing.assert_array_equal(js.loss_scale_of((stacked, ())), [8, 4])
