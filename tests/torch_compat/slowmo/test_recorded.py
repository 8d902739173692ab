"""Every adopted recorded run of FairScale, with 2, 4, 5 and 8 processes."""

import numpy as np
import pytest
from slowmo_recorded import FOLDER, HERE, Recording, names, replay_all
from slowmo_spawned import spawned

WORLDS = (2, 4, 5, 8)


def tolerance(recording: Recording) -> dict[str, float]:
    if not recording.is_half:
        return {"rtol": 1e-5, "atol": 2e-5}
    # FairScale rounds the sum, up to 8 here, before it halves it; we mix in float32.
    return {"rtol": 0, "atol": 5e-3 if recording.config["effective"]["sgp"] else 2.5e-2}


def test_all_files_are_here():
    files = [*FOLDER.glob("*.npz"), *HERE.glob("*.npz")]
    assert sum(len(names(world)) for world in WORLDS) == len(files) == 72 + 4


@pytest.mark.parametrize("world", WORLDS)
def test_trajectories(by, world):
    """All runs over gloo; over torch_xla, which compiles every one of them, some of each kind."""
    chosen = names(world) if by == "gloo" else names(world)[::5]
    results = spawned(world, replay_all, chosen, by=by)
    for name in chosen:
        recording, ranks = Recording.load(name), [result[name] for result in results]
        ours = {key: np.stack([rank[key] for rank in ranks], axis=1) for key in ranks[0]}
        if recording.config["effective"]["sgp"]:
            weights = recording.arrays["ps_weight"]
            np.testing.assert_allclose(ours["ps_weight"], weights, atol=1e-6, err_msg=name)
            for key in [key for key in ours if key.startswith("params_")]:
                # Recorded are numerators, ours are estimates.
                ours[key] = ours[key] * weights.reshape(*weights.shape, *[1] * (ours[key].ndim - 2))
        prefixes = ("params", "forward", "buffer", "fp")
        compared = {k: v for k, v in recording.arrays.items() if k.startswith(prefixes)}
        assert len(compared) >= len(recording.config["shapes"])
        for key, theirs in compared.items():
            where = f"{key} of {name}"
            np.testing.assert_allclose(ours[key], theirs, **tolerance(recording), err_msg=where)
