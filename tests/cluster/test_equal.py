"""Training is the same however the replicas are spread over processes and devices.

And what the interfaces of the hosts send is what the algorithms need to send. The counters of the
interfaces include TCP's headers and acknowledgements. The kernel hands an interface up to 64 KiB at
a time (segmentation offload), so they are a fraction of a percent here; a network that cuts them
into packets of 1500 bytes adds 4 to 5 % for every algorithm alike.
"""

import json
from pathlib import Path

import numpy as np
from faults.stand import Stand

PROGRAM = Path(__file__).parent / "programs" / "train.py"
REPLICAS, STEPS = 4, 12
LATE = ("local_sgd, delayed", "diloco, in fragments")
NAMES = ("all_reduce", "slowmo over sgp", "slowmo", "diloco", *LATE)
# processes and devices of each
SPREADS = {"4 x 1": (4, 1), "2 x 2": (2, 2), "vmap": (1, 0)}
SIZE = 4 * 2**20
# Every host sends its share of all but its own part, twice: to be summed, and as a sum.
ALL_REDUCE = 2 * (REPLICAS - 1) / REPLICAS * SIZE
LEAST = {
    "all_reduce": ALL_REDUCE,
    "sgp": SIZE,  # one peer per step, and push-sum weights that stay 1 are not sent
    "slowmo": ALL_REDUCE,  # a reduce-scatter and an all-gather
    "diloco": ALL_REDUCE,
    "int8": ALL_REDUCE / 4 * (1 + 4 / 256),  # codes, and a float32 scale per 256 of them
}


def test_losses_parameters_and_bytes(four_hosts, programs, tmp_path):
    """The processes meet once in 12 local updates, and tell the coordinator that they live.

    Batches of NumPy arrays, 2 MiB on every host, stay where they are. (`jax.device_put` would
    gather them in every step, to see that the hosts agree.)
    """
    trained, sent = {}, []
    for spread, (processes, devices) in SPREADS.items():
        folder = tmp_path / spread
        files = [tmp_path / f"{spread}.{rank}.npz" for rank in range(processes)]
        with Stand(folder, programs, hosts=four_hosts) as stand:
            run = stand.run(*((PROGRAM, r, processes, devices, f) for r, f in enumerate(files)))
            run.ends(0)
            local = max(devices, 1)
            for rank in range(processes):  # gloo prints before it
                *_, facts, last = ["", *run.out(rank).splitlines()]
                assert last == f"devices {local} of {local * processes}"
                sent += [json.loads(facts)] if processes == REPLICAS else []
        parts = [dict(np.load(file)) for file in files]
        trained[spread] = {name: array for part in parts for name, array in part.items()}
        assert len(trained[spread]) == sum(map(len, parts)) == len(NAMES) * REPLICAS * 3
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
    for host in sent:
        for name, least in LEAST.items():
            assert least <= host[name] <= 1.03 * least, (name, host[name] / least)
        local = {name: amount for name, amount in host.items() if name not in LEAST}
        assert len(local) == 3
        assert max(local.values()) < 20_000, local
