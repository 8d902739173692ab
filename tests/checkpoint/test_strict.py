"""Checkpoints and exports under jax's debugging settings, and inside of `jax.set_mesh`."""

import numpy as np
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, make_step
from jaxslowmo.checkpoint import Checkpoints, export_consensus, load_consensus
from support.strict import SETTINGS, assert_equal_bits

BATCHES = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)


def program(name, mesh, fewer, folder):
    """Train, save, restore on as many and on fewer replicas, train on; return the results."""
    step, other = (make_step(name, each) for each in (mesh, fewer))
    state = step.init(PARAMS, model_state=MODEL_STATE)
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(2, state, wait=True)
        states = [
            checkpoints.restore(each, PARAMS, model_state=MODEL_STATE).state
            for each in (step, other)
        ]
    export_consensus(folder / "model", state.params, mesh=mesh, shares=step.shares(state))
    found = [load_consensus(folder / "model", PARAMS)]
    for each, restored in zip((step, other), states, strict=True):
        found.append(each(restored, BATCHES[2])[0].params)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_saved_run_goes_on(setting, tmp_path):
    name = "slowmo over sgp"
    meshes = js.make_mesh({"replica": 4}), js.make_mesh({"replica": 2})
    expected = program(name, *meshes, tmp_path / "plain")
    with SETTINGS[setting](meshes[0]):
        # On fewer devices than those of the mesh that is set, jax runs nothing.
        fewer = meshes[1] if setting == "checks" else meshes[0]
        found = program(name, meshes[0], fewer, tmp_path / "set")
    assert_equal_bits(found[:2], expected[:2])
    if setting == "checks":
        assert_equal_bits(found[2], expected[2])
