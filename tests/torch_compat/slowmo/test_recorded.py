"""Every adopted recorded run of FairScale, with 2, 4, 5 and 8 processes."""

import functools

import numpy as np
import pytest
from slowmo_recorded import FOLDER, HERE, Recording, names, replay_all
from slowmo_spawned import spawned

WORLDS = (2, 4, 5, 8)
CASES = [(world, name) for world in WORLDS for name in names(world)]
FLOAT32 = {"rtol": 1e-5, "atol": 2e-5}


def tolerance(recording: Recording) -> dict[str, float]:
    if not recording.is_half:
        return FLOAT32
    # FairScale rounds the sum, up to 8 here, before it halves it; we mix in float32.
    return {"rtol": 0, "atol": 5e-3 if recording.config["effective"]["sgp"] else 2.5e-2}


@functools.cache
def replayed(by: str, world: int):
    """All files of one number of processes in one start of them."""
    return spawned(world, replay_all, names(world), by=by)


def test_all_files_are_here():
    assert len(CASES) == len([*FOLDER.glob("*.npz"), *HERE.glob("*.npz")]) == 72 + 4


@pytest.mark.parametrize(("world", "name"), CASES)
def test_trajectory(by, world, name):
    recording = Recording.load(name)
    ranks = [result[name] for result in replayed(by, world)]
    ours = {key: np.stack([rank[key] for rank in ranks], axis=1) for key in ranks[0]}
    if recording.config["effective"]["sgp"]:
        weights = recording.arrays["ps_weight"]
        np.testing.assert_allclose(ours["ps_weight"], weights, rtol=0, atol=1e-6)
        for key in [key for key in ours if key.startswith("params_")]:
            # Recorded are numerators, ours are estimates.
            ours[key] = ours[key] * weights.reshape(*weights.shape, *[1] * (ours[key].ndim - 2))
    compared = [k for k in recording.arrays if k.startswith(("params", "forward", "buffer", "fp"))]
    assert len(compared) >= len(recording.config["shapes"])
    for key in compared:
        theirs = recording.arrays[key]
        np.testing.assert_allclose(ours[key], theirs, **tolerance(recording), err_msg=key)
