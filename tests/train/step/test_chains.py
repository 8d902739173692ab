"""A `js.chain` as the optimizer is its parts given by name; an `optax.chain` is called as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

PARAMS = {"b": np.zeros(3, np.float32), "w": np.ones((8, 3), np.float32)}
BATCHES = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}
LATE = js.every(2, start=2)
mean, clip, sgd = js.all_reduce_gradients("replica"), js.clip_by_global_norm(0.5), optax.sgd(0.1)
local = js.local_sgd("replica", sync_every=2)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2) + batch.mean()


def trained(mesh, optimizer, **options):
    step = js.make_train_step(loss, optimizer, mesh=mesh, **options)
    state = step.init(PARAMS)
    for batch in BATCHES:
        state, _ = step(state, batch)
    return state.params


COMBINATIONS = {
    "mean": ([mean], optax.adam(0.1), None),
    "clipped": ([mean, clip], optax.adam(0.1), None),
    "optax among them": ([mean, optax.clip(0.1), clip], sgd, None),
    "value": ([mean], optax.polyak_sgd(), None),
    "post-local": ([js.post_local_gradients(LATE, mean)], optax.polyak_sgd(), local),
    "copies": ([], optax.contrib.cocob(), local),
    "all three": ([mean, clip], sgd, js.slowmo("replica", base=local, sync_every=4)),
    "scaled": ([mean], js.dynamic_loss_scale(js.chain(clip, sgd)), None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sweep(COMBINATIONS, lambda name: name not in ("mean", "scaled")))
def test_a_chain_equals_its_parts(name, kind):
    gradients, optimizer, sync = COMBINATIONS[name]
    mesh = KINDS[kind]({"replica": 2})
    whole = js.chain(*gradients, optimizer, *([] if sync is None else [sync]))
    named = js.chain(*gradients) if gradients else None
    expected = trained(mesh, optimizer, gradients=named, sync=sync)
    jax.tree.map(np.testing.assert_array_equal, trained(mesh, whole), expected)


@pytest.mark.parametrize("validate", ["before", "after"])
def test_what_a_chain_does_to_gradients_follows_those_that_are_given(validate):
    mesh, options = js.virtual_mesh({"replica": 2}), {"validate": validate}
    expected = trained(mesh, js.chain(mean, clip, sgd, local), **options)
    for optimizer, named in (
        (js.chain(clip, sgd), {"gradients": mean, "sync": local}),
        (js.chain(clip, sgd, local), {"gradients": mean}),
        (js.chain(mean, clip, sgd), {"sync": local}),
        (sgd, {"gradients": js.chain(mean, clip), "sync": local}),
    ):
        found = trained(mesh, optimizer, **named, **options)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_clipping_alone_leaves_the_mean_over_devices_to_the_step():
    mesh = js.virtual_mesh({"replica": 2, "device": 2})
    found = trained(mesh, js.chain(clip, sgd, local))
    expected = trained(mesh, js.chain(js.all_reduce_gradients("device"), clip, sgd, local))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


OPAQUE = {
    "chain": optax.chain(mean, clip, sgd),
    "masked": optax.masked(optax.chain(mean, sgd), {"b": True, "w": True}),
    "several steps": optax.MultiSteps(optax.chain(mean, sgd), 2).gradient_transformation(),
    "partition": optax.partition(
        {"a": optax.chain(mean, sgd), "b": optax.chain(mean, optax.adam(0.1))}, {"b": "a", "w": "b"}
    ),
    "every second": optax.conditionally_mask(optax.chain(mean, sgd), lambda step: step % 2 == 0),
    "parameters": optax.chain(sgd, local),
    "loss scale": optax.chain(mean, js.dynamic_loss_scale(sgd, initial=4.0)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_a_chain_of_optax_is_called_as_in_a_loop_of_ones_own(name):
    tx, mesh = OPAQUE[name], js.virtual_mesh({"replica": 2})

    def one(params, state, batch):
        scale = js.loss_scale_of(state)
        grads = jax.grad(lambda p: loss(p, batch) * (1 if scale is None else scale))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = js.replicate(PARAMS, mesh=mesh)
    state = js.init(tx, params, mesh=mesh)
    for batch in BATCHES.reshape(4, 2, 4, 8):
        params, state = jax.jit(jax.vmap(one, axis_name="replica"))(params, state, batch)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), trained(mesh, tx), params
    )


BY_NAME = r"js\.chain"


@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        (optax.chain(mean, optax.polyak_sgd()), {}, f"asks for `value`.*{BY_NAME}"),
        (
            optax.chain(clip, sgd),
            {"gradients": mean, "validate": "after"},
            f'`validate`="after".*{BY_NAME}',
        ),
        (optax.chain(mean, sgd), {"order": "ready"}, f'`order`="ready".*{BY_NAME}'),
        (optax.chain(sgd, local), {"mode": "host"}, f'`mode`="host".*{BY_NAME}'),
        (js.chain(mean, sgd), {"gradients": mean}, "`gradients` was given, and `optimizer` is a"),
        (js.chain(sgd, local), {"sync": local}, "`sync` was given, and `optimizer` is a js.chain"),
        (js.chain(sgd, local), {"sync": "none"}, "`sync` was given, and `optimizer` is a js.chain"),
        (js.chain(sgd, local, local), {}, "2 parameter transforms, and a step has one"),
        (js.chain(clip, sgd), {}, "the 2 replicas would train independently"),
        (
            optax.apply_if_finite(optax.chain(mean, sgd), 3),
            {},
            "apply_if_finite around a transform that exchanges",
        ),
    ],
)
def test_what_is_refused(optimizer, options, said):
    with pytest.raises(ValueError, match=said):
        trained(js.virtual_mesh({"replica": 2}), optimizer, **options)


def test_model_state_that_would_follow_an_exchange_nobody_sees():
    def stateful(params, batch, *, model_state):
        return loss(params, batch), ({}, model_state)

    mesh, state = js.virtual_mesh({"replica": 2}), {"mean": np.float32(0)}
    step = js.make_train_step(stateful, optax.chain(sgd, local), mesh=mesh)
    with pytest.raises(ValueError, match=rf'`model_state`="sync_mean" .*{BY_NAME}'):
        step.init(PARAMS, model_state=state)
    for optimizer, mode in (
        (js.chain(sgd, local), "sync_mean"),
        (optax.chain(sgd, local), "local"),
    ):
        js.make_train_step(stateful, optimizer, mesh=mesh, model_state=mode).init(
            PARAMS, model_state=state
        )


@pytest.mark.parametrize(
    "first", [clip, optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1)]
)
def test_nothing_sees_scaled_gradients_in_a_chain_that_hides_its_scale(first):
    scaled = js.dynamic_loss_scale(sgd)
    step = js.make_train_step(
        loss, optax.chain(mean, first, scaled), mesh=js.virtual_mesh({"replica": 2})
    )
    with pytest.raises(ValueError, match=r"before a js\.dynamic_loss_scale.*js\.chain"):
        step.init(PARAMS)
    mesh = js.virtual_mesh({"replica": 2})
    jax.tree.map(
        np.testing.assert_array_equal,
        trained(mesh, optax.chain(mean, scaled)),
        trained(mesh, js.chain(mean, scaled)),
    )


@pytest.mark.parametrize("optimizer", [optax.contrib.schedule_free_sgd(0.1), optax.polyak_sgd()])
def test_clipping_behind_an_optimizer_clips_its_updates(optimizer):
    """Copies follow, and the optimizer is told the loss: it is no gradient transform."""
    mesh = js.virtual_mesh({"replica": 2})
    found = trained(mesh, js.chain(optimizer, clip, local))
    expected = trained(mesh, optax.chain(optimizer, clip), sync=local)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda v: jnp.isnan(v),
        lambda v: jnp.where(True, v, 0.0),
        lambda v: 1 + v**2,
        lambda v: v == 0.0,
        lambda v: v % 2,
    ],
)
def test_a_value_that_nobody_knows_is_refused_however_it_is_used(use):
    def update(grads, state, params=None, *, value, **extra):
        del params, extra
        factor = jnp.float32(use(value))
        return jax.tree.map(lambda g: g * factor, grads), state

    reads = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    step = js.make_train_step(loss, optax.chain(mean, reads), mesh=js.virtual_mesh({"replica": 2}))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"asks for `value`.*js\.chain"):
        step(state, BATCHES[0])
