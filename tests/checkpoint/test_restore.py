"""Resumed runs equal undisturbed runs, bit by bit, from any step of a period."""

import numpy as np
import optax
import pytest

from checkpoint.runs import MODEL_STATE, PARAMS, PERIOD, batch, leaf_bytes, make_step
from jaxslowmo.checkpoint import Checkpoints
from support.promotion import promoting

LAST = PERIOD + 1


@pytest.mark.parametrize("name", ["all_reduce", "slowmo over sgp", "diloco"])
def test_every_step_of_a_period_can_be_resumed(name, mesh_of, tmp_path):
    """Together they hold all kinds of state, in host mode and in traced mode."""
    mode = "host" if name == "slowmo over sgp" else "traced"
    step = make_step(name, mesh_of({"replica": 4}), mode=mode)
    state = step.init(PARAMS, model_state=MODEL_STATE, seed=3)
    with Checkpoints(tmp_path, keep=LAST) as checkpoints:
        for t in range(1, LAST + 1):
            state, _ = step(state, batch(t, 4))  # which donates what may still be written
            checkpoints.save(t, state, extra={"position": [t, {"a": None}]})
        undisturbed = leaf_bytes(state)
        for t in range(1, LAST):
            restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=t)
            assert (restored.step, restored.is_exact, restored.notes) == (t, True, ())
            assert restored.extra == {"position": [t, {"a": None}]}
            state = restored.state
            for later in range(t + 1, LAST + 1):
                state, _ = step(state, batch(later, 4))
            assert leaf_bytes(state) == undisturbed, t


def test_leaves_without_elements_and_moments_that_widen_come_back(tmp_path):
    """Orbax stores no empty leaves; the first update multiplies half moments by float32 rates."""
    injected = promoting(optax.inject_hyperparams(optax.adam, hyperparam_dtype=np.float32)(0.1))
    params = {**PARAMS, "none": np.zeros((0, 3), np.float32)}
    step = make_step("local_sgd", 2, optimizer=injected)
    state = step.init(params, model_state=MODEL_STATE)
    assert state.opt_state.inner_state[0].mu["b"].dtype.itemsize == 2
    state, _ = step(state, batch(1, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        for replicas in (2, 3):
            other = make_step("local_sgd", replicas, optimizer=injected)
            restored = checkpoints.restore(other, params, model_state=MODEL_STATE)
            assert restored.is_exact == (replicas == 2)
            assert restored.state.params["none"].shape == (replicas, 0, 3)
            assert restored.state.opt_state.inner_state[0].mu["b"].dtype.itemsize == 4
            if replicas == 2:
                assert leaf_bytes(restored.state) == leaf_bytes(state)
