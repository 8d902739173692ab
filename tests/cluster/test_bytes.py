"""What the interfaces of the hosts send is what the algorithms need to send.

The counters of the interfaces include TCP's headers and acknowledgements. The kernel hands an
interface up to 64 KiB at a time (segmentation offload), so they are a fraction of a percent here; a
network that cuts them into packets of 1500 bytes adds 4 to 5 % for every algorithm alike.
"""

import json
from pathlib import Path

import pytest
from faults.stand import Stand

PROGRAM = Path(__file__).parent / "programs" / "sent.py"
HOSTS = 4
SIZE = 4 * 2**20
# Every host sends its share of all but its own part, twice: to be summed, and as a sum.
ALL_REDUCE = 2 * (HOSTS - 1) / HOSTS * SIZE
LEAST = {
    "all_reduce": ALL_REDUCE,
    "sgp": SIZE,  # one peer per step, and push-sum weights that stay 1 are not sent
    "slowmo": ALL_REDUCE,  # a reduce-scatter and an all-gather
    "diloco": ALL_REDUCE,
    "int8": ALL_REDUCE / 4 * (1 + 4 / 256),  # codes, and a float32 scale per 256 of them
}


@pytest.fixture(scope="module")
def sent(four_hosts, programs, tmp_path_factory):
    """Bytes of every host, by algorithm."""
    with Stand(tmp_path_factory.mktemp("sent") / "try", programs, hosts=four_hosts) as stand:
        run = stand.run(*((PROGRAM, rank, HOSTS) for rank in range(HOSTS)))
        run.ends(0)
        # gloo prints before it.
        return [json.loads(run.out(rank).splitlines()[-1]) for rank in range(HOSTS)]


def test_a_synchronisation_sends_little_more_than_it_must(sent):
    for host in sent:
        for name, least in LEAST.items():
            assert least <= host[name] <= 1.03 * least, (name, host[name] / least)


def test_local_steps_send_almost_nothing(sent):
    """Of 12 updates: the processes meet once, and tell the coordinator that they live.

    Batches of NumPy arrays, 2 MiB on every host, stay where they are. (`jax.device_put` would
    gather them in every step, to see that the hosts agree.)
    """
    for host in sent:
        local = {name: amount for name, amount in host.items() if name not in LEAST}
        assert len(local) == 3
        assert max(local.values()) < 20_000, local
