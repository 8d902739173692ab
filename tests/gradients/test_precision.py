"""Tests of `js.dynamic_loss_scale`: what it divides, when it skips, and who skips together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.gradients.precision import ScaleRule, check_nesting
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


def test_one_flag_is_sent_and_none_without_axes():
    grads = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), PARAMS)
    for axes, calls in ((("replica",), 1), ((), 0)):
        tx = scaled(optax.adam(0.1), axes)
        run = lambda g, tx=tx: tx.update(g, tx.init(g), g)[0]  # noqa: E731
        lowered = lift(run, {"replica": REPLICAS}, "shard_map", (False,)).lower(grads)
        assert lowered.as_text().count("stablehlo.all_reduce") == calls


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


# The rule


def expected(pattern, initial, growth_interval, hysteresis, growth, backoff, min_scale, max_scale):
    """(scale, growth count, hysteresis left) after each update, as ColossalAI's scaler has them."""
    scale, count, left, found = np.float32(initial), 0, hysteresis, []
    for overflow in pattern:
        if overflow:
            count, left = 0, left - 1
            if left <= 0:
                scale = max(scale * np.float32(backoff), np.float32(min_scale))
        else:
            count += 1
            if count == growth_interval:
                count, left = 0, hysteresis
                if scale < max_scale:
                    scale = scale * np.float32(growth)
        found.append((scale, count, max(left, 0)))
    return found


@functools.cache
def compiled(**options):
    rule = ScaleRule(**options)

    def step(state, overflow):
        state = rule.next_state(state, overflow)
        return state, state

    return jax.jit(lambda pattern: jax.lax.scan(step, rule.init_state(()), pattern)[1])


# Interval, hysteresis, growth, backoff, least and largest scale.
RULES = [
    (2, 1, 3.0, 0.3, 8.0, 24.0),
    (3, 1, 1.5, 0.9, 1e-30, 1e30),
    (1, 2, 3.0, 0.3, 1.0, 64.0),
    (2, 3, 1.5, 0.9, 16.0, 16.0),
]


@given(st.lists(st.booleans(), min_size=24, max_size=24), st.sampled_from(RULES))
def test_any_pattern(pattern, rule):
    names = ("growth_interval", "hysteresis", "growth", "backoff", "min_scale", "max_scale")
    options = {"initial": 16.0, **dict(zip(names, rule, strict=True))}
    found = compiled(**options)(np.asarray(pattern, bool))
    scale, count, left = map(np.asarray, zip(*expected(pattern, **options), strict=True))
    np.testing.assert_allclose(found.loss_scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(found.growth_count, count)
    np.testing.assert_array_equal(found.hysteresis_left, left)
    np.testing.assert_array_equal(found.skipped, np.cumsum(pattern))
    np.testing.assert_array_equal(found.skipped_last, pattern)
    assert found.loss_scale.dtype == np.float32


def test_by_default_it_is_the_scaler_of_torch():
    """65536, halved by an overflow and doubled after 2000 updates without; down to 1."""
    tx = js.dynamic_loss_scale(optax.identity())

    def step(state, overflow):
        _, state = tx.update(jnp.where(overflow, jnp.inf, 1.0), state)
        return state, state.loss_scale

    overflows = np.zeros(4200, bool)
    overflows[[100, *range(4180, 4200)]] = True
    _, scales = jax.lax.scan(step, tx.init(jnp.float32(0)), overflows)
    found = np.log2(scales)
    assert np.flatnonzero(np.diff(found))[:4].tolist() == [99, 2099, 4099, 4179]
    assert found[[0, 100, 2100, 4100, 4199]].tolist() == [16, 15, 16, 17, 0]


# The policy

TREE = {
    "decoder": {"norm": jnp.ones(2), "dense": [jnp.ones(2), jnp.ones(2, jnp.bfloat16)]},
    "rows": jnp.arange(2),
    "key": jax.random.key(0),
    "wave": jnp.ones(1, jnp.complex64),
    "host": np.ones(2, np.float64),
    "number": 0.5,
}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("decoder", [True, True, True]),
        (("*/norm", "*/dense/0"), [True, False, True]),
        ("norm", [False, False, False]),
    ],
)
def test_all_real_floating_leaves_are_cast_but_those_that_are_kept(keep, kept):
    cast = js.gradients.Policy("float16", keep=keep).cast(TREE)
    assert jax.tree.structure(cast) == jax.tree.structure(TREE)
    both = zip(*(jax.tree.leaves(tree["decoder"]) for tree in (cast, TREE)), strict=True)
    found = [(x is y, x.dtype == jnp.float16) for x, y in both]
    assert found == [(is_kept, not is_kept) for is_kept in kept]
    assert jnp.result_type(cast["host"]) == jnp.result_type(cast["number"]) == jnp.float16
    assert all(cast[same] is TREE[same] for same in ("rows", "key", "wave"))
