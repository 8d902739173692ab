"""Tests of SlowMo and its slow momentum: runs worked by hand, changing rates, what is refused."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from golden import slow_momentum as recorded
from support.bad_input import PARAMS, one_update, slowmo_over_local, trace, warning_messages


def test_two_replicas_take_the_slow_steps_worked_by_hand():
    """Anchor 0, replicas that move by 1 and 3 in two updates each; gamma 0.5, then 0.25."""
    rates = jnp.asarray([1.0, 0.5, 0.5, 0.25])
    base = js.local_sgd("replica", sync_every=1)
    tx = js.slowmo(
        "replica",
        base=base,
        sync_every=2,
        momentum=0.5,
        slow_learning_rate=0.8,
        learning_rate=lambda t: rates[t],
    )

    def one(move):
        w = jnp.zeros(())
        state, seen = tx.init(w), []
        for _ in range(4):
            update, state = tx.update(move, state, w)
            w = w + update
            seen.append(w)
        return jnp.stack(seen)

    seen = jax.vmap(one, axis_name="replica")(jnp.asarray([1.0, 3.0]))
    # y = 4 = the base's average 2, and 2 more: D = -4, m = D / 0.5 = -8, anchor = 0.8 * 0.5 * 8.
    # y = 3.2 + 4: D = -4, m = 0.5 * -8 - 4 / 0.25 = -20, anchor = 3.2 + 0.8 * 0.25 * 20.
    np.testing.assert_allclose(seen, [[2, 3.2, 5.2, 7.2]] * 2, rtol=1e-6)


# Rates that fall to a floor and start again

PEAK, PERIOD, OPTIMUM = 0.1, 8, 1.5


def trajectory(floor, curvature, momentum):
    """Return the parameters after each of 300 steps on a quadratic, two slow steps per period."""

    def rate(count):
        through = (count % PERIOD) / (PERIOD - 1)
        return PEAK * (1 - through) + PEAK * floor * through

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="slowmo without a `base`")
        tx = js.slowmo("replica", sync_every=4, momentum=momentum, learning_rate=rate)

    def one(w):
        def step(carry, _):
            w, state = carry
            update = -rate(state.count) * curvature * (w - OPTIMUM)
            update, state = tx.update(update, state, w)
            return (w + update, state), w + update

        return jax.lax.scan(step, (w, tx.init(w)), length=300)[1]

    return jax.vmap(one, axis_name="replica")(jnp.zeros((2, 1)))


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_it_converges_for_every_floor(momentum):
    """Without the bound: 2.6e7 and more for a floor of a hundredth, and NaN below that."""
    floors, curvatures = np.meshgrid([1, 0.1, 1e-2, 1e-4, 1e-6, 1e-8, 0], [1.0, 5.0, 9.0])
    run = jax.jit(jax.vmap(lambda f, c: trajectory(f, c, momentum)))
    seen = np.asarray(run(floors.ravel().astype(np.float32), curvatures.ravel()))
    assert np.abs(seen).max() < 2 * OPTIMUM
    np.testing.assert_allclose(seen[:, :, -1], OPTIMUM, atol=0.05)


def test_momentum_is_rescaled_by_the_change_of_the_rate_up_to_a_bound():
    """Every displacement is 1; the rate stays, falls, returns and then grows beyond its start."""
    rates = [0.1, 0.1, 0.001, 0.001, 0.1, 0.2]
    carried = [0.0, 0.5, 0.005, 0.5, 0.1 / 0.025, 1.0]
    # Made at: 0.1, 0.1, then half of it and half of that; 0.1 again.
    carried[4] = min(0.5 * 0.1 / 0.001, max(0.5, 0.1 / 0.025))
    carried[5] = min(0.5 * 0.2 / 0.1, max(0.5, 0.2 / 0.1))
    tx, velocity = js.slow_momentum(0.5), 0.0
    state = tx.init(jnp.zeros(1))
    for rate, factor in zip(rates, carried, strict=True):
        step, state = tx.update(jnp.ones(1), state, learning_rate=rate)
        velocity = factor * velocity + 1
        np.testing.assert_allclose(-step, velocity, rtol=1e-5)


def steps_of_the_paper(rates, momentum, displacements):
    """Return what each slow step adds to the anchor: m <- momentum * m + D / gamma, in float64."""
    m, steps = 0.0, []
    for gamma, d in zip(rates, displacements, strict=True):
        m = momentum * m + d / gamma
        steps.append(-gamma * m)
    return steps


@given(
    rates=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8),
    momentum=st.floats(0, 0.99),
    growing=st.booleans(),
)
def test_rates_that_only_fall_or_only_grow_give_the_formula(rates, momentum, growing):
    ordered = sorted(rates, reverse=not growing)
    displacements = np.random.default_rng(0).normal(size=len(ordered))
    tx = js.slow_momentum(momentum)
    state, steps = tx.init(jnp.zeros(())), []
    for rate, d in zip(ordered, displacements, strict=True):
        step, state = tx.update(jnp.float32(d), state, learning_rate=jnp.float32(rate))
        steps.append(float(step))
    np.testing.assert_allclose(
        steps, steps_of_the_paper(ordered, momentum, displacements), rtol=1e-3, atol=1e-4
    )


@given(exponents=st.lists(st.floats(-8, 0), min_size=2, max_size=30), momentum=st.floats(0, 0.99))
def test_no_displacement_comes_back_larger_than_the_rate_allows(exponents, momentum):
    """One displacement at the first rate, none later: never above rate now / rate then, or 1."""
    rates = [10**e for e in exponents]
    tx = js.slow_momentum(momentum)
    state = tx.init(jnp.zeros(()))
    for i, rate in enumerate(rates):
        step, state = tx.update(jnp.float32(i == 0), state, learning_rate=rate)
        assert -float(step) <= max(1.0, rate / rates[0]) * (1 + 1e-4)


def test_rates_between_slow_steps_count():
    """The first slow step falls on the floor: what it holds was made at the peak."""
    rates = jnp.asarray([0.1, 0.1, 0.1, 1e-6, 0.1, 0.1, 0.1, 0.1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="slowmo without a `base`")
        tx = js.slowmo("replica", sync_every=4, momentum=0.5, learning_rate=lambda t: rates[t])

    def one(w):
        state = tx.init(w)
        for t in range(8):
            update, state = tx.update(jnp.full_like(w, -1.0 if t < 3 else 0.0), state, w)
            w = w + update
        return w

    params = jax.vmap(one, axis_name="replica")(jnp.zeros((2, 1)))
    np.testing.assert_allclose(params, np.full((2, 1), -3 - 3.0), rtol=1e-5)


def test_recorded_cases_are_those_of_their_script():
    assert json.loads(recorded.FILE.read_text()) == json.loads(recorded.text())


def test_every_recorded_case_gives_the_recorded_anchors():
    """Every parameter group of every case is replayed; `torch_compat` replays the same file."""
    cases = json.loads(recorded.FILE.read_text())["cases"]
    columns = [(case, i) for case in cases for i in range(len(case["rates"][0]))]
    updates = max(len(case["rates"]) for case in cases)
    rates, moves = np.zeros((2, len(columns), updates), np.float32)
    for row, (case, i) in enumerate(columns):
        rates[row, : len(case["rates"])] = np.array(case["rates"])[:, i]
        if case["displacements"]:
            moves[row, : len(case["rates"])] = np.array(case["displacements"])[:, 0]

    def run(rates, moves, momentum, slow_rate, curvature, optimum):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="slowmo without a `base`")
            tx = js.slowmo(
                "replica",
                sync_every=recorded.SLOW_EVERY,
                momentum=momentum,
                slow_learning_rate=slow_rate,
                learning_rate=lambda count: rates[count],
            )

        def step(carry, now):
            w, state = carry
            rate, move = now
            update = move - jnp.maximum(rate, 0) * curvature * (w - optimum)
            update, state = tx.update(update, state, w)
            return (w + update, state), w + update

        start = jnp.zeros(1)
        return jax.lax.scan(step, (start, tx.init(start)), (rates, moves))[1]

    settings = [
        np.array([case[name] for case, _ in columns], np.float32)
        for name in ("momentum", "slow_lr", "curvature", "optimum")
    ]
    alike = jax.vmap(run, axis_name="replica", axis_size=2, in_axes=None)
    seen = np.asarray(jax.jit(jax.vmap(alike))(rates, moves, *settings))[:, 0, :, 0]
    for (case, i), row in zip(columns, seen, strict=True):
        anchors = np.array(case["anchors"])[:, i]
        ours = row[recorded.SLOW_EVERY - 1 :: recorded.SLOW_EVERY][: len(anchors)]
        np.testing.assert_allclose(ours, anchors, rtol=1e-4, atol=1e-5, err_msg=case["name"])


def test_a_rate_below_zero_by_rounding_keeps_steps_finite_and_bounded():
    tx = js.slow_momentum(0.5)
    state = tx.init(jnp.zeros(1))
    for rate in (0.1, -1e-9, 0.1, 0.1):
        step, state = tx.update(jnp.ones(1), state, learning_rate=rate)
    assert np.isfinite(step).all()
    assert abs(float(step[0])) <= 2


def test_numpy_scalars_as_arguments_keep_dtypes():
    """Values from a NumPy sweep are not weakly typed, so under x64 they would widen the state."""
    with jax.enable_x64(True):
        tx = js.slowmo(
            "replica",
            base=js.local_sgd("replica", sync_every=2),
            sync_every=4,
            momentum=np.float64(0.5),
            slow_learning_rate=np.float64(1.0),
            learning_rate=np.float64(0.1),
        )
        params = {"f": jnp.ones((4, 3), jnp.float32)}

        def step(params):
            state = tx.init(params)
            updates, after = tx.update(params, state, params)
            return state, after, updates

        before, after, updates = jax.eval_shape(jax.vmap(step, axis_name="replica"), params)
        types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)  # noqa: E731
        assert types(before) == types(after)
        assert types(updates) == types(params)


# Refused arguments and warnings


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5, float("nan")])
def test_momentum_outside_of_its_range_is_refused(momentum):
    for make in (lambda m: slowmo_over_local(momentum=m), js.slow_momentum):
        with pytest.raises(ValueError, match=rf"`momentum` must lie in \[0, 1\), got {momentum}"):
            make(momentum)


@pytest.mark.parametrize("rate", ["slow_learning_rate", "learning_rate"])
@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_negative_rates_are_refused(rate, value):
    with pytest.raises(ValueError, match=rf"`{rate}` must be >= 0, got {value}"):
        slowmo_over_local(**{rate: value})


def test_edges_of_the_ranges_are_allowed():
    slowmo_over_local(momentum=0.0, slow_learning_rate=0.0, learning_rate=0.0, sync_every=3)


@pytest.mark.parametrize("base", [optax.sgd(0.1), optax.adam(0.1), "local_sgd"])
def test_a_base_that_is_no_parameter_transform_is_refused(base):
    message = rf"`base` must be a js\.ParameterTransform .* got {type(base).__name__}"
    with pytest.raises(ValueError, match=message):
        js.slowmo("replica", base=base)


@pytest.mark.parametrize("base", [slowmo_over_local, js.diloco])
def test_a_base_with_its_own_slow_step_is_refused(base):
    with pytest.raises(ValueError, match=r"slowmo: `base` must have no slow step of its own"):
        js.slowmo("replica", base=base("replica"))


def test_inexact_average_cannot_be_sharded():
    with pytest.raises(ValueError, match=r"`exact_average=False`.*shard_state=True"):
        slowmo_over_local(exact_average=False, shard_state=True)
    slowmo_over_local(exact_average=False, shard_state=False, sync_every=3)
    slowmo_over_local(exact_average=False, sync_every=3)


def test_inexact_average_needs_a_base():
    with pytest.raises(ValueError, match=r"`exact_average=False` .*without a base.*give a base"):
        js.slowmo("replica", exact_average=False)


def test_slowmo_without_a_base_warns_once():
    transforms = []
    messages = warning_messages(
        lambda: transforms.append(js.slowmo("replica")),
        lambda: trace(one_update(*transforms), PARAMS),
    )
    assert len(messages) == 1
    assert re.search(r"slowmo without a `base`.*base=js\.local_sgd.*js\.diloco", messages[0])


def test_slow_period_that_is_no_multiple_warns_once():
    transforms = []
    messages = warning_messages(
        lambda: transforms.append(slowmo_over_local(sync_every=4)),
        lambda: trace(one_update(*transforms), PARAMS),
        lambda: trace(one_update(*transforms), PARAMS),
    )
    assert len(messages) == 1
    assert re.search(r"`sync_every`=4 is not a multiple of the base's 3", messages[0])
    assert warning_messages(lambda: slowmo_over_local(sync_every=6)) == []


def test_an_infinite_rate_of_one_replica_is_that_of_all():
    """NaN on the replica that has it would move its anchor away from the others."""
    params = {"w": jnp.ones((2, 3))}
    tx = js.slowmo(
        "replica",
        base=js.local_sgd("replica", sync_every=1),
        sync_every=1,
        learning_rate="optimizer",
    )

    def largest(params, rate):
        state = tx.init(params)
        return tx.update(params, state, params, learning_rate=rate)[1]

    rates = jnp.asarray([jnp.inf, 0.5], jnp.float32)
    state = jax.vmap(largest, axis_name="replica")(params, rates)
    (rates_used,) = [x.last_rate for x in jax.tree.leaves(state, is_leaf=_has_rate) if _has_rate(x)]
    np.testing.assert_array_equal(rates_used, [np.inf, np.inf])


def _has_rate(x):
    return hasattr(x, "last_rate")


@pytest.mark.parametrize("argument", ["momentum", "learning_rate", "slow_learning_rate"])
def test_truth_values_are_refused_as_numbers(argument):
    def make(value):
        js.slowmo(
            "replica",
            base=js.local_sgd("replica", sync_every=1),
            sync_every=1,
            **{argument: value},
        )

    for value in (True, np.True_, jnp.bool_(True), np.array(True)):
        with pytest.raises(ValueError, match=f"`{argument}` must be a number, got "):
            make(value)
    with pytest.raises(ValueError, match=f"`{argument}` must be a number, got "):
        jax.eval_shape(make, jnp.bool_(True))
