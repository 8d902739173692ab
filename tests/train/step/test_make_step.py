"""What a loss function and the axes of replicas bring to a step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.tracing import LossProgram
from train.step.problem import BATCHES, PARAMS, loss


def test_hook_state_that_differs_inside_a_replica():
    both = ("replica", "device")
    options = {
        "gradients": js.all_reduce_gradients(both, hook=js.hooks.int8()),
        "mesh": js.make_mesh({"replica": 2, "device": 2}),
    }
    step = js.make_train_step(loss, optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match=r"hook.*\['device'\]"):
        step.init(PARAMS)
    step = js.make_train_step(loss, optax.sgd(0.1), axis_name=both, **options)
    state, _ = step(step.init(PARAMS), BATCHES[0])
    assert state.params["w"].shape == (4, 8, 3)
    assert np.isfinite(state.params["w"]).all()


def test_a_step_is_shown_in_one_line():
    options = {"mesh": js.make_mesh({"replica": 2, "device": 2}), "mode": "host"}
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, **options)
    for text in (repr(step), repr(js.TrainPipeline(step, None, iter(())))):
        for part in ("replica=2, device=2", "js.slowmo(", "js.local_sgd(", "mode='host'"):
            assert part in text
        assert "\n" not in text
        assert " at 0x" not in text


def test_a_loss_function_may_refuse_to_run():
    out_of_date = []

    class Loss(LossProgram):
        def __call__(self, params, batch):
            return jnp.mean((params["w"][None] - batch) ** 2)

        def before_run(self):
            if out_of_date:
                raise ValueError("the program is out of date")

    mesh = js.virtual_mesh({"replica": 2})
    step = js.make_train_step(Loss(), optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh)
    state, _ = step(step.init({"w": jnp.ones(3)}), jnp.zeros((2, 3)))
    out_of_date.append(True)
    for run in (step, step.evaluate, step.collect):
        with pytest.raises(ValueError, match="out of date"):
            run(state, jnp.zeros((2, 3)))
    out_of_date.clear()
    step(state, jnp.zeros((2, 3)))
