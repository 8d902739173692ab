"""A forward pass: metrics as the step's, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, PARAMS, loss


def drawing(params, batch, *, rng, model_state):
    seen = model_state["count"]
    metrics = {"drawn": jax.random.uniform(rng), "mean": batch.mean(), "seen": seen}
    return loss(params, batch), (metrics, {"count": seen + 1})


def test_metrics_are_those_of_the_next_update(mesh_of):
    """With the key of the next update, and the model state that training would see."""
    options = {"mesh": mesh_of({"replica": 2, "device": 2}), "model_state": "broadcast"}
    sync = js.local_sgd("replica", sync_every=9)
    step = js.make_train_step(drawing, optax.adam(0.1), sync=sync, **options)
    state, _ = step(step.init(PARAMS, model_state={"count": jnp.zeros(())}), BATCHES[0])
    state = state._replace(model_state={"count": jnp.arange(2.0)})
    before = jax.tree.map(np.asarray, jax.tree.leaves(state._replace(rng=())))
    for weight in (None, [2.0, 0.0]):
        found = step.evaluate(state, BATCHES[1], weight)
        again = step.evaluate(state, BATCHES[1], weight)
        assert found.keys() == {"drawn", "mean", "seen", "loss"} | ({"weight"} if weight else set())
        jax.tree.map(np.testing.assert_array_equal, found, again)
        assert all(map(np.array_equal, before, jax.tree.leaves(state._replace(rng=()))))
        if weight is None:
            assert found["seen"].tolist() == [0, 0]
    _, wanted = step(state, BATCHES[1], weight)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6, err_msg=name)
    assert found["loss"][1] == 0
    with pytest.raises(ValueError, match="`state`"):  # it was donated
        step.evaluate(state, BATCHES[0])
