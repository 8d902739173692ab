"""What makes replicas agree; chains as the optimizer: a `js.chain`, and an `optax.chain`.

`update/test_replica_step.py` has a `js.chain` beside its parts given by name.
"""

import jax
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, PARAMS, assert_close, loss, trained

mean, clip, sgd = js.all_reduce_gradients("replica"), js.clip_by_global_norm(0.5), optax.sgd(0.1)
local = js.local_sgd("replica", sync_every=2)
VIRTUAL = js.virtual_mesh({"replica": 2})
FREE = optax.contrib.schedule_free_sgd(0.1)


def ends_of(optimizer, **options):
    return trained(optimizer, mesh=VIRTUAL, **options).params


def test_behind_an_optimizer_a_clipping_clips_its_updates():
    """It is no gradient transform there."""
    chain = js.chain(FREE, clip, local)
    assert_close(ends_of(chain), ends_of(optax.chain(FREE, clip), sync=local))


OPAQUE = {
    "masked": optax.masked(optax.chain(mean, sgd), {"b": True, "w": True}),
    "parameters": optax.chain(sgd, local),
    "loss scale": optax.chain(mean, js.dynamic_loss_scale(sgd, initial=4.0)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_a_chain_of_optax_is_called_as_in_a_loop_of_ones_own(name):
    tx = OPAQUE[name]

    def one(params, state, batch):
        scale = js.loss_scale_of(state)
        grads = jax.grad(lambda p: loss(p, batch) * (1 if scale is None else scale))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = js.replicate(PARAMS, mesh=VIRTUAL)
    state, update = js.init(tx, params, mesh=VIRTUAL), jax.jit(jax.vmap(one, axis_name="replica"))
    for batch in BATCHES[:4].reshape(4, 2, -1, 8):
        params, state = update(params, state, batch)
    assert_close(ends_of(tx), params)


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
        {"optimizer": optax.chain(own_average(), sgd)},
        {"optimizer": optax.chain(sgd, js.only_finite(js.sgp("replica")))},
        {"optimizer": js.gradients.skip_unused(optax.chain(mean, sgd), "replica")},
        {"optimizer": optax.chain(js.sparse.all_reduce_rows("replica"), sgd)},
        {"sync": "none"},
        # None of ours, inside of a chain of optax, is taken for one by hand.
        *(
            {"optimizer": masked(tx), "mesh": js.make_mesh({"replica": 4}), "sync": "none"}
            for tx in (
                js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1, start_step=2)),
                js.sparse.all_reduce_rows("replica", tables=("w",), capacity=1),
                js.dynamic_loss_scale(optax.chain(mean, sgd), "replica"),
            )
        ),
    ],
)
def test_what_makes_replicas_agree_or_is_told(options):
    step = js.make_train_step(loss, **{"optimizer": sgd, "mesh": VIRTUAL, **options})
    assert step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCHES[0])
