"""Steps with a policy: in what they compute, and what they say of float16.

`test_alike.py` and `update/test_replica_step.py` have loss scales beside all else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import train

MESH = js.virtual_mesh({"replica": 4})
PARAMS = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
BATCH = (np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32),)


def loss(params, batch):
    product = (batch[0] @ params["w"]).astype(params["b"].dtype)
    return (product + params["b"][None]).sum(-1).mean()


def test_the_policy_holds_wherever_the_loss_is_called():
    seen = []

    def noting(params, batch, *, model_state):
        seen.append((params["w"].dtype, params["b"].dtype, batch[0].dtype, model_state["m"].dtype))
        value = loss(params, batch)
        return value, ({"twice": value * 2}, {"m": model_state["m"] + value})

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    searching = optax.chain(optax.sgd(1.0), search)
    optimizer = js.dynamic_loss_scale(searching, "replica")
    step = js.make_train_step(
        noting, optimizer, sync=js.local_sgd("replica"), mesh=MESH,
        policy=js.gradients.Policy("bfloat16", keep="b"),
    )  # fmt: skip
    state = step.init(PARAMS, model_state={"m": np.float32(0)})
    step.ready_order(state, BATCH)
    told = step.evaluate(state, BATCH)
    state, metrics = step(state, BATCH)
    assert len(seen) >= 3
    assert {tuple(map(str, x)) for x in seen} == {("bfloat16", "float32", "bfloat16", "float32")}
    for name in ("loss", "twice"):
        assert metrics[name].dtype == told[name].dtype == jnp.float32
    np.testing.assert_array_equal(told["loss"], metrics["loss"])
    floats = jax.tree.leaves((state.params, state.model_state))
    assert {x.dtype for x in floats} == {np.dtype("float32")}


def test_float16_without_a_scale_is_told_once():
    mean, policy = js.all_reduce_gradients("replica"), js.gradients.Policy("float16")
    step = js.make_train_step(loss, optax.sgd(0.1), gradients=mean, mesh=MESH, policy=policy)
    with pytest.warns(UserWarning, match="js.dynamic_loss_scale") as told:
        state, metrics = train(step, step.init(PARAMS), [BATCH] * 2)
    assert len(told) == 1
    assert state.params["w"].dtype == metrics["loss"].dtype == np.float32
