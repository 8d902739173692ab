"""`js.slowmo(learning_rate="optimizer")`: the rate is read from the optimizer's state."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.bad_input import PARAMS, one_update, trace
from support.exhaustive import sweep

REPLICAS, STEPS = 4, 10
START = {"b": np.zeros(2, np.float32), "w": np.random.default_rng(0).normal(size=5)}
START["w"] = START["w"].astype(np.float32)
BATCHES = np.random.default_rng(1).normal(size=(STEPS, 2 * REPLICAS, 5)).astype(np.float32)
RATES = np.float32([0.05, 0.2, 0.2, 0.1, 0.1, 0.02, 0.1, 0.05, 0.05, 0.0])
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}
WHERE = {"sharded": {}, "whole": {"shard_state": False}, "inexact": {"exact_average": False}}


def schedule(count):
    return jnp.asarray(RATES)[count]


def slow(rate, **options):
    base = js.local_sgd("replica", sync_every=2)
    arguments = {"sync_every": 4, "momentum": 0.7, "slow_learning_rate": 0.9, **options}
    return js.slowmo("replica", base=base, learning_rate=rate, **arguments)


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["b"] * batch[0, :2])


INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9)


def step_of(sync, optimizer=INJECTED, kind="virtual", **options):
    mesh = KINDS[kind]({"replica": REPLICAS})
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, donate=False, **options)


def history_and_state(step, weights=None):
    """Train on all batches; return the parameters after every step, and the last state."""
    state, history = step.init(START), []
    for t, batch in enumerate(BATCHES):
        state, _ = step(state, batch, None if weights is None else weights[t])
        history.append(jax.tree.map(np.asarray, state.params))
    return history, state


def assert_same(actual, expected):
    """Raise unless the trees are equal up to what two programs round differently."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# The same trajectory as with the schedule passed to both


@pytest.mark.parametrize(
    ("where", "mode"),
    sweep(
        itertools.product(WHERE, ["traced", "host"]),
        lambda where, mode: (where == "sharded") == (mode == "host"),
    ),
)
def test_it_trains_as_with_the_schedule_of_the_optimizer(where, mode):
    with_optimizer_rate, _ = history_and_state(
        step_of(slow("optimizer", **WHERE[where]), mode=mode)
    )
    with_schedule, _ = history_and_state(step_of(slow(schedule, **WHERE[where]), mode=mode))
    assert_same(with_optimizer_rate, with_schedule)


def test_without_a_rate_it_is_another_trajectory():
    with_rate, without_rate = (
        history_and_state(step_of(slow(rate)))[0][-1]["w"] for rate in ("optimizer", None)
    )
    assert np.abs(without_rate - with_rate).max() > 1e-3


def test_the_rate_is_found_in_chains_and_wrappers_on_devices():
    clipped = optax.chain(optax.clip(10.0), optax.masked(INJECTED, {"b": True, "w": True}))
    wanted, _ = history_and_state(step_of(slow(schedule), clipped, "devices"))
    history, _ = history_and_state(step_of(slow("optimizer"), clipped, "devices"))
    assert_same(history, wanted)


def test_only_finite_around_it_passes_the_rate_on():
    wanted, _ = history_and_state(step_of(slow(schedule)))
    history, state = history_and_state(step_of(js.only_finite(slow("optimizer"))))
    assert not np.any(state.opt_state[-1].refused)
    assert_same(history, wanted)


def test_a_rate_that_is_changed_between_steps_counts_from_the_next_step():
    step = step_of(slow("optimizer"), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    plain = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    wanted, _ = history_and_state(step_of(slow(schedule), plain))
    state = step.init(START)
    for t, batch in enumerate(BATCHES):
        gradients, optimizer, sync = state.opt_state
        assert optimizer.hyperparams["learning_rate"].shape == (REPLICAS,)
        rate = {"learning_rate": np.full(REPLICAS, RATES[t])}
        optimizer = optimizer._replace(hyperparams=rate)
        state, _ = step(state._replace(opt_state=(gradients, optimizer, sync)), batch)
        assert_same(state.params, wanted[t])


@pytest.mark.parametrize("where", WHERE)
def test_your_own_loop_passes_the_rate_to_update(where):
    moves = np.random.default_rng(2).normal(size=(STEPS, REPLICAS, 5)).astype(np.float32)

    def run(tx, passes_rate):
        def one(w, moves):
            def step(carry, x):
                (w, state), (move, rate) = carry, x
                extra = {"learning_rate": rate} if passes_rate else {}
                updates, state = tx.update(-rate * move, state, w, **extra)
                return (w + updates, state), w + updates

            return jax.lax.scan(step, (w, tx.init(w)), (moves, RATES))[1]

        mapped = jax.vmap(one, axis_name="replica", in_axes=(0, 1))
        return jax.jit(mapped)(np.stack([START["w"]] * REPLICAS), moves)

    assert_same(
        run(slow("optimizer", **WHERE[where]), True), run(slow(schedule, **WHERE[where]), False)
    )


@pytest.mark.parametrize("rate", [0.3, np.float64(0.3), np.float32(0.3), jnp.float32(0.3), 1])
def test_any_number_is_a_rate(rate):
    tx = slow("optimizer", sync_every=2)

    def one(w):
        state = tx.init(w)
        for _ in range(2):
            _, state = tx.update(w, state, w, learning_rate=rate)
        return state.outer.last_rate, state.outer.since

    now, since = jax.vmap(one, axis_name="replica")(jnp.ones((REPLICAS, 2)))
    assert now.tolist() == [np.float32(rate)] * REPLICAS
    assert (now.dtype, since.tolist()) == (jnp.float32, [0] * REPLICAS)


# Replicas without data


def weights_with_idle_replica(idle):
    """Return weights with which replica 1 has no data in the updates `idle` (counted from 1)."""
    weights = np.ones((STEPS, REPLICAS), np.float32)
    weights[[t - 1 for t in idle], 1] = 0
    return weights


@pytest.mark.parametrize(
    ("where", "idle"),
    sweep(
        itertools.product(WHERE, [(3, 4), (4, 7, 8), range(1, 5), range(2, STEPS + 1)]),
        lambda where, idle: where == "sharded" or idle == (4, 7, 8),
    ),
)
def test_replicas_agree_after_a_slow_step_all_the_same(where, idle):
    """The optimizer of an idle replica does not count, so its rate differs from the others'."""
    kind = "devices" if where == "inexact" else "virtual"
    step = step_of(slow("optimizer", **WHERE[where]), kind=kind)
    history, state = history_and_state(step, weights_with_idle_replica(idle))
    for t in (4, 8):
        for x in history[t - 1].values():
            np.testing.assert_allclose(x, np.broadcast_to(x[0], x.shape), rtol=1e-5, atol=1e-6)
    momentum = state.opt_state[-1].outer
    for name in ("learning_rate", "made_at"):
        assert len(set(np.asarray(getattr(momentum, name)).tolist())) == 1


def test_the_rate_of_an_idle_replica_does_not_count():
    """Rates fall; a stale rate would carry the momentum of large steps into small ones."""
    falling = lambda t: 0.1 * 0.5**t  # noqa: E731
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=falling)
    for idle in (range(2, STEPS + 1), (8,)):
        step = step_of(slow("optimizer"), optimizer)
        history, state = history_and_state(step, weights_with_idle_replica(idle))
        expected, _ = history_and_state(
            step_of(slow(falling), optimizer), weights_with_idle_replica(idle)
        )
        assert_same(history, expected)
        np.testing.assert_allclose(state.opt_state[-1].outer.last_rate, falling(7), rtol=1e-6)


def test_where_all_are_idle_the_rate_stays_and_momentum_is_kept():
    weights = np.ones((STEPS, REPLICAS), np.float32)
    weights[4:8] = 0
    history, state = history_and_state(step_of(slow("optimizer")), weights)
    np.testing.assert_allclose(state.opt_state[-1].outer.last_rate, RATES[3])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(history))


# What is sent


def count_and_bytes_by_kind(sync, mode):
    """Return the number and bytes of collectives by kind of step."""
    step = step_of(sync, kind="devices", mode=mode)
    state = jax.eval_shape(step.init, START)
    traced = step.traced_by_phase(state, jax.ShapeDtypeStruct((8, 5), jnp.float32))
    lowered = {kind: program.lower() for kind, program in traced.items()}
    report = js.comm_report_of(lowered.get(None, lowered), compile=False)
    return {kind: (report.count(kind=kind), report.bytes(kind=kind)) for kind in report.kinds}


@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("where", WHERE)
def test_a_slow_step_sends_eight_bytes_more_and_other_steps_none(where, mode):
    with_optimizer_rate, with_schedule = (
        count_and_bytes_by_kind(slow(rate, **WHERE[where]), mode)
        for rate in ("optimizer", schedule)
    )
    for kind, (count, size) in with_optimizer_rate.items():
        # One program lists "average+slow" only where the slow step sends something by itself.
        before = with_schedule[kind if kind in with_schedule else "average"]
        more = "slow" in kind
        assert (count, size) == (before[0] + more, before[1] + 8 * more)


def test_diloco_passes_no_rate_to_its_outer_optimizer():
    """The outer optimizer keeps its rate, whatever the rate of the inner optimizer."""
    outer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.7, momentum=0.9)
    sync = js.diloco("replica", sync_every=4, outer_optimizer=outer)
    assert not sync.wants_learning_rate
    _, state = history_and_state(step_of(sync))
    assert state.opt_state[-1].outer.hyperparams["learning_rate"].tolist() == pytest.approx(
        [0.7] * REPLICAS
    )


# What is refused


SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [
        (optax.sgd(0.1), "none"),
        (optax.inject_hyperparams(optax.clip)(max_delta=0.1), "none"),
        (optax.chain(SGD, SGD), "2"),
        (optax.partition({"a": SGD, "b": SGD}, {"b": "a", "w": "b"}), "2"),
    ],
)
def test_an_optimizer_without_exactly_one_rate_is_refused(optimizer, number):
    step = step_of(slow("optimizer"), optimizer)
    error = (
        rf"`sync` was made with learning_rate=\"optimizer\".*inject_hyperparams.*found {number}\."
    )
    with pytest.raises(ValueError, match=error):
        step(step.init(START), BATCHES[0])


def test_a_slowmo_inside_of_the_optimizer_is_refused():
    step = step_of(None, optax.chain(SGD, slow("optimizer")))
    error = r'slowmo: `learning_rate`="optimizer" .* `sync`, not to a slowmo inside of `optimizer`'
    with pytest.raises(ValueError, match=error):
        step(step.init(START), BATCHES[0])


def test_your_own_loop_must_pass_the_rate():
    with pytest.raises(ValueError, match=r"update\(updates, state, params, learning_rate=rate\)"):
        trace(one_update(slow("optimizer")), PARAMS)


def test_the_rate_that_a_loop_passes_must_be_a_scalar():
    rates = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"slowmo: the `learning_rate` .* a scalar, got .*\(3,\)"):
        trace(one_update(slow("optimizer"), learning_rate=rates), PARAMS)


@pytest.mark.parametrize("rate", ["adam", "", "Optimizer"])
def test_any_string_but_optimizer_is_refused(rate):
    error = rf'`learning_rate` must be a number, a schedule, "optimizer" or None, got \'{rate}\''
    with pytest.raises(ValueError, match=error):
        slow(rate)


def test_a_base_whose_exchange_takes_no_rate_is_not_passed_one():
    plain = js.local_sgd("replica", sync_every=2)

    def exchange(updates, others, state, params, *, communicate=True, weight=None, phase=None):
        now = {"communicate": communicate, "weight": weight, "phase": phase}
        return plain.exchange(updates, others, state, params, **now)

    def slow_over(base):
        return js.slowmo("replica", base=base, sync_every=4, learning_rate="optimizer")

    history, _ = history_and_state(step_of(slow_over(plain._replace(exchange=exchange))))
    wanted, _ = history_and_state(step_of(slow_over(plain)))
    assert_same(history, wanted)


def test_other_states_with_hyperparams_hold_no_rate():
    class Tuned(NamedTuple):
        hyperparams: jax.Array

    tuned = optax.GradientTransformation(
        lambda params: Tuned(jnp.ones(3)), lambda updates, state, params=None: (updates, state)
    )
    history, _ = history_and_state(step_of(slow("optimizer"), optax.chain(tuned, INJECTED)))
    wanted, _ = history_and_state(step_of(slow("optimizer")))
    assert_same(history, wanted)
