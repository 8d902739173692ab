"""Recorded runs of torch's DistributedDataParallel with `nn.Embedding(sparse=True)`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.golden_peers import cases

CLOSE = {"rtol": 0, "atol": 2e-6}


def loss(params, batch):
    indices, of_rows, of_bias = batch
    return jnp.sum(params["emb"][indices] * of_rows) + jnp.sum(params["bias"] * of_bias)


def test_every_step_is_that_of_torch():
    meta, data = cases("ddp_sparse.npz")["1"]
    params = {k: jnp.asarray(data[f"{k}/init"]) for k in ("emb", "bias")}
    value_and_grad = js.row_value_and_grad(loss, lambda batch: {"emb": batch[0]})
    tx = js.sparse.all_reduce_rows(
        "replica",
        tables=("emb",),
        dense=js.all_reduce_gradients("replica"),
        path="rows",
        output="rows",
    )

    def step(params, state, batch):
        _, grads = value_and_grad(params, batch)
        grads, state = tx.update(grads, state, params)
        emb = js.sparse.apply_rows(params["emb"], grads["emb"], learning_rate=meta["lr"])
        bias = optax.apply_updates(params["bias"], -meta["lr"] * grads["bias"])
        return {"emb": emb, "bias": bias}, state, grads

    program = jax.jit(jax.vmap(step, axis_name="replica", in_axes=(0, None, 0), out_axes=0))
    params = jax.tree.map(lambda x: jnp.stack([x] * meta["world"]), params)
    state = tx.init(jax.tree.map(lambda x: x[0], params))
    for t in range(meta["steps"]):
        batch = (data["idx"][:, t], data["emb/G"][:, t], data["bias/G"][:, t])
        params, states, grads = program(params, state, batch)
        state = jax.tree.map(lambda x: x[0], states)
        rows = data[f"step{t}/rows"]
        for replica in range(meta["world"]):
            assert grads["emb"].rows[replica, : len(rows)].tolist() == rows.tolist()
            values = np.asarray(grads["emb"].values[replica])
            np.testing.assert_allclose(values[: len(rows)], data[f"step{t}/values"], **CLOSE)
            np.testing.assert_allclose(grads["bias"][replica], data[f"step{t}/bias_grad"], **CLOSE)
            for k in ("emb", "bias"):
                np.testing.assert_allclose(params[k][replica], data[f"step{t}/{k}"], **CLOSE)
    assert state.count == meta["steps"]
    assert state.overflows == 0
    assert state.invalid == 0
