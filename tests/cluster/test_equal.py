"""Training is the same however the replicas are spread over processes and devices."""

from pathlib import Path

import numpy as np
import pytest
from faults.stand import Stand

PROGRAM = Path(__file__).parent / "programs" / "train.py"
REPLICAS, STEPS = 4, 12
LATE = ("local_sgd, delayed", "diloco, in fragments")
NAMES = ("all_reduce", "slowmo over sgp", "slowmo", "diloco", *LATE)
# processes and devices of each
SPREADS = {"4 x 1": (4, 1), "2 x 2": (2, 2), "vmap": (1, 0)}


@pytest.fixture(scope="module")
def trained(four_hosts, programs, tmp_path_factory):
    """Arrays by name, of all replicas, for every spread."""
    found = {}
    for spread, (processes, devices) in SPREADS.items():
        folder = tmp_path_factory.mktemp("train")
        files = [folder / f"{rank}.npz" for rank in range(processes)]
        with Stand(folder / "try", programs, hosts=four_hosts) as stand:
            run = stand.run(*((PROGRAM, r, processes, devices, f) for r, f in enumerate(files)))
            run.ends(0)
            local = max(devices, 1)
            for rank in range(processes):  # gloo prints before it
                last = run.out(rank).splitlines()[-1]
                assert last == f"devices {local} of {local * processes}"
        parts = [dict(np.load(file)) for file in files]
        found[spread] = {name: array for part in parts for name, array in part.items()}
        assert len(found[spread]) == sum(map(len, parts)) == len(NAMES) * REPLICAS * 3
    return found


def test_losses_and_parameters_are_those_of_vmap_for_each_of_different_algorithms(trained):
    for spread in ("4 x 1", "2 x 2"):
        for key, wanted in trained["vmap"].items():
            np.testing.assert_allclose(
                trained[spread][key], wanted, rtol=1e-6, atol=1e-6, err_msg=key
            )
    losses = {name: trained["vmap"][f"{name}/0/loss"] for name in NAMES}
    for i, name in enumerate(NAMES):
        assert losses[name].shape == (STEPS,)
        assert losses[name][-1] < 0.7 * losses[name][0]
        for other in NAMES[:i]:
            assert np.abs(losses[name] - losses[other]).max() > 1e-3, (name, other)
