"""What makes replicas agree, and replicas that are said to train independently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"b": np.zeros(3, np.float32), "w": np.ones((8, 3), np.float32)}
BATCHES = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
VIRTUAL = js.virtual_mesh({"replica": 2})
sgd, average, local = optax.sgd(0.1), js.all_reduce_gradients("replica"), js.local_sgd("replica")


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


def masked(tx):
    return optax.masked(tx, {"b": True, "w": True})


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": js.virtual_mesh({"replica": 1, "device": 2})},
        {"gradients": own_average()},
        {"optimizer": js.chain(own_average(), sgd)},
        {"optimizer": optax.chain(own_average(), sgd)},
        {"optimizer": masked(optax.chain(sgd, local))},
        {"optimizer": optax.chain(sgd, js.only_finite(js.sgp("replica")))},
        {"optimizer": optax.chain(sgd, js.diloco("replica"))},
        {"optimizer": js.gradients.skip_unused(optax.chain(average, sgd), "replica")},
        {"optimizer": optax.chain(js.sparse.all_reduce_rows("replica"), sgd)},
        {"sync": "none"},
        # None of ours, inside of a chain of optax, is taken for one by hand.
        *(
            {"optimizer": masked(tx), "mesh": js.make_mesh({"replica": 4}), "sync": "none"}
            for tx in (
                js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, start_step=2)),
                js.all_reduce_gradients("replica", hook=js.hooks.int8()),
                js.sparse.all_reduce_rows("replica", tables=("w",), capacity=1),
                js.dynamic_loss_scale(optax.chain(average, sgd), "replica"),
            )
        ),
    ],
)
def test_what_makes_replicas_agree_or_is_told(options):
    step = step_of(**options)
    assert step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCHES[0])
