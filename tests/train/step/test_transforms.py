"""What makes replicas agree, and replicas that are said to train independently."""

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
sgd, average, local = optax.sgd(0.1), js.all_reduce_gradients("replica"), js.local_sgd("replica")
ALL = {"b": True, "w": True}


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"][None]) ** 2)


def step_of(optimizer=sgd, mesh=VIRTUAL, **options):
    return js.make_train_step(loss, optimizer, mesh=mesh, **options)


def own_average():
    """A user's transform that averages gradients by itself."""

    def update(updates, state, params=None):
        return jax.lax.pmean(updates, "replica"), state

    own = optax.GradientTransformation(optax.init_empty_state, update)
    return js.gradient_transform(own)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": js.virtual_mesh({"replica": 1, "device": 2})},
        {"gradients": own_average()},
        {"optimizer": js.chain(own_average(), sgd)},
        {"optimizer": optax.chain(own_average(), sgd)},
        {"optimizer": optax.masked(optax.chain(sgd, local), ALL)},
        {"optimizer": optax.chain(sgd, js.only_finite(local))},
        {"optimizer": optax.chain(sgd, js.sgp("replica"))},
        {"optimizer": optax.chain(sgd, js.diloco("replica"))},
        {"optimizer": optax.chain(sgd, js.hierarchical_local_sgd({"replica": 2}))},
        {"optimizer": js.gradients.skip_unused(optax.chain(average, sgd), "replica")},
        {"optimizer": optax.chain(js.sparse.all_reduce_rows("replica"), sgd)},
        {"sync": "none"},
    ],
)
def test_what_makes_replicas_agree_or_is_told(options):
    step = step_of(**options)
    assert step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCHES[0])


@pytest.mark.parametrize(
    ("argument", "transform"),
    [
        ("gradients", js.gradients.accumulate(average, every=2)),
        ("optimizer", js.gradients.accumulate(optax.chain(average, sgd), every=2)),
        ("optimizer", optax.chain(js.gradients.accumulate(sgd, 2), optax.scale(0.5))),
        ("optimizer", optax.masked(js.gradients.accumulate(sgd, 2), ALL)),
        ("optimizer", js.dynamic_loss_scale(js.gradients.accumulate(sgd, 2))),
    ],
)
def test_a_step_collects_by_itself_and_takes_no_wrapper_that_does(argument, transform):
    with pytest.raises(ValueError, match=f"`{argument}`.*js.gradients.accumulate.*accumulate=k"):
        step_of(sync=local, **{argument: transform}).init(PARAMS)


def test_no_transform_of_ours_is_taken_for_one_by_hand():
    """Each one inside of a chain of optax, with all that it sends."""
    mesh = js.make_mesh({"replica": 4})
    for tx in [
        js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, start_step=2)),
        js.all_reduce_gradients("replica", hook=js.hooks.int8()),
        js.sparse.all_reduce_rows("replica", tables=("w",), capacity=1),
        js.gradients.skip_unused(sgd, "replica"),
        js.dynamic_loss_scale(optax.chain(average, sgd), "replica"),
        js.slowmo("replica", base=js.sgp("replica"), sync_every=6),
        js.only_finite(local),
    ]:
        step_of(optax.masked(tx, ALL), mesh, sync="none").init(PARAMS)
