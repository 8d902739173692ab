"""Steps with a policy and a loss scale: in what they compute, who skips, what goes on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.gradients.precision import was_skipped
from support.executions import gossip_state
from support.exhaustive import sweep

R, LOCAL = 4, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(4, 2)).astype(np.float32),
    "b": RNG.normal(size=2).astype(np.float32),
}
X = RNG.normal(size=(8, R * LOCAL, 4)).astype(np.float32)
MEAN = js.all_reduce_gradients("replica")


def loss(params, batch):
    """A linear function of the parameters: `factor` infinite is an overflow, 0 no gradient."""
    x, factor = batch
    return ((x @ params["w"] + params["b"]).sum(-1) * factor).mean()


def batches(overflow, bad=np.inf):
    """Batches of which `factor` is `bad` where `overflow`, bool (steps, replicas), is True."""
    factors = np.where(np.repeat(overflow, LOCAL, axis=1), bad, 1.0).astype(np.float32)
    return [(x, factor) for x, factor in zip(X, factors, strict=False)]


def scaled(optimizer, axes=(), **options):
    return js.dynamic_loss_scale(optimizer, axes, **{"initial": 2.0**10} | options)


def run(step, given, weights=None, params=PARAMS):
    state, told = step.init(params), []
    for t, batch in enumerate(given):
        state, metrics = step(state, batch, None if weights is None else weights[t])
        told.append(metrics)
    return state, told


def make(optimizer=None, kind=js.virtual_mesh, axes=None, **options):
    mesh = kind(axes or {"replica": R})
    optimizer = scaled(optax.sgd(0.5)) if optimizer is None else optimizer
    return js.make_train_step(loss, optimizer, mesh=mesh, **options)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


NONE = np.zeros((5, R), bool)
ONE = NONE.copy()
ONE[1, 2] = True  # replica 2 overflows in the second update


@pytest.mark.parametrize("accumulate", sweep([1, 2], lambda count: count == 2))
def test_without_an_overflow_all_is_as_without_a_scale(accumulate):
    plain, wrapped = (
        run(make(tx, gradients=MEAN, accumulate=accumulate), batches(NONE))
        for tx in (optax.adam(0.1), scaled(optax.adam(0.1)))
    )
    assert_same(wrapped[0].params, plain[0].params)
    assert_same(wrapped[0].opt_state[1].inner, plain[0].opt_state[1])
    for found, want in zip(wrapped[1], plain[1], strict=True):
        np.testing.assert_array_equal(found["loss"], want["loss"])
        np.testing.assert_array_equal(found["loss_scale"], [2.0**10] * R)
        np.testing.assert_array_equal(found["skipped_updates"], np.zeros(R))


SYNCS = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, learning_rate=0.5
    ),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    sweep(
        itertools.product(SYNCS, ["traced", "host"]),
        lambda name, mode: (name == "local_sgd") == (mode == "host"),
    ),
)
def test_replicas_stay_in_phase_when_one_skips(name, mode):
    """The skipped update is one without a gradient, and what is due is exchanged in it."""
    step, reference = make(sync=SYNCS[name](), mode=mode), make(optax.sgd(0.5), sync=SYNCS[name]())
    state, told = run(step, batches(ONE[:4]))
    want, _ = run(reference, batches(ONE[:4], bad=0.0))
    assert_same(state.params, want.params)
    assert_same(state.opt_state[2], want.opt_state[2])
    np.testing.assert_array_equal(state.opt_state[2].count, [4] * R)
    assert step.next_phase(state) == reference.next_phase(want)
    np.testing.assert_array_equal(told[-1]["skipped_updates"], [0, 0, 1, 0])
    np.testing.assert_array_equal(told[-1]["loss_scale"], [1024, 1024, 512, 1024])


def test_gossip_rotates_through_a_skipped_update():
    step = make(sync=js.sgp("replica"), mode="host")
    state, _ = run(step, batches(ONE[:3]))
    want, _ = run(make(optax.sgd(0.5), sync=js.sgp("replica")), batches(ONE[:3], bad=0.0))
    assert_same(state.params, want.params)
    assert_same(gossip_state(state.opt_state), gossip_state(want.opt_state))


WHERE = {
    "axes": {"optimizer": scaled(optax.adam(0.1), "replica"), "sync": js.local_sgd("replica")},
    "gradients": {"gradients": MEAN},
    "optimizer": {"optimizer": scaled(optax.chain(MEAN, optax.adam(0.1)))},
    "a memory": {
        "gradients": js.all_reduce_gradients("replica", hook=js.hooks.top_k(0.5)),
    },
    "PowerSGD": {
        "gradients": js.all_reduce_gradients(
            "replica", hook=js.hooks.powersgd(1, 2, min_compression_rate=0.1)
        )
    },
}


@pytest.mark.parametrize(
    "where", sweep(WHERE, lambda where: where in ("axes", "optimizer", "PowerSGD"))
)
def test_all_skip_where_one_overflows(where):
    state, told = run(make(kind=js.make_mesh, **WHERE[where]), batches(ONE))
    np.testing.assert_array_equal(told[-1]["skipped_updates"], [1] * R)
    np.testing.assert_array_equal(told[-1]["loss_scale"], [512] * R)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_counters_of_gradient_transforms_count_on():
    schedule = js.every(2, start=3)
    step = make(
        gradients=js.post_local_gradients(schedule, MEAN),
        sync=js.local_sgd("replica", sync_every=schedule),
    )
    state, _ = run(step, batches(ONE))
    np.testing.assert_array_equal(state.opt_state[0].count, [5] * R)
    np.testing.assert_array_equal(state.opt_state[2].count, [5] * R)


@pytest.mark.parametrize("axes", [{"replica": R}, {"replica": 2, "device": 2}])
def test_statistics_keep_out_what_overflowed(axes):
    """The average of an overflow would be infinite for ever, on all replicas."""

    def noting(params, batch, *, model_state):
        value = loss(params, batch)
        after = {"m": model_state["m"] * 0.5 + value, "count": model_state["count"] + 1}
        return value, ({}, after)

    sync = js.local_sgd("replica", sync_every=1)
    step = js.make_train_step(noting, scaled(optax.sgd(0.0)), sync=sync, mesh=js.make_mesh(axes))
    state = step.init(PARAMS, model_state={"m": np.float32(0), "count": np.int32(0)})
    means = []
    for batch in batches(ONE):
        state, _ = step(state, batch)
        means.append(np.asarray(state.model_state["m"]))
    assert np.isfinite(means).all()
    np.testing.assert_array_equal(state.model_state["count"], [5] * axes["replica"])
    assert all(len(set(m)) == 1 for m in means)  # those of all that there are, averaged


def test_tables_and_statistics_ask_whether_this_update_was_skipped():
    """In updates of `js.accumulate` that only add up there is none."""
    tx = js.accumulate(scaled(optax.sgd(0.5)), every=2)
    before = tx.init(PARAMS)
    bad = jax.tree.map(lambda p: p * np.nan, PARAMS)
    skipped = []
    for grads in (bad, PARAMS, PARAMS, PARAMS):
        _, after = tx.update(grads, before, PARAMS)
        skipped.append(bool(was_skipped(before, after)))
        before = after
    assert skipped == [False, True, False, False]


def test_a_window_has_one_scale_and_is_skipped_as_a_whole():
    step = make(gradients=MEAN)
    state = step.init(PARAMS)
    window = None
    overflow = np.asarray([[1, 0, 0, 0], [0, 0, 0, 0]], bool)
    first, second, third = batches(np.concatenate([overflow, NONE[:1]]))
    window, _ = step.collect(state, first)
    after, metrics = step(state, second, window=window)
    assert_same(after.params, step.init(PARAMS).params)
    np.testing.assert_array_equal(metrics["skipped_updates"], [1] * R)
    window, _ = step.collect(after, second)
    last, metrics = step(after, third, window=window)
    np.testing.assert_array_equal(metrics["loss_scale"], [512] * R)
    plain = make(optax.sgd(0.5), gradients=MEAN)
    state = plain.init(PARAMS)
    window, _ = plain.collect(state, second)
    assert_same(last.params, plain(state, third, window=window)[0].params)


def test_a_replica_without_data_makes_none_skip():
    weights = np.float32([[1, 1, 0, 1]] * 5)
    step = make(scaled(optax.sgd(0.5), "replica"), sync=SYNCS["local_sgd"]())
    state, told = run(step, batches(ONE), weights)
    want, _ = run(make(optax.sgd(0.5), sync=SYNCS["local_sgd"]()), batches(NONE), weights)
    assert_same(state.params, want.params)
    np.testing.assert_array_equal(told[-1]["skipped_updates"], [0] * R)


def test_the_flag_of_leaves_sharded_inside_a_replica_is_whole():
    """The compiler shards `w` in four; the overflow is in one of the shards of one replica."""
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    specs = {"w": P("fsdp"), "b": P()}
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
    step = js.make_train_step(
        lambda p, x: (p["w"] * x[0]).sum() + p["b"].sum(),
        scaled(optax.adam(0.1)),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=mesh,
    )
    batch = np.ones((2, 4, 1), np.float32)
    bad = batch.copy()
    bad[1, 3] = np.inf
    state, _ = step(step.init(params), batch)
    before = jax.tree.map(np.asarray, (state.params["w"][1], state.opt_state[1].inner[0].mu))
    state, metrics = step(state, bad)
    np.testing.assert_array_equal(metrics["skipped_updates"], [0, 1])
    np.testing.assert_array_equal(state.opt_state[1].inner[0].mu["w"][1], before[1]["w"][1])
    assert state.params["w"].sharding.spec == P("replica", "fsdp")


def test_a_model_that_diverges_in_float16_trains_with_the_scale():
    """Its gradients are below what float16 holds; one batch has a number that is above."""
    right = np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)

    def mean_square(params, x):
        x, y = x[:, :8], x[:, 8:]
        return jnp.mean(((x @ params["w"] - y) / 16384) ** 2)

    def distances(optimizer, compute, corrupt=None, steps=40):
        """From the right parameters, after each step; at the start it is 1."""
        step = js.make_train_step(
            mean_square,
            optimizer,
            gradients=MEAN,
            mesh=js.virtual_mesh({"replica": 2}),
            policy=js.Policy(compute),
        )
        r = np.random.default_rng(1)
        state, found = step.init({"w": np.zeros((8, 1), np.float32)}), []
        for t in range(steps):
            x = r.normal(size=(32, 8)).astype(np.float32)
            if t == corrupt:
                x[5, 3] = 1e6
            state, metrics = step(state, np.concatenate([x, x @ right], axis=1))
            assert state.params["w"].dtype == metrics["loss"].dtype == np.float32
            away = np.asarray(state.params["w"][0], np.float64) - right
            found.append(np.linalg.norm(away) / np.linalg.norm(right))
        return np.asarray(found), metrics

    rate = optax.sgd(16384.0**2 * 0.1)
    with pytest.warns(UserWarning, match="put js.dynamic_loss_scale.* around `optimizer`") as told:
        alone, _ = distances(rate, "float16", corrupt=10, steps=12)
    assert len(told) == 1
    assert alone[:10].min() > 0.9  # gradients of 0
    assert np.isnan(alone[10:]).all()
    with_scale = js.dynamic_loss_scale(rate, growth_interval=20)
    helped, metrics = distances(with_scale, "float16", corrupt=10)
    assert helped[-1] < 0.02
    assert metrics["skipped_updates"][0] >= 1
    exact, _ = distances(rate, "float32")
    # 2**16 is infinite in float16, in which this loss is; so the first update above was skipped.
    half, metrics = distances(js.dynamic_loss_scale(rate, initial=2.0**15), "float16")
    assert metrics["skipped_updates"][0] == 0
    np.testing.assert_allclose(half, exact, atol=0.02)


def test_the_policy_holds_wherever_the_loss_is_called():
    seen = []

    def noting(params, batch, *, model_state):
        seen.append((params["w"].dtype, params["b"].dtype, batch[0].dtype, model_state["m"].dtype))
        value = loss(params, batch)
        return value, ({"twice": value * 2}, {"m": model_state["m"] + value})

    step = js.make_train_step(
        noting,
        scaled(optax.lbfgs(), "replica"),
        sync=js.local_sgd("replica"),
        mesh=js.make_mesh({"replica": R}),
        policy=js.Policy("bfloat16", keep="b"),
        order="ready",
    )
    state = step.init(PARAMS, model_state={"m": np.float32(0)})
    (batch,) = batches(NONE[:1])
    step.ready_order(state, batch)
    told = step.evaluate(state, batch)
    state, metrics = step(state, batch)
    kinds = ("bfloat16", "float32", "bfloat16", "float32")
    assert len(seen) >= 3
    assert {tuple(map(str, x)) for x in seen} == {kinds}
    for name in ("loss", "twice"):
        assert metrics[name].dtype == told[name].dtype == jnp.float32
    np.testing.assert_array_equal(told["loss"], metrics["loss"])
    assert {x.dtype for x in jax.tree.leaves((state.params, state.model_state))} == {
        np.dtype("float32")
    }


def test_what_the_optimizer_is_told_is_not_scaled():
    def update(updates, state, params=None, *, value, grad, **extra):
        ahead = jax.tree.map(lambda u, g: u - g, updates, grad)  # 0, if they are alike
        return jax.tree.map(lambda u: -0.5 * u, updates), (state[0] + value, ahead)

    def init(params):
        return jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)

    tx = scaled(optax.GradientTransformationExtraArgs(init, update))
    state, told = run(make(tx, gradients=MEAN), batches(NONE))
    total, ahead = state.opt_state[1].inner
    np.testing.assert_allclose(total[0], sum(m["loss"].mean() for m in told), rtol=1e-5)
    assert_same(ahead, jax.tree.map(np.zeros_like, ahead))
    want, _ = run(make(optax.sgd(0.5), gradients=MEAN), batches(NONE))
    assert_same(state.params, want.params)


def test_rates_are_found_inside_of_it():
    tx = scaled(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    sync = js.slowmo("replica", base=js.local_sgd("replica"), learning_rate="optimizer")
    step = make(tx, sync=sync)
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=0.25)
    state, _ = step(state, batches(ONE)[1])
    np.testing.assert_array_equal(state.opt_state[1].inner.hyperparams["learning_rate"], [0.25] * R)


def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    step = make(scaled(optax.adam(0.1), growth_interval=2), sync=SYNCS["slowmo"]())
    given = batches(ONE)
    state = step.init(PARAMS)
    with Checkpoints(tmp_path) as checkpoints:
        for t, batch in enumerate(given):
            state, _ = step(state, batch)
            if t == 1:
                checkpoints.save(2, state, wait=True)
        again = checkpoints.restore(step, PARAMS).state
    assert_same(again.opt_state[1].skipped, [0, 0, 1, 0])
    for batch in given[2:]:
        again, _ = step(again, batch)
    assert_same((again.params, again.opt_state), (state.params, state.opt_state))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "float16"}, "`policy` must be a js.Policy"),
        ({"gradients": scaled(MEAN)}, "`gradients` must not hold a js.dynamic_loss_scale"),
        ({"optimizer": optax.chain(scaled(optax.sgd(1.0)), scaled(optax.sgd(1.0)))}, "found 2"),
        ({"optimizer": optax.apply_if_finite(scaled(optax.sgd(1.0)), 2)}, "apply_if_finite"),
        ({"optimizer": scaled(js.chain(optax.sgd(1.0), js.local_sgd("replica")))}, "in js.chain"),
        (
            {"optimizer": scaled(optax.sgd(1.0)), "policy": js.Policy("float16", keep="x")},
            "`keep` must name leaves",
        ),
        ({"optimizer": scaled(optax.sgd(1.0), "fsdp")}, "`axes` 'fsdp' is not a mapped axis"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        run(make(**{"gradients": MEAN} | options), batches(NONE[:1]))
