"""Tests of `js.dynamic_loss_scale`: what it divides, when it skips, and who skips together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import EXECUTIONS, lift
from support.exhaustive import sweep

REPLICAS = 4
PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(3)}


def scaled(optimizer, axes=(), **options):
    return js.dynamic_loss_scale(optimizer, axes, **{"initial": 8.0} | options)


def updates_of(tx, gradients, **extra):
    """Return (updates, state) of each call, with gradients that are scaled as by a scaled loss."""
    state, results = tx.init(PARAMS), []
    for g in gradients:
        big = jax.tree.map(lambda x: x * js.loss_scale_of(state), g)  # noqa: B023
        updates, state = tx.update(big, state, PARAMS, **extra)
        results.append((updates, state))
    return results


def like_params(x):
    return jax.tree.map(lambda p: jnp.full_like(p, x), PARAMS)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_updates_are_those_of_the_optimizer_to_the_bit():
    gradients = [like_params(x) for x in (0.3, -1.7, 5.0)]
    results = updates_of(scaled(optax.adam(0.1)), gradients)
    plain, state = optax.adam(0.1), optax.adam(0.1).init(PARAMS)
    for g, (updates, wrapped) in zip(gradients, results, strict=True):
        want, state = plain.update(g, state, PARAMS)
        assert_equal(updates, want)
        assert_equal(wrapped.inner, state)


def test_a_skipped_update_leaves_the_inner_state_as_it_was():
    bad = like_params(1.0) | {"b": jnp.asarray([1.0, jnp.nan, 1.0])}
    first, second, third = updates_of(scaled(optax.adam(0.1)), [like_params(1.0), bad] * 2)[:3]
    assert_equal(second[0], like_params(0.0))
    assert_equal(second[1].inner, first[1].inner)
    assert [int(s.skipped) for _, s in (first, second, third)] == [0, 1, 1]
    assert [bool(s.skipped_last) for _, s in (first, second, third)] == [False, True, False]
    assert [float(s.scale) for _, s in (first, second, third)] == [8, 4, 4]
    assert int(third[1].inner[0].count) == 2


def test_finite_given_by_the_caller_decides_what_is_skipped():
    for finite, skips in ((True, 0), (False, 1), (np.bool_(False), 1), (jnp.asarray(True), 0)):
        (updates, state), *_ = updates_of(scaled(optax.sgd(1.0)), [like_params(1.0)], finite=finite)
        assert int(state.skipped) == skips
        assert_equal(updates, like_params(0.0 if skips else -1.0))


def test_unscaled_gradients_are_not_divided_again():
    tx = scaled(optax.sgd(1.0))
    updates, _ = tx.update(like_params(3.0), tx.init(PARAMS), PARAMS, unscaled=True)
    assert_equal(updates, like_params(-3.0))


def test_gradients_are_divided_in_float32():
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = js.dynamic_loss_scale(optax.identity())
    updates, _ = tx.update({"w": jnp.float16([6e4, 6e-5])}, tx.init(params), params)
    assert updates["w"].dtype == jnp.float16
    np.testing.assert_array_equal(updates["w"], np.float16([6e4 / 65536, 0]))
    assert updates["w"][0] > 0  # 65536 itself is infinite in float16


def test_extra_arguments_pass_through_and_only_gradients_are_divided():
    heard = {}

    def update(updates, state, params=None, **extra):
        heard.update(extra)
        return updates, state

    tx = scaled(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    grads = {"rows": jnp.arange(3), "values": jnp.full(3, 16.0)}
    updates, _ = tx.update(grads, tx.init(grads), grads, grad=grads, value=5.0, weight=2.0)
    for divided in (updates, heard["grad"]):
        assert_equal(divided, {"rows": jnp.arange(3), "values": jnp.full(3, 2.0)})
    assert heard["value"] == 5.0
    assert heard["weight"] == 2.0
    assert set(heard) == {"grad", "value", "weight"}


def params_and_state_after_overflow(tx, execution, steps=3, **extra):
    """Return parameters and state after `steps` updates; replica 1 overflows in the second."""

    def step(params, state, bad):
        scale = js.loss_scale_of(state)
        grads = jax.tree.map(lambda p: jnp.where(bad, jnp.inf, scale) * jnp.ones_like(p), params)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    axes = {"replica": REPLICAS}
    params = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    state = lift(tx.init, axes, execution, (False,))(params)
    program = lift(step, axes, execution, (False,) * 3)
    for t in range(steps):
        params, state = program(params, state, np.arange(REPLICAS) == (1 if t == 1 else -1))
    return params, state


@pytest.mark.parametrize("execution", sweep(EXECUTIONS, lambda name: name == "shard_map"))
def test_all_skip_together_over_axes(execution):
    params, state = params_and_state_after_overflow(scaled(optax.sgd(1.0), "replica"), execution)
    np.testing.assert_array_equal(state.skipped, [1] * REPLICAS)
    np.testing.assert_array_equal(state.scale, [4] * REPLICAS)
    np.testing.assert_array_equal(params["b"], np.full((REPLICAS, 3), 1 - 2.0))


def test_each_replica_has_its_own_scale_without_axes():
    params, state = params_and_state_after_overflow(scaled(optax.sgd(1.0)), "shard_map")
    np.testing.assert_array_equal(state.skipped, [0, 1, 0, 0])
    np.testing.assert_array_equal(state.scale, [8, 4, 8, 8])
    np.testing.assert_array_equal(params["b"][:, 0], [-2, -1, -2, -2])


INSIDE = {
    "reduced": optax.chain(js.all_reduce_gradients("replica"), optax.sgd(1.0)),
    "reduced with a memory": optax.chain(
        js.all_reduce_gradients("replica", hook=js.hooks.top_k(1.0)), optax.sgd(1.0)
    ),
    # A collective in a conditional on a counter: alone in a skipped call a replica would miss it.
    "collected": js.accumulate(optax.chain(js.all_reduce_gradients("replica"), optax.sgd(1.0)), 2),
}


@pytest.mark.parametrize(
    ("name", "execution"),
    sweep(
        itertools.product(INSIDE, ["vmap", "shard_map"]),
        lambda name, execution: (name == "collected") == (execution == "shard_map"),
    ),
)
def test_replicas_that_exchange_gradients_skip_together(name, execution):
    params, state = params_and_state_after_overflow(scaled(INSIDE[name]), execution)
    np.testing.assert_array_equal(state.skipped, [1] * REPLICAS)
    steps = 1 if name == "collected" else 2
    np.testing.assert_allclose(params["b"], np.full((REPLICAS, 3), 1.0 - steps))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_window_around_it_is_skipped_as_a_whole():
    tx = js.accumulate(scaled(optax.sgd(1.0)), 2)
    results = updates_of(tx, [like_params(x) for x in (1.0, jnp.inf, 2.0, 4.0)])
    assert_equal(results[1][0], like_params(0.0))
    assert_equal(results[3][0], like_params(-3.0))
    assert int(results[3][1].inner.skipped) == 1


OPTAX = {
    "MultiSteps": optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "partition": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "noise and clipping": optax.chain(
        optax.add_noise(0.1, 0.5, 0), optax.clip_by_global_norm(1.0), optax.adam(0.1)
    ),
}


@pytest.mark.parametrize("name", sweep(OPTAX, lambda name: name == "MultiSteps"))
def test_optimizers_of_optax_skip_and_go_on(name):
    inner = OPTAX[name]
    good, bad = like_params(0.5), like_params(jnp.inf)
    results = updates_of(scaled(inner), [good, bad, good])
    state = inner.init(PARAMS)
    for updates, wrapped in (results[0], results[2]):
        want, state = inner.update(good, state, PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, want)
        assert jax.tree.structure(wrapped.inner) == jax.tree.structure(state)


def test_one_flag_is_sent_and_none_without_axes():
    grads = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    for axes, calls in ((("replica",), 1), ((), 0)):
        tx = scaled(optax.adam(0.1), axes)

        def run(g, tx=tx):
            return tx.update(g, tx.init(g), g)[0]

        lowered = lift(run, {"replica": REPLICAS}, "shard_map", (False,)).lower(grads)
        assert lowered.as_text().count("stablehlo.all_reduce") == calls


def test_a_scan_carries_its_state():
    """Under shard_map with types, a scale over axes has the type of equal values."""

    def run(params, tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), state.scale

        return jax.lax.scan(body, (params, tx.init(params)), None, length=2)[1]

    params = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    for tx in (
        scaled(optax.adam(0.1)),
        scaled(optax.adam(0.1), "replica"),
        scaled(INSIDE["reduced"]),
    ):
        scales = lift(lambda p, tx=tx: run(p, tx), {"replica": REPLICAS}, "shard_map", (False,))(
            params
        )
        np.testing.assert_array_equal(scales, np.full((REPLICAS, 2), 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: js.dynamic_loss_scale(None), "`optimizer` must be an optax transform"),
        (
            lambda: js.dynamic_loss_scale(optax.MultiSteps(optax.sgd(1.0), 2)),
            r"gradient_transformation\(\)",
        ),
        (lambda: js.dynamic_loss_scale(js.local_sgd("replica")), "js.ParameterTransform"),
        (lambda: js.dynamic_loss_scale(optax.sgd(1.0), (1,)), "`axes` must be the name"),
        (lambda: js.dynamic_loss_scale(optax.sgd(1.0), growth=0.5), "`growth` must be > 1"),
        (
            lambda: scaled(optax.chain(optax.sgd(1.0), js.local_sgd("replica"))).init(PARAMS),
            "a chain that holds a parameter transform",
        ),
        (lambda: scaled(scaled(optax.sgd(1.0))).init(PARAMS), "another js.dynamic_loss_scale"),
        (
            lambda: optax.masked(scaled(optax.sgd(1.0)), {"w": True, "b": False}).init(PARAMS),
            "around optax.masked",
        ),
        (lambda: updates_of(scaled(optax.sgd(1.0), "nowhere"), [PARAMS]), "'nowhere'.*compiler"),
        (lambda: updates_of(scaled(optax.sgd(1.0)), [PARAMS], finite=1), "`finite` must be"),
        (lambda: updates_of(scaled(optax.sgd(1.0)), [PARAMS], finite=[True]), "`finite` must be"),
        (lambda: updates_of(scaled(optax.sgd(1.0)), [PARAMS], weight=-1), "`weight` must be"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
