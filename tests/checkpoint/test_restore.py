"""Resumed runs equal undisturbed runs, bit by bit, from any step of a period."""

import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import (
    MODEL_STATE,
    PARAMS,
    PERIOD,
    SYNCS,
    batch,
    leaf_bytes,
    make_step,
)
from jaxslowmo.checkpoint import Checkpoints
from support.exhaustive import sweep
from support.promotion import promoting

LAST = PERIOD + 1
# Together they hold all kinds of state, in host mode and in traced mode.
USUAL = ("all_reduce", "slowmo over sgp", "own anchors", "diloco")


@pytest.mark.parametrize("name", sweep(SYNCS, lambda name: name in USUAL))
def test_every_step_of_a_period_can_be_resumed(name, mesh_of, tmp_path):
    axes = {"node": 2, "device": 2} if name == "two levels" else {"replica": 4}
    mode = "traced" if name in ("all_reduce", "sgp", "own anchors", "diloco") else "host"
    step = make_step(name, mesh_of(axes), mode=mode)
    state = step.init(PARAMS, model_state=MODEL_STATE, seed=3)
    with Checkpoints(tmp_path, keep=LAST) as checkpoints:
        for t in range(1, LAST + 1):
            state, _ = step(state, batch(t, 4))
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


def test_the_same_replicas_elsewhere_hold_the_same_bits(mesh_of, tmp_path):
    sync = js.slowmo("replica", base=js.sgp("replica"), sync_every=2, local_axis_name="device")
    places = [
        mesh_of({"replica": 2, "device": 2}),
        js.virtual_mesh({"replica": 2, "device": 2}),
        mesh_of({"replica": 2, "device": 4}),
    ]
    steps = [make_step("", mesh, sync=sync) for mesh in places]
    state = steps[0].init(PARAMS, model_state=MODEL_STATE)
    for t in (1, 2, 3):
        state, _ = steps[0](state, batch(t, 4))
    for i, step in enumerate(steps):
        with Checkpoints(tmp_path / str(i)) as checkpoints:
            checkpoints.save(3, state, wait=True)
            restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)
        assert (restored.is_exact, restored.notes) == (True, ())
        assert leaf_bytes(restored.state) == leaf_bytes(state)
        state = restored.state


def test_a_saved_state_may_be_donated_at_once(step, tmp_path):
    state = step.init(PARAMS, model_state=MODEL_STATE)
    before = leaf_bytes(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for t in range(3):
            state, _ = step(state, batch(t, 2))
        restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)
    assert leaf_bytes(restored.state) == before


def test_leaves_without_elements_and_moments_that_widen_come_back(tmp_path):
    """Orbax stores no empty leaves; the first update multiplies half moments by float32 rates."""
    injected = promoting(optax.inject_hyperparams(optax.adam, hyperparam_dtype=np.float32)(0.1))
    params = {**PARAMS, "none": np.zeros((0, 3), np.float32)}
    steps = {n: make_step("local_sgd", n, optimizer=injected) for n in (4, 2)}
    state = steps[4].init(params, model_state=MODEL_STATE)
    widths = [state.opt_state.inner_state[0].mu["b"].dtype.itemsize]
    with Checkpoints(tmp_path) as checkpoints:
        for t in (1, 2):
            state, _ = steps[4](state, batch(t, 4))
            checkpoints.save(t, state)
        for replicas, step in steps.items():
            restored = checkpoints.restore(step, params, model_state=MODEL_STATE)
            assert restored.is_exact == (replicas == 4)
            assert restored.state.params["none"].shape == (replicas, 0, 3)
            moment = restored.state.opt_state.inner_state[0].mu["b"]
            assert [*widths, moment.dtype.itemsize] == [2, 4]
            if replicas == 4:
                assert leaf_bytes(restored.state) == leaf_bytes(state)
            resumed, _ = step(restored.state, batch(3, replicas))
            assert resumed.opt_state.inner_state[0].mu["b"].dtype == moment.dtype
