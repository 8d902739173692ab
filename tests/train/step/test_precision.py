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


PARTS = 512


def test_as_the_mean_in_float64():
    """Of bfloat16 gradients that differ, beside float32 ones; rounded once, at the end."""
    rng = np.random.default_rng(0)
    params = {"half": np.zeros(3, jnp.bfloat16), "whole": np.zeros(3, np.float32)}
    batch = rng.normal(size=(2, PARTS, 3)).astype(jnp.bfloat16)

    def loss(params, batch):
        whole = params["whole"][None] * batch.astype(jnp.float32)
        parts = params["half"][None] * batch, whole
        return sum(jnp.sum(x).astype(jnp.float32) for x in parts), {"first": batch[0, 0]}

    mesh, options = js.virtual_mesh({"replica": 2}), {"sync": "none", "accumulate": PARTS}
    step = js.make_train_step(loss, optax.sgd(1.0), mesh=mesh, **options)
    state, metrics = step(step.init(params), batch.reshape(-1, 3))
    wanted = batch.astype(np.float64).mean(1)
    np.testing.assert_allclose(-state.params["whole"], wanted, rtol=1e-5, atol=1e-7)
    # Rounded once, to 8 bits.
    half = -np.asarray(state.params["half"]).astype(np.float64)
    np.testing.assert_allclose(half, wanted, rtol=2**-8)
    assert metrics["first"].dtype == jnp.float32
    np.testing.assert_allclose(metrics["first"], wanted[:, 0], rtol=1e-5, atol=1e-7)
