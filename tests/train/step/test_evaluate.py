"""A forward pass: metrics as the step's, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, PARAMS, loss


def step_of(mesh, fn=loss, **options):
    return js.make_train_step(
        fn, optax.adam(0.1), sync=js.local_sgd("replica"), mesh=mesh, **options
    )


@pytest.mark.parametrize("kind", ["virtual", "devices", "inner"])
def test_metrics_are_those_of_the_next_update(mesh_of, kind):
    mesh = {
        "virtual": lambda: js.virtual_mesh({"replica": 2}),
        "devices": lambda: mesh_of({"replica": 2}),
        "inner": lambda: mesh_of({"replica": 2, "device": 2}),
    }[kind]()

    def drawing(params, batch, *, rng):
        value = loss(params, batch)
        return value, {"drawn": jax.random.uniform(rng), "mean": batch.mean()}

    step = step_of(mesh, drawing)
    state, _ = step(step.init(PARAMS), BATCHES[0])
    before = jax.tree.map(np.asarray, jax.tree.leaves(state._replace(rng=())))
    for weight in (None, [2.0, 0.0]):
        found = step.evaluate(state, BATCHES[1], weight)
        again = step.evaluate(state, BATCHES[1], weight)
        assert found.keys() == {"drawn", "mean", "loss"} | ({"weight"} if weight else set())
        for name in found:
            np.testing.assert_array_equal(found[name], again[name])
        after = jax.tree.leaves(state._replace(rng=()))
        assert all(map(np.array_equal, before, after))
    _, wanted = step(state, BATCHES[1], weight)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6, err_msg=name)
    assert found["loss"][1] == 0


def test_model_state_is_read_and_left_alone(mesh_of):
    def counting(params, batch, *, model_state):
        seen = model_state["count"]
        return loss(params, batch), ({"seen": seen}, {"count": seen + 1})

    for mode in ("sync_mean", "broadcast"):
        step = step_of(mesh_of({"replica": 2}), counting, model_state=mode)
        state = step.init(PARAMS, model_state={"count": jnp.zeros(())})
        state = state._replace(model_state={"count": jnp.arange(2.0)})
        wanted = [0, 0] if mode == "broadcast" else [0, 1]
        assert step.evaluate(state, BATCHES[0])["seen"].tolist() == wanted
        assert state.model_state["count"].tolist() == [0, 1]


def test_a_donated_state_is_refused():
    step = step_of(js.virtual_mesh({"replica": 2}))
    state = step.init(PARAMS)
    step(state, BATCHES[0])
    with pytest.raises(ValueError, match="reuses its buffers"):
        step.evaluate(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"multiple of 2, .*got .* \(1, 8\)"):
        step.evaluate(step.init(PARAMS), BATCHES[0, :1])
