"""Optimizers that want to know the loss: `value`, `grad` and `value_fn`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

RNG = np.random.default_rng(0)
PARAMS = {"b": RNG.normal(size=3).astype(np.float32), "w": RNG.normal(size=(5, 3), scale=0.5)}
PARAMS = jax.tree.map(np.float32, PARAMS)
BATCHES = RNG.normal(size=(4, 16, 5)).astype(np.float32)
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1, rtol=0.5)
SEARCH = optax.scale_by_zoom_linesearch(max_linesearch_steps=5)
BACKTRACKING = optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
)
TOLD = {
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), PLATEAU),
    "polyak_sgd": optax.polyak_sgd(),
    "momo": optax.contrib.momo(),
    "momo_adam": optax.contrib.momo_adam(learning_rate=0.1),
    "schedule_free_sgd": optax.contrib.schedule_free_sgd(0.1),
}
average = js.all_reduce_gradients("replica")


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) - 0.5) ** 2)


def noisy(params, batch):
    """Another value in every batch, however the parameters are."""
    return loss(params, batch) + jnp.mean(batch)


def by_hand(optimizer, batches, fn=loss, parts=1):
    """One replica on its own; `parts` microbatches are averaged."""
    optimizer = optax.with_extra_args_support(optimizer)

    def mean(params, batch):
        return sum(fn(params, part) for part in np.split(batch, parts)) / parts

    @jax.jit
    def update(params, state, batch):
        def value_fn(p):
            return mean(p, batch)

        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = optimizer.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in batches:
        params, state = update(params, state, batch)
    return params, state


def train(step, batches=BATCHES, weight=None):
    state = step.init(PARAMS)
    for batch in batches:
        state, _ = step(state, batch) if weight is None else step(state, batch, weight)
    return state


def assert_replica(state, replica, expected, rtol=2e-5):
    params, optimizer_state = expected
    found = state.params, state.opt_state[1]
    for a, b in zip(*map(jax.tree.leaves, (found, (params, optimizer_state))), strict=True):
        np.testing.assert_allclose(a[replica], b, rtol=rtol, atol=1e-6)


def local(**options):
    return {"sync": js.local_sgd("replica", sync_every=99), **options}


@pytest.mark.parametrize(
    ("kind", "name"),
    sweep(
        itertools.product(KINDS, TOLD),
        lambda kind, name: (kind == "devices") == name.startswith("momo"),
    ),
)
def test_averaged_gradients_equal_one_big_batch(kind, name):
    mesh = KINDS[kind]({"replica": 4})
    step = js.make_train_step(noisy, TOLD[name], gradients=average, mesh=mesh)
    state = train(step)
    expected = by_hand(TOLD[name], BATCHES, noisy)
    for replica in range(4):
        assert_replica(state, replica, expected)
    if name == "reduce_on_plateau":
        assert state.opt_state[1][1].scale[0] < 1


SOME = [("devices", "backtracking"), ("virtual", "reduce_on_plateau"), ("virtual", "momo")]


@pytest.mark.parametrize(
    ("kind", "accumulate", "name"),
    sweep(
        [
            (*run, name)
            for run in [("devices", 1), ("virtual", 2)]
            for name in ["reduce_on_plateau", "lbfgs", "backtracking", "momo"]
        ],
        lambda kind, accumulate, name: (kind, name) in SOME,
    ),
)
def test_replicas_that_train_locally_equal_separate_runs(kind, accumulate, name):
    searching = {"lbfgs": optax.lbfgs(linesearch=SEARCH), "backtracking": BACKTRACKING}
    optimizer = {**TOLD, **searching}[name]
    fn = loss if name in searching else noisy  # a search needs one function in all its steps
    mesh = KINDS[kind]({"replica": 2})
    step = js.make_train_step(fn, optimizer, mesh=mesh, accumulate=accumulate, **local())
    state = train(step)
    for replica, share in enumerate(np.split(BATCHES, 2, axis=1)):
        assert_replica(state, replica, by_hand(optimizer, share, fn, accumulate), rtol=1e-3)


def all_gathered(axis):
    """Averages as the types do not tell: gathered values differ for all they know."""

    def update(updates, state, params=None):
        mean = jax.tree.map(lambda g: jax.lax.all_gather(g, axis).mean(0), updates)
        return mean, state

    return optax.GradientTransformation(optax.init_empty_state, update)


BOTH = js.all_reduce_gradients(("replica", "device"))
WHOLE = js.chain(BOTH, optax.polyak_sgd())


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"replica": 2, "device": 2}, {"gradients": BOTH}),
        ({"replica": 1, "device": 2}, {}),
        ({"replica": 2}, {"gradients": js.chain(optax.clip(9.0), average), "accumulate": 2}),
        ({"replica": 2}, {"gradients": js.gradient_transform(all_gathered("replica"))}),
        ({"replica": 2}, {"optimizer": js.chain(average, optax.polyak_sgd())}),
        (
            {"replica": 2, "device": 2},
            {"gradients": optax.identity(), "optimizer": js.skip_unused(WHOLE, BOTH.spec.axes)},
        ),
    ],
    ids=["two levels", "inner", "microbatches", "all_gather", "chain", "two levels, wrapped"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_averaged_as_gradients_are(kind, axes, options):
    options = {"optimizer": optax.polyak_sgd(), **options}
    step = js.make_train_step(noisy, mesh=KINDS[kind](axes), **options)
    expected, _ = by_hand(optax.polyak_sgd(), BATCHES, noisy)
    params = train(step).params
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], [value] * axes["replica"], rtol=1e-5)


@pytest.mark.parametrize("whole_chain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_replica_that_averages_inside(kind, whole_chain):
    """The value is the replica's own where its gradients are, and sends nothing between them."""
    inside, sync = js.all_reduce_gradients("device"), js.local_sgd("replica", sync_every=99)
    options = {"optimizer": optax.polyak_sgd(), "gradients": inside, "sync": sync}
    if whole_chain:
        options = {"optimizer": js.chain(inside, optax.polyak_sgd(), sync)}
    step = js.make_train_step(noisy, mesh=KINDS[kind]({"replica": 2, "device": 2}), **options)
    params = train(step).params
    for replica, share in enumerate(np.split(BATCHES, 2, axis=1)):
        expected, _ = by_hand(optax.polyak_sgd(), share, noisy)
        for name, value in expected.items():
            np.testing.assert_allclose(params[name][replica], value, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_post_local_gradients(kind):
    """One big batch up to the start, separate runs from there."""
    late = js.every(99, start=2)
    step = js.make_train_step(
        noisy,
        optax.polyak_sgd(),
        gradients=js.post_local_gradients(late, average),
        sync=js.local_sgd("replica", sync_every=late),
        mesh=KINDS[kind]({"replica": 2}),
    )
    params = train(step).params
    for replica, share in enumerate(np.split(BATCHES, 2, axis=1)):
        expected, _ = by_hand(optax.polyak_sgd(), [*BATCHES[:2], *share[2:]], noisy)
        for name, value in expected.items():
            np.testing.assert_allclose(params[name][replica], value, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_weighted_as_gradients_are(kind):
    """Replicas of 3 and 1 samples, and one that has run out, whose batch is NaN."""
    batch = BATCHES[0][:12].copy()
    batch[8:] = np.nan
    step = js.make_train_step(
        noisy,
        optax.polyak_sgd(),
        gradients=js.all_reduce_gradients("replica", divide_by="active"),
        mesh=KINDS[kind]({"replica": 3}),
    )
    params = train(step, [batch], [3, 1, 0]).params

    def mean(params, batch):
        return (3 * noisy(params, batch[:4]) + noisy(params, batch[4:8])) / 4

    for name, expected in by_hand(optax.polyak_sgd(), [batch], mean)[0].items():
        np.testing.assert_allclose(params[name], [expected] * 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("axes", "options", "over"),
    [
        ({"replica": 2}, {"gradients": average}, r"\('replica',\)"),
        ({"replica": 2, "device": 2}, local(), r"\('device',\)"),
        ({"replica": 2}, {"optimizer": js.chain(average, optax.lbfgs())}, r"\('replica',\)"),
    ],
)
def test_no_line_search_over_averaged_gradients(axes, options, over):
    options = {"optimizer": optax.lbfgs(), **options}
    step = js.make_train_step(loss, mesh=js.virtual_mesh(axes), **options)
    said = rf"`value_fn`.* no collective may be .* averaged over {over}.* linesearch=None"
    with pytest.raises(ValueError, match=said):
        step(step.init(PARAMS), BATCHES[0])


def test_one_replica_may_search_whatever_its_gradients():
    mesh = js.virtual_mesh({"replica": 1})
    step = js.make_train_step(loss, optax.lbfgs(), gradients=average, mesh=mesh)
    with pytest.warns(UserWarning, match="size 1"):
        assert step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCHES[0])


def sent(optimizer, **options):
    """By kind of step, how many collectives it emits over the replicas, and their bytes."""
    mesh = js.make_mesh({"replica": 2})
    step = js.make_train_step(noisy, optimizer, mesh=mesh, **options)
    (traced,) = step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCHES[0]).values()
    report = js.comm_report_of(traced.lower(), compile=False)
    rows = {kind: report.select(axis="replica", kind=kind) for kind in report.kinds}
    return {k: (sum(r.count for r in v), sum(r.bytes for r in v)) for k, v in rows.items()}


@pytest.mark.parametrize(
    "gradients",
    [
        average,
        js.post_local_gradients(js.every(9, start=2), average),
        # Exchanges once more, in a conditional, where there are more rows.
        js.all_reduce_rows("replica", tables=("w",), dense=average, capacity=1),
    ],
    ids=["all_reduce", "post_local", "rows"],
)
def test_what_is_not_used_is_not_sent(gradients):
    options = {"gradients": gradients, "sync": "none"}
    without = sent(optax.adam(0.1), **options)
    if gradients is average:
        assert without == {"every": (1, sum(4 * x.size for x in PARAMS.values()))}
    told = sent(optax.polyak_sgd(), **options)
    # The loss travels where gradients do, and nowhere else.
    assert told == {k: (n + 1, size + 4) if n else (0, 0) for k, (n, size) in without.items()}


def test_only_the_optimizer_is_told():
    seen = []

    def recording(tx):
        def update(updates, state, params=None, **extra):
            seen.append(sorted(extra))
            return tx.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    step = js.make_train_step(
        loss,
        recording(optax.sgd(0.1)),
        gradients=recording(average),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = step.init(PARAMS)
    seen.clear()  # of the look at what they exchange
    step(state, BATCHES[0], [1, 2])
    assert seen == [["weight"], ["grad", "value", "value_fn", "weight"]]


def test_an_optimizer_that_takes_no_more_than_it_knows():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2)
    optimizer = optax.chain(optax.clip(1.0), sam)
    sync = js.local_sgd("replica", sync_every=2)
    step = js.make_train_step(loss, optimizer, sync=sync, mesh=js.virtual_mesh({"replica": 2}))
    assert np.any(train(step, BATCHES[:2]).params["w"][0] != PARAMS["w"])


def with_constants():
    """Its state is a constant from one branch, and from the other what it was."""

    def update(updates, state, params=None):
        count = jax.lax.cond(state.count > 9, lambda c: jnp.zeros([]), lambda c: c, state.count)
        return updates, optax.ScaleByScheduleState(count)

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros([]))

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("exchange", ["parameters", "gradients"])
def test_a_chain_that_jax_refuses_on_devices_is_told_apart(exchange):
    """A branch returns constants; the remedy is named, and it works."""
    still = optax.chain(optax.sgd(0.1), with_constants())
    sync = js.local_sgd("replica", sync_every=2)
    parts = (still, sync) if exchange == "parameters" else (average, still)
    mesh, batch = js.make_mesh({"replica": 2}), np.ones((2, 3), np.float32)
    square = lambda p, b: ((p["w"] - b) ** 2).mean()  # noqa: E731
    step = js.make_train_step(square, optax.chain(*parts), mesh=mesh)
    state = step.init({"w": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"`optimizer` is a chain that exchanges.*`gradients` or"):
        step(state, batch)
    step = js.make_train_step(square, js.chain(*parts), mesh=mesh)
    state, _ = step(step.init({"w": np.zeros(3, np.float32)}), batch)
    assert np.all(np.asarray(state.params["w"]) > 0)
