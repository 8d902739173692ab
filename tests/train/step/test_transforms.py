"""Transforms that exchange and that a step refuses, and replicas that train independently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"b": np.zeros(3, np.float32), "w": np.ones((8, 3), np.float32)}
BATCHES = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}
VIRTUAL = js.virtual_mesh({"replica": 2})


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def step_of(optimizer=None, mesh=VIRTUAL, **options):
    return js.make_train_step(loss, optimizer or optax.sgd(0.1), mesh=mesh, **options)


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_neither_sync_nor_gradients(mode):
    step = step_of(mode=mode)
    said = (
        r"`sync` is None, and neither `gradients` nor `optimizer` averages over 'replica', so the "
        r"2 replicas would train independently.*"
        r"gradients=js\.all_reduce_gradients\('replica'\).*sync=js\.local_sgd\('replica'\).*"
        r'js\.gradient_transform\(.*sync="none"'
    )
    with pytest.raises(ValueError, match=said):
        step.init(PARAMS)
    # A state that the step did not make is looked at when its program is built.
    state = js.TrainState.create(PARAMS, step.tx, mesh=VIRTUAL)
    for use in (step, step.compiled, step.traced_by_phase):
        with pytest.raises(ValueError, match=said):
            use(state, BATCHES[0])


def test_the_message_names_all_axes():
    mesh = js.virtual_mesh({"node": 2, "device": 2})
    with pytest.raises(ValueError, match=r"the 4 .*all_reduce_gradients\(\('node', 'device'\)\)"):
        step_of(mesh=mesh, axis_name=("node", "device")).init(PARAMS)


@pytest.mark.parametrize(
    ("gradients", "inner"),
    [
        (optax.identity(), {}),
        (optax.clip(1.0), {}),
        (js.clip_by_global_norm(1.0), {}),
        (js.all_reduce_gradients("device"), {"device": 2}),
    ],
    ids=["identity", "clip", "clip by norm", "inner axis"],
)
def test_gradients_that_are_averaged_over_no_replicas(gradients, inner):
    step = step_of(gradients=gradients, mesh=js.virtual_mesh({"replica": 2} | inner))
    with pytest.raises(ValueError, match="the 2 replicas would train independently"):
        step.init(PARAMS)


@pytest.mark.parametrize("argument", ["gradients", "optimizer"])
def test_axes_of_gradient_transforms_are_checked_at_construction(argument):
    for tx in (js.all_reduce_gradients("node"), js.gradient_transform(optax.sgd(1.0), axes="node")):
        options = {"optimizer": optax.sgd(0.1), argument: tx}
        with pytest.raises(ValueError, match=r"over \['node'\], and `mesh` has .*\['replica'\]"):
            js.make_train_step(loss, mesh=VIRTUAL, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": None}, "`optimizer` must be an optax transform, got None"),
        ({"optimizer": optax.adam}, "`optimizer` must be an optax transform, got <function"),
        ({"gradients": "mean"}, "`gradients` must be an optax transform, got 'mean'"),
        ({"gradients": np.zeros(2)}, r"`gradients` must be an optax transform, got array"),
    ],
)
def test_what_is_no_transform(options, said):
    with pytest.raises(ValueError, match=said):
        js.make_train_step(loss, mesh=VIRTUAL, **{"optimizer": optax.sgd(0.1)} | options)


def own_average(axis, by="pmean"):
    """A user's transform that averages gradients by itself."""

    def update(updates, state, params=None):
        if by == "pmean":
            return jax.lax.pmean(updates, axis), state
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis).mean(0), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


average = js.all_reduce_gradients("replica")
local = js.local_sgd("replica")


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": js.virtual_mesh({"replica": 1})},
        {"mesh": js.virtual_mesh({"replica": 1, "device": 2})},
        {"gradients": average},
        {"gradients": js.gradient_transform(own_average("replica"))},
        {"optimizer": js.chain(js.gradient_transform(own_average("replica")), optax.sgd(0.1))},
        {"optimizer": optax.chain(js.gradient_transform(own_average("replica")), optax.sgd(0.1))},
        {"optimizer": optax.chain(average, optax.sgd(0.1))},
        {"optimizer": optax.chain(optax.sgd(0.1), local)},
        {"optimizer": optax.masked(optax.chain(optax.sgd(0.1), local), {"b": True, "w": True})},
        {"optimizer": optax.chain(optax.sgd(0.1), js.only_finite(local))},
        {"optimizer": optax.chain(optax.sgd(0.1), js.sgp("replica"))},
        {"optimizer": optax.chain(optax.sgd(0.1), js.diloco("replica"))},
        {"optimizer": optax.chain(optax.sgd(0.1), js.slowmo("replica", base=local, sync_every=6))},
        {"optimizer": optax.chain(optax.sgd(0.1), js.hierarchical_local_sgd({"replica": 2}))},
        {"optimizer": js.accumulate(optax.chain(average, optax.sgd(0.1)), every=2)},
        {"optimizer": js.skip_unused(optax.chain(average, optax.sgd(0.1)), "replica")},
        {"optimizer": optax.chain(js.all_reduce_rows("replica"), optax.sgd(0.1))},
        {
            "optimizer": optax.chain(
                js.post_local_gradients(js.every(2, start=4), average), optax.sgd(0.1)
            )
        },
        {"optimizer": optax.chain(average, optax.sgd(0.1)), "sync": "none"},
        {"sync": "none"},
    ],
)
def test_what_is_no_silence(options):
    step = step_of(**options)
    state = jax.eval_shape(step.init, PARAMS)
    assert step.traced_by_phase(state, BATCHES[0])


@pytest.mark.parametrize("by", ["pmean", "all_gather"])
@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("gradients", lambda own: {"gradients": own}),
        ("gradients", lambda own: {"gradients": js.chain(optax.clip(9.0), own, average)}),
        ("gradients", lambda own: {"optimizer": js.chain(own, average, optax.sgd(0.1))}),
        ("optimizer", lambda own: {"optimizer": js.chain(own, js.clip_by_global_norm(1.0))}),
        ("optimizer", lambda own: {"optimizer": js.chain(own, optax.sgd(0.1)), "sync": "none"}),
        ("optimizer", lambda own: {"optimizer": optax.chain(average, own)}),
        ("optimizer", lambda own: {"optimizer": js.dynamic_loss_scale(own), "sync": local}),
        ("optimizer", lambda own: {"optimizer": optax.masked(own, {"b": True, "w": True})}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_by_hand(kind, make, argument, by):
    """They are found whatever is around them, and the remedy is named."""
    options = {"sync": "none", **make(own_average("replica", by))}
    step = step_of(mesh=KINDS[kind]({"replica": 2}), **options)
    said = (
        rf"`{argument}` holds a transform with collectives over \['replica'\] .*"
        r"js\.gradient_transform\(tx, axes=\('replica',\)\)"
    )
    with pytest.raises(ValueError, match=said):
        step.init(PARAMS)


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        (optax.apply_if_finite(average, 3), "`gradients` holds an optax.apply_if_finite around"),
        (optax.MultiSteps(average, 2), "`gradients` holds an optax.MultiSteps around"),
    ],
)
def test_wrappers_of_optax_as_gradients(gradients, said):
    with pytest.raises(ValueError, match=said):
        step_of(gradients=gradients).init(PARAMS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_transform_of_ours_is_taken_for_one_by_hand(kind):
    """Each one inside of a chain of optax, with all that it sends."""
    mesh = KINDS[kind]({"replica": 4})
    every = [
        js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, start_step=2)),
        js.all_reduce_gradients("replica", hook=js.hooks.int8()),
        js.post_local_gradients(js.every(2, start=4), average),
        js.all_reduce_rows("replica", tables=("w",), capacity=1),
        js.skip_unused(optax.sgd(0.1), "replica"),
        js.dynamic_loss_scale(optax.chain(average, optax.sgd(0.1)), "replica"),
        js.accumulate(optax.chain(average, optax.sgd(0.1)), 2),
        js.sgp("replica"),
        js.slowmo("replica", base=local, sync_every=6),
        js.only_finite(local),
    ]
    for tx in every:
        step_of(optax.masked(tx, {"b": True, "w": True}), mesh, sync="none").init(PARAMS)


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameter_transforms_among_the_gradients(wrapped):
    hidden = optax.masked(local, {"b": True, "w": True}) if wrapped else local
    step = step_of(gradients=optax.chain(average, hidden))
    said = r"`gradients` must be .*chain that holds a parameter transform.* pass it as `sync`"
    with pytest.raises(ValueError, match=said):
        step.init(PARAMS)
    with pytest.raises(ValueError, match=said):
        js.TrainState.create(PARAMS, step.tx, mesh=VIRTUAL)
    # As a state of another process has it.
    right = step_of(gradients=average)
    state = right.init(PARAMS)
    gradients = js.init(optax.chain(average, hidden), state.params, mesh=VIRTUAL)
    with pytest.raises(ValueError, match=said):
        right(state._replace(opt_state=(gradients, *state.opt_state[1:])), BATCHES[0])


@pytest.mark.parametrize("inner", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_are_said_to_train_apart(kind, inner):
    """Each as if it were alone: parameters, optimizer and model state; nothing is exchanged."""

    def stateful(params, batch, *, model_state):
        return loss(params, batch), ({}, {"mean": 0.5 * model_state["mean"] + batch.mean()})

    def run(mesh, batches, sync):
        step = js.make_train_step(stateful, optax.adam(0.1), sync=sync, mesh=mesh)
        assert step.sync is None
        state = step.init(PARAMS, model_state={"mean": np.float32(0)})
        for batch in batches:
            state, _ = step(state, batch)
        return state

    devices = {} if inner is None else {"device": inner}
    mesh = KINDS[kind]({"replica": 2} | devices)
    together = run(mesh, BATCHES, "none")
    for replica, share in enumerate(np.split(BATCHES, 2, axis=1)):
        alone = run(js.virtual_mesh({"replica": 1}), share, None)
        for name in ("params", "opt_state", "model_state"):
            found, expected = getattr(together, name), getattr(alone, name)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a[replica], b[0], atol=1e-6)


@pytest.mark.parametrize("gradients", [None, optax.identity()])
def test_a_replica_apart_stops_when_it_has_run_out(gradients):
    step = step_of(optax.sgd(0.1, momentum=0.9), sync="none", gradients=gradients, donate=False)
    before, _ = step(step.init(PARAMS), BATCHES[0])
    poisoned = BATCHES[1].copy()
    poisoned[4:] = np.nan
    after, _ = step(before, poisoned, [4, 0])
    moved, kept = (
        [
            np.array_equal(a[replica], b[replica])
            for part in ("params", "opt_state")
            for a, b in zip(
                *(jax.tree.leaves(getattr(s, part)) for s in (before, after)), strict=True
            )
        ]
        for replica in (0, 1)
    )
    assert all(kept)
    assert not any(moved)
    assert np.isfinite(after.params["w"]).all()


def test_a_replica_that_averages_gradients_follows_the_others_all_the_same():
    step = step_of(sync="none", gradients=js.all_reduce_gradients("replica", divide_by="active"))
    state, _ = step(step.init(PARAMS), BATCHES[0], [4, 0])
    np.testing.assert_array_equal(state.params["w"][0], state.params["w"][1])
    assert np.any(state.params["w"] != 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameter_transforms_elsewhere_are_not_host_scheduled(wrapped):
    sync = js.local_sgd("replica")
    hidden = optax.masked(sync, {"b": True, "w": True}) if wrapped else sync
    chain = optax.chain(optax.sgd(0.1), hidden)
    mesh = js.virtual_mesh({"replica": 2})
    js.make_train_step(loss, chain, mesh=mesh).init(PARAMS)
    with pytest.raises(ValueError, match='`mode`="host" schedules `sync` alone'):
        js.make_train_step(loss, chain, mesh=mesh, mode="host").init(PARAMS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_one_replicas_state_for_all(kind, wrapped):
    """`flax.jax_utils.unreplicate` keeps replica 0's part of the anchor, and loses the others."""
    mesh = KINDS[kind]({"replica": 4})
    slow = js.slowmo("replica", base=local, sync_every=6)
    sync = js.only_finite(slow) if wrapped else slow

    def fresh():
        return step_of(mesh=mesh, sync=sync, donate=False)

    start = {**PARAMS, "w": np.arange(24.0, dtype=np.float32).reshape(8, 3)}
    state = fresh().init(start)

    def of_the_first(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.device_put(np.stack([np.asarray(x)[0]] * 4), x.sharding)

    lost = jax.tree.map(of_the_first, state)
    with pytest.raises(ValueError, match=r"`state`: .*replica 0's.*unreplicate.*js\.consensus"):
        fresh()(lost, BATCHES[0])
    fresh()(state, BATCHES[0])
    # Parameters that start as one number have equal parts.
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    fresh()(fresh().init(zeros), BATCHES[0])
    # So have those that repeat themselves; a state that this step has made is known to be whole.
    repeated = {"w": np.tile(np.arange(128, dtype=np.float32), 64)}
    step = js.make_train_step(
        lambda p, b: jnp.mean(p["w"] * b), optax.sgd(0.1), mesh=mesh, sync=sync
    )
    step(step.init(repeated), np.ones((8, 1), np.float32))
