"""SlowMo and its slow momentum: recorded anchors, rates that change."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from golden import slow_momentum as recorded


def alone(**options):
    """SlowMo without a base, which warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="slowmo without a `base`")
        return js.slowmo("replica", **options)


def test_defaults_are_those_of_the_documentation():
    """Momentum 0.5, outer rate 1, inner rate 1, every 48 updates."""
    tx = alone()
    assert [t for t in range(1, 100) if tx.due(t)] == [48, 96]
    one, velocity = js.slow_momentum(), 0.0
    state = one.init(jnp.zeros(()))
    for d in (1.0, 2.0, -1.0):
        velocity = 0.5 * velocity + d
        step, state = one.update(jnp.float32(d), state)
        assert float(step) == -velocity


# Rates that change


@given(exponents=st.lists(st.floats(-8, 0), min_size=2, max_size=30), momentum=st.floats(0, 0.99))
def test_no_displacement_comes_back_larger_than_the_rate_allows(exponents, momentum):
    """One displacement at the first rate, none later: never above rate now / rate then, or 1."""
    rates = [10**e for e in exponents]
    tx = js.slow_momentum(momentum)
    state = tx.init(jnp.zeros(()))
    for i, rate in enumerate(rates):
        step, state = tx.update(jnp.float32(i == 0), state, learning_rate=rate)
        assert -float(step) <= max(1.0, rate / rates[0]) * (1 + 1e-4)


def test_a_rate_below_zero_by_rounding_keeps_steps_finite_and_bounded():
    tx = js.slow_momentum(0.5)
    state = tx.init(jnp.zeros(1))
    for rate in (0.1, -1e-9, 0.1, 0.1):
        step, state = tx.update(jnp.ones(1), state, learning_rate=rate)
    assert np.isfinite(step).all()
    assert abs(float(step[0])) <= 2


def test_an_infinite_rate_of_one_replica_is_that_of_all():
    """NaN on the replica that has it would move its anchor away from the others."""
    base = js.local_sgd("replica", sync_every=1)
    tx = js.slowmo("replica", base=base, sync_every=1, learning_rate="optimizer")

    def last(w, rate):
        return tx.update(w, tx.init(w), w, learning_rate=rate)[1].shared["outer"].last_rate

    found = jax.vmap(last, axis_name="replica")(jnp.ones((2, 3)), jnp.asarray([jnp.inf, 0.5]))
    np.testing.assert_array_equal(found, [np.inf, np.inf])


# The recorded cases


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
        tx = alone(
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
