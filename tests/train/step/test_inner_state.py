"""What an exchange does to the moments of the inner optimizer: it keeps, resets or averages them.

Gradients do not depend on the parameters here, so NumPy has them, too.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep
from support.promotion import promoting
from train.step import tables

REPLICAS, ROWS, UPDATES = 4, 2, 10
RNG = np.random.default_rng(0)
START = {"b": RNG.normal(size=2).astype(np.float32), "w": RNG.normal(size=3).astype(np.float32)}
BATCHES = RNG.normal(size=(UPDATES, REPLICAS * ROWS, 5)).astype(np.float32)
GRADS = BATCHES.reshape(UPDATES, REPLICAS, ROWS, 5).mean(2).astype(np.float64)
INNER = ["keep", "reset", "average"]
VIRTUAL = js.virtual_mesh({"replica": REPLICAS})


def rate(t):
    """A schedule that shows whether its counter goes on."""
    return 0.1 / (1.0 + t)


def rate_of_count(count):
    return rate(count.astype(jnp.float32))


OPTIMIZERS = {
    "adam": optax.adam(rate_of_count),
    "momentum": optax.sgd(rate_of_count, momentum=0.9),
}
SYNCS = {
    "local_sgd": lambda **o: js.local_sgd("replica", sync_every=4, **o),
    "diloco": lambda **o: js.diloco("replica", sync_every=4, **o),
    "slowmo": lambda **o: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, momentum=0.5, **o
    ),
}


# Those of moments that have their own, by optimizer.
PERIODS = {"adam": {"nu": js.every(6), "mu": 3}, "momentum": {"trace": 3}}

# Each value once; the others are in the exhaustive run.
USUAL = {
    ("diloco", "alone", "reset"), ("slowmo", "alone", "average"), ("diloco", "delay", "average"),
    ("local_sgd", "only_finite", "average"), ("slowmo", "only_finite", "reset"),
}  # fmt: skip


def loss(params, batch):
    return jnp.mean(batch[:, :2], 0) @ params["b"] + jnp.mean(batch[:, 2:], 0) @ params["w"]


def flat(tree):
    """(replicas, 5): the leaves of a stacked tree side by side."""
    return np.concatenate([np.asarray(tree["b"]), np.asarray(tree["w"])], 1)


def step_of(sync, optimizer, mesh=VIRTUAL, **options):
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, **options)


def trained(step, updates=UPDATES, weights=None):
    state = step.init(START)
    for t in range(updates):
        extra = {} if weights is None else {"weight": weights[t]}
        state, _ = step(state, BATCHES[t], **extra)
    return state


def moments(state):
    """Mean and variance of Adam, or momentum, of all replicas; and the counter beside them."""
    inner = state.opt_state[0]
    if hasattr(inner, "trace"):
        return [flat(inner.trace)], None
    return [flat(inner.mu), flat(inner.nu)], np.asarray(inner.count)


def oracle(sync, optimizer, inner, weights=None):
    """Return parameters, moments and Adam's counter of all replicas after all updates."""
    start = np.concatenate([START["b"], START["w"]]).astype(np.float64)
    x, anchor, slow = np.tile(start, (REPLICAS, 1)), start, np.zeros(5)
    m, v, count = np.zeros_like(x), np.zeros_like(x), 0
    for t, grads in enumerate(GRADS):
        count += 1
        if optimizer == "adam":
            m, v = 0.9 * m + 0.1 * grads, 0.999 * v + 0.001 * grads**2
            update = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        else:
            m = 0.9 * m + grads
            update = m
        x = x - rate(t) * update
        if isinstance(inner, dict):
            mean = np.average(np.stack([m, v]), axis=1, weights=weights)
            due = [not (t + 1) % 3, not (t + 1) % 6]
            m, v = (
                np.where(d, one, y) for d, one, y in zip(due, mean[:, None], (m, v), strict=True)
            )
        if (t + 1) % 4:
            if sync == "slowmo" and (t + 1) % 2 == 0:
                x = np.tile(np.average(x, 0, weights), (REPLICAS, 1))
            continue
        average = np.average(x, 0, weights)
        displacement = anchor - average
        if sync == "local_sgd":
            anchor = average
        elif sync == "slowmo":
            slow = 0.5 * slow + displacement
            anchor = anchor - slow
        else:
            slow = 0.9 * slow + displacement
            anchor = anchor - 0.7 * (0.9 * slow + displacement)
        x = np.tile(anchor, (REPLICAS, 1))
        if inner == "reset":
            m, v, count = np.zeros_like(m), np.zeros_like(v), 0
        elif inner == "average":
            m, v = (np.tile(y.mean(0), (REPLICAS, 1)) for y in (m, v))
    return x, [m, v] if optimizer == "adam" else [m], count


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sync", SYNCS)
def test_two_exchanges_equal_numpy(sync, optimizer, inner):
    state = trained(step_of(SYNCS[sync](inner_state=inner), OPTIMIZERS[optimizer]))
    x, wanted, count = oracle(sync, optimizer, inner)
    np.testing.assert_allclose(flat(state.params), x, rtol=1e-5, atol=1e-6)
    found, counter = moments(state)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    if counter is not None:
        np.testing.assert_array_equal(counter, [count] * REPLICAS)


@pytest.mark.parametrize(
    ("optimizer", "around"),
    [("adam", "alone"), ("momentum", "alone"), ("adam", "only_finite"), ("momentum", "weights")],
)
@pytest.mark.parametrize("sync", SYNCS)
def test_moments_with_periods_of_their_own_equal_numpy(mesh_of, sync, optimizer, around):
    """Traced and on the host; a replica's weight counts in means of moments, too."""
    tx = SYNCS[sync](inner_state=PERIODS[optimizer])
    tx = js.only_finite(tx) if around == "only_finite" else tx
    weight = np.float32([1, 3, 0.5, 2]) if around == "weights" else None
    x, wanted, count = oracle(sync, optimizer, PERIODS[optimizer], weight)
    weights = None if weight is None else [weight] * UPDATES
    for options in ({}, {"mode": "host", "mesh": mesh_of({"replica": REPLICAS})}):
        state = trained(step_of(tx, OPTIMIZERS[optimizer], **options), weights=weights)
        np.testing.assert_allclose(flat(state.params), x, rtol=1e-5, atol=1e-6)
        found, counter = moments(state)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        if counter is not None:
            np.testing.assert_array_equal(counter, [count] * REPLICAS)


def test_moments_with_periods_do_not_depend_on_how_parameters_are_sent():
    """With fragments, late and in few bits moments are averaged, and nothing else changes."""
    found = []
    for periods in ("keep", {"mu": 5, "nu": 3}):
        options = {"fragments": 2, "delay": 1, "codec": js.codecs.int8()}
        tx = SYNCS["diloco"](inner_state=periods, **options)
        found.append((tx, trained(step_of(tx, optax.adam(0.1)), 3)))
    (keep, alone), (tx, state) = found
    assert [tx.phase(t)[len(keep.phase(t)) :] for t in range(1, 7)] == [
        *[(), (), ("nu",), (), ("mu",), ("nu",)]
    ]
    same(state.params, alone.params)
    (mu, nu), (own_mu, own_nu) = moments(state)[0], moments(alone)[0]
    np.testing.assert_allclose(mu, own_mu, rtol=1e-6)
    np.testing.assert_allclose(nu, np.tile(own_nu.mean(0), (REPLICAS, 1)), rtol=1e-6)


def test_des_loc_is_local_sgd_with_moments_every_3_and_6_averages():
    schedule = js.every(2, start=2, before="all")
    wanted = {"mu": js.every(6, start=2, before="all"), "nu": js.every(12, start=2, before="all")}
    one = js.des_loc("replica", sync_every=schedule)
    other = js.local_sgd("replica", sync_every=schedule, inner_state=wanted)
    assert [one.phase(t) for t in range(1, 40)] == [other.phase(t) for t in range(1, 40)]
    assert [t for t in range(1, 40) if "mu" in one.phase(t)] == [1, 2, 8, 14, 20, 26, 32, 38]
    states = [trained(step_of(tx, OPTIMIZERS["adam"]), 8) for tx in (one, other)]
    same(*states, rtol=0)
    own = js.des_loc("replica", sync_every=2, moments={"trace": 5})
    assert [t for t in range(1, 21) if "trace" in own.phase(t)] == [10, 20]


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_field_that_the_optimizer_lacks_is_refused_in_the_first_update(mode):
    tx = js.des_loc("replica", moments={"mu": 1, "count": 2})
    for optimizer, known in ((optax.adam(0.1), "'mu', 'nu'"), (optax.sgd(0.1), "none")):
        with pytest.raises(ValueError, match=f"local_sgd: `inner_state` names .* are {known}"):
            trained(step_of(tx, optimizer, mode=mode), 1)


def test_periods_that_are_none_are_refused():
    with pytest.raises(ValueError, match="`inner_state` counts updates and must be an int >= 1"):
        js.diloco("replica", inner_state={"mu": 0})
    with pytest.raises(ValueError, match=r"`inner_state` must be one of .* or map fields"):
        js.diloco("replica", inner_state=["mu"])
    with pytest.raises(ValueError, match=r"`moments` counts averages .* must be an int >= 1"):
        js.des_loc("replica", moments={"mu": 0.5})
    with pytest.raises(ValueError, match="`moments` must map fields"):
        js.des_loc("replica", moments=3)


def same(one, other, **close):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, **(close or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.parametrize(
    ("sync", "around", "inner"),
    sweep(
        itertools.product(SYNCS, ["alone", "only_finite", "delay"], ["reset", "average"]),
        lambda *case: case in USUAL,
    ),
)
def test_host_chain_and_devices_equal_the_traced_step(mesh_of, sync, around, inner):
    options = {"delay": 1} if around == "delay" else {}
    tx = SYNCS[sync](inner_state=inner, **options)
    tx = js.only_finite(tx) if around == "only_finite" else tx
    wanted = trained(step_of(tx, OPTIMIZERS["adam"]))
    mesh = mesh_of({"replica": REPLICAS})
    same(trained(step_of(tx, OPTIMIZERS["adam"], mesh, mode="host")), wanted)
    whole = js.chain(js.clip_by_global_norm(1e6), OPTIMIZERS["adam"], tx)
    found = in_own_loop(whole)
    same(found[0], wanted.params)
    same(found[1][-1].local, wanted.exchange.local)
    same(found[1][1][0], wanted.opt_state[0])


def in_own_loop(tx):
    params = js.replicate(START, mesh=VIRTUAL)
    state = js.init(tx, params, mesh=VIRTUAL)

    def one(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(jax.vmap(one, axis_name="replica"))
    for batch in BATCHES.reshape(UPDATES, REPLICAS, ROWS, 5):
        params, state = update(params, state, batch)
    return params, state


def test_means_count_replicas_by_weight_and_idle_ones_follow():
    weights = np.tile(np.float32([1, 3, 0, 2]), (4, 1))
    keep, average, reset = (
        trained(step_of(SYNCS["diloco"](inner_state=x), optax.adam(0.1)), 4, weights)
        for x in ("keep", "average", "reset")
    )
    for own, mean in zip(moments(keep)[0], moments(average)[0], strict=True):
        assert not own[2].any()  # without batches it has none
        wanted = np.average(own, axis=0, weights=weights[0])
        np.testing.assert_allclose(mean, np.tile(wanted, (REPLICAS, 1)), rtol=1e-5)
    assert not np.any(moments(reset)[0])
    idle = np.zeros((4, REPLICAS), np.float32)
    same(
        trained(step_of(SYNCS["diloco"](inner_state="average"), optax.adam(0.1)), 4, idle),
        trained(step_of(SYNCS["diloco"](), optax.adam(0.1)), 4, idle),
    )


@pytest.mark.parametrize("inner", ["reset", "average"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_refused_exchange_leaves_the_moments(inner, inside):
    batches = BATCHES.copy()
    batches[3, 0] = np.inf  # of the first replica, in the update of the exchange
    base = js.local_sgd("replica", sync_every=2)
    options: dict[str, Any] = {"sync_every": 4, "inner_state": inner}
    if inside:
        tx = js.slowmo("replica", base=js.only_finite(base), **options)
    else:
        tx = js.only_finite(js.slowmo("replica", base=base, **options))
    states = []
    for sync in (tx, js.only_finite(base)):
        step = step_of(sync, OPTIMIZERS["momentum"])
        state = step.init(START)
        for batch in batches[:4]:
            state, _ = step(state, batch)
        states.append(moments(state)[0][0][1:])
    np.testing.assert_allclose(*states, rtol=1e-6)
    assert np.ptp(states[0], axis=0).all()


def test_a_skipped_exchange_leaves_the_moments():
    tx = js.chain(optax.adam(0.1), SYNCS["diloco"](inner_state="reset"))
    params = js.replicate(START, mesh=VIRTUAL)
    state = js.init(tx, params, mesh=VIRTUAL)

    def one(params, state, communicate):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = tx.update(grads, state, params, communicate=communicate)
        return optax.apply_updates(params, updates), state

    update = jax.jit(jax.vmap(one, (0, 0, None), axis_name="replica"))
    for t in range(8):
        params, state = update(params, state, t != 3)
        assert state[0][0].count[0] == (0 if t == 7 else t + 1)


def own():
    """Momentum beside a counter, and an average of norms that belongs to no parameter."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"norm": jnp.zeros([]), "in": {"sum": zeros, "steps": jnp.zeros([], jnp.int32)}}

    def update(grads, state, params=None):
        del params
        total = jax.tree.map(jnp.add, state["in"]["sum"], grads)
        inside = {"sum": total, "steps": state["in"]["steps"] + 1}
        norm = 0.5 * state["norm"] + optax.tree.norm(grads)
        return jax.tree.map(lambda x: -0.1 * x, total), {"norm": norm, "in": inside}

    return optax.GradientTransformation(init, update)


def test_what_starts_anew_and_what_goes_on():
    """Moments and the counters beside them do; schedules, rates and loss scales do not."""
    halves = {"b": "adam", "w": "own"}
    parts = {"adam": optax.inject_hyperparams(optax.adam)(learning_rate=0.3), "own": own()}
    optimizer = js.dynamic_loss_scale(
        optax.chain(optax.partition(parts, halves), optax.scale_by_schedule(rate_of_count)),
        initial=8.0,
        growth_interval=3,
    )
    state = trained(step_of(SYNCS["local_sgd"](inner_state="reset"), optimizer), 4)
    keep = trained(step_of(SYNCS["local_sgd"](), optimizer), 4)
    (scaled, kept) = (x.opt_state for x in (state, keep))
    assert scaled.loss_scale[0] == kept.loss_scale[0] == 16.0
    same(scaled._replace(inner=()), kept._replace(inner=()))
    (split, schedule), (kept_split, _) = scaled.inner, kept.inner
    assert schedule.count[0] == 4
    adam, other = (split.inner_states[k].inner_state for k in ("adam", "own"))
    kept_other = kept_split.inner_states["own"].inner_state
    assert adam.count[0] == 4
    assert adam.hyperparams["learning_rate"][0] == np.float32(0.3)
    assert adam.inner_state[0].count[0] == 0
    assert not adam.inner_state[0].mu["b"].any()
    assert other["in"]["steps"][0] == 0
    assert not other["in"]["sum"]["w"].any()
    np.testing.assert_array_equal(other["norm"], kept_other["norm"])
    average = trained(step_of(SYNCS["local_sgd"](inner_state="average"), optimizer), 4)
    split = average.opt_state.inner[0]
    wanted = np.asarray(kept_other["in"]["sum"]["w"]).mean(0)
    other = split.inner_states["own"].inner_state
    np.testing.assert_allclose(other["in"]["sum"]["w"], [wanted] * REPLICAS, rtol=1e-5)
    np.testing.assert_array_equal(other["norm"], kept_other["norm"])


@pytest.mark.parametrize("inner", ["reset", "average"])
def test_parameters_that_are_one_array(inner):
    """Rates of an optimizer have the structure of such parameters, too."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.25)
    step = js.make_train_step(
        lambda w, batch: batch.mean(0) @ w,
        optimizer,
        sync=SYNCS["diloco"](inner_state=inner),
        mesh=VIRTUAL,
    )
    state = step.init(np.ones(5, np.float32))
    for batch in BATCHES[:4]:
        state, _ = step(state, batch)
    inside = state.opt_state
    assert inside.hyperparams["learning_rate"].tolist() == [0.25] * REPLICAS
    assert not np.ptp(inside.inner_state[0].mu, axis=0).any()


def test_half_precision_keeps_its_dtypes():
    adam = promoting(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    for inner in ("reset", "average"):
        tx = SYNCS["diloco"](inner_state=inner, codec=js.codecs.bfloat16())
        step = step_of(tx, adam, policy=js.gradients.Policy("bfloat16"))
        state = trained(step, 4)
        same(jax.tree.map(jnp.zeros_like, state), jax.tree.map(jnp.zeros_like, step.init(START)))
        mu, nu = moments(state)[0]
        assert not np.ptp(mu.astype(np.float32), axis=0).any()
        assert not np.ptp(nu, axis=0).any()


@pytest.mark.parametrize("inner", ["reset", "average"])
def test_copies_of_parameters_follow_as_they_do_in_any_case(inner):
    """They are what schedule-free training, which is around another optimizer, keeps itself."""
    optimizer = optax.contrib.schedule_free_sgd(0.1)
    ends = [trained(step_of(SYNCS["diloco"](inner_state=x), optimizer), 6) for x in ("keep", inner)]
    found, wanted = (end.opt_state for end in ends)
    same(found.z, wanted.z)
    assert np.array_equal(found.step_count, wanted.step_count)


def test_moments_cost_one_more_all_reduce_of_their_bytes(mesh_of):
    mesh = mesh_of({"replica": REPLICAS})
    found = {}
    for inner in INNER:
        for mode in ("traced", "host"):
            step = step_of(SYNCS["slowmo"](inner_state=inner), optax.adam(0.1), mesh, mode=mode)
            report = js.comm_report(step, step.init(START), BATCHES[0])
            found[inner, mode] = {
                kind: (report.count(kind=kind), report.bytes(kind=kind)) for kind in report.kinds
            }
    for mode in ("traced", "host"):
        keep, average = found["keep", mode], dict(found["average", mode])
        assert found["reset", mode] == keep
        count, size = average.pop("slow")
        assert average == {kind: x for kind, x in keep.items() if kind != "slow"}
        assert (count, size) == (keep["slow"][0] + 1, keep["slow"][1] + 2 * 4 * 5)


def test_a_period_of_a_moment_costs_an_all_reduce_of_its_bytes(mesh_of):
    """N for the parameters, and N more for each moment, in the updates in which they are due."""
    step = step_of(
        js.des_loc("replica", sync_every=2),
        optax.adam(0.1),
        mesh_of({"replica": REPLICAS}),
        mode="host",
    )
    report = js.comm_report(step, step.init(START), BATCHES[0])
    size = 4 * 5
    assert {kind: report.bytes(kind=kind) for kind in report.kinds} == {
        "local": 0,
        "average": size,
        "average+mu": 2 * size,
        "average+mu+nu": 3 * size,
    }


def test_tables_keep_the_state_of_their_own_optimizer():
    """It is the dense optimizer's that changes; a row's moments stay where the row is."""
    states = {}
    for inner in INNER:
        sync = SYNCS["local_sgd"](inner_state=inner)
        step = tables.step_of(2, optimizer=optax.adam(0.1), sync=sync)
        state = step.init(tables.DENSE)
        for batch in tables.batches(4):
            state, _ = step(state, batch)
        states[inner] = state.opt_state
    own = np.asarray(states["keep"].dense[0].mu["w"])
    assert np.ptp(own, axis=0).any()
    for inner, wanted in (("reset", 0 * own), ("average", own)):
        found = np.asarray(states[inner].dense[0].mu["w"])
        np.testing.assert_allclose(found, [wanted.mean(0)] * 2, rtol=1e-5, atol=1e-7)
        same(states[inner].tables, states["keep"].tables, rtol=0)


@pytest.mark.filterwarnings("ignore:`sync` exchanges between")
@pytest.mark.parametrize("inner", ["reset", "average"])
def test_sums_of_gradients_go_on(inner):
    """Without moments nothing is to change; an exchange falls into a window of four updates."""
    ends = []
    for value in ("keep", inner):
        window = promoting(optax.MultiSteps(optax.sgd(0.5), 4).gradient_transformation())
        step = step_of(js.local_sgd("replica", sync_every=3, inner_state=value), window)
        state = step.init(START)
        for batch in BATCHES:
            state, _ = step(state, batch)
        ends.append(flat(state.params))
    np.testing.assert_allclose(*ends, atol=1e-6)
    assert np.any(ends[0] != flat(jax.tree.map(lambda x: x[None], START)))
