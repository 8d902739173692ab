"""What the interfaces of the hosts send is what the algorithms need to send.

The counters of the interfaces include TCP's headers and acknowledgements. The kernel hands an
interface up to 64 KiB at a time (segmentation offload), so they are a fraction of a percent here; a
network that cuts them into packets of 1500 bytes adds 4 to 5 % for every algorithm alike.
"""

import json
import sys
from pathlib import Path

import pytest
from processes import run
from small_runs import QUICK_COMPILER

PROGRAM = Path(__file__).parent / "programs" / "sent.py"
HOSTS = 4
ELEMENTS = 2**20
SIZE = 4 * ELEMENTS
# Every host sends its share of all but its own part, twice: to be summed, and as a sum.
ALL_REDUCE = 2 * (HOSTS - 1) / HOSTS * SIZE
LEAST = {
    "all_reduce": ALL_REDUCE,
    "local_sgd": ALL_REDUCE,
    "sgp": SIZE,  # one peer per step, and push-sum weights that stay 1 are not sent
    "overlapped sgp": SIZE,
    "slowmo": ALL_REDUCE,  # a reduce-scatter and an all-gather
    "diloco": ALL_REDUCE,
    "int8": ALL_REDUCE / 4 * (1 + 4 / 256),  # codes, and a float32 scale per 256 of them
}


@pytest.fixture(scope="module")
def sent(four_hosts, tmp_path_factory):
    """Bytes of every host, by algorithm."""
    commands = [[sys.executable, str(PROGRAM), str(rank), str(HOSTS)] for rank in range(HOSTS)]
    folder = tmp_path_factory.mktemp("sent")
    printed = run(four_hosts, commands, folder, seconds=600, env=QUICK_COMPILER)
    return [json.loads(text.splitlines()[-1]) for text in printed]  # gloo prints before it


@pytest.mark.parametrize("name", LEAST)
def test_a_synchronisation_sends_little_more_than_it_must(sent, name):
    for host in sent:
        assert LEAST[name] <= host[name] <= 1.03 * LEAST[name], host[name] / LEAST[name]


@pytest.mark.parametrize(
    "name",
    [
        "local steps",
        "local steps, traced",
        "batches, local_sgd",
        "batches, slowmo",
        "batches, global",
    ],
)
def test_local_steps_send_almost_nothing(sent, name):
    """Of 12 updates: the processes meet once, and tell the coordinator that they live.

    Batches of NumPy arrays, 2 MiB on every host, stay where they are. (`jax.device_put` would
    gather them in every step, to see that the hosts agree.)
    """
    for host in sent:
        assert host[name] < 20_000
