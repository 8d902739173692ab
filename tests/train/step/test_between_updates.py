"""Optimizers that are known by the classes of their states, and none that is tried."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.ones((7, 5), np.float32), "b": np.ones(5, np.float32)}
MESH = js.virtual_mesh({"replica": 2})
EVERY_3 = js.local_sgd("replica", sync_every=3)
ALWAYS = js.local_sgd("replica", sync_every=1)


def sam(period=2):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.adam(0.1), adversary, sync_period=period)


def several(k):
    return optax.MultiSteps(optax.adam(0.1), k).gradient_transformation()


# What exchanges, and what the message says; None for no message.
CASES = {
    "sam": (sam(), {"sync": ALWAYS}, ("optax.contrib.sam", "`sync_every`", "multiple")),
    "sam inside": (optax.apply_if_finite(sam(), 3), {"sync": ALWAYS}, ("contrib.sam",)),
    "several": (several(4), {"sync": ALWAYS}, ("optax.MultiSteps", "`accumulate`")),
    "a period that may fit": (sam(3), {"sync": EVERY_3}, None),
    "gradients": (several(2), {"gradients": js.all_reduce_gradients("replica")}, None),
}


@pytest.mark.parametrize(("optimizer", "exchange", "said"), CASES.values(), ids=CASES.keys())
def test_what_is_said_of_an_optimizer(optimizer, exchange, said):
    step = js.make_train_step(lambda p, b: jnp.sum(b), optimizer, mesh=MESH, **exchange)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.init(PARAMS)
        step.init(PARAMS)
    messages = [str(x.message) for x in caught]
    assert len(messages) == (said is not None), messages
    assert all(part in messages[0] for part in said or ()), messages
