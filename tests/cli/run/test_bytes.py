"""Bytes of steps whose events no kind holds together."""

import pytest

from jaxslowmo.cli.run._recorder import ByteLedger
from support.pairs import two_processes


def test_bytes_of_events_that_no_kind_holds_together_add_up():
    ledger = ByteLedger({"local": 1, "average": 11, "slow": 101})
    assert [ledger.add(p) for p in ((), ("average",), ("average", "slow"))] == [1, 12, 123]
    assert ByteLedger({"every": 5}).add(()) == 5
    gossip = ByteLedger({"local": 1, "round 0": 11, "round 1": 21})
    assert [gossip.add(p) for p in (("round 0",), ("any round",))] == [11, 32]
    joined = ByteLedger({"local": 0, "average": 10, "slow": 100, "average+slow": 105})
    assert joined.add(("slow", "average")) == 105


# Each process has one of the two devices of both replicas: two of the four parts of a batch.
SHARED = """
import numpy as np
import optax
import jaxslowmo as js
from jaxslowmo.cli.run._recorder import ByteLedger

devices = sorted(jax.devices(), key=lambda d: d.id)
mesh = jax.sharding.Mesh(np.array([[devices[i] for i in row] for row in ((0, 2), (1, 3))]),
    ("replica", "device"))
step = js.make_train_step(lambda p, b: ((b @ p["w"]) ** 2).mean(), optax.sgd(0.1),
    sync=js.local_sgd("replica", sync_every=2), mesh=mesh, mode="host")
state = step.init({"w": np.ones(3, np.float32)})
print(ByteLedger.of_step(step, state, np.ones((2, 3), np.float32)).by_kind)
"""


@pytest.mark.usefixtures("quick_processes")
def test_processes_that_share_replicas_count_from_their_part_of_a_batch(tmp_path):
    """One row for each of two parts here, where the whole batch has four."""
    first, second = (x.splitlines()[-1] for x in two_processes(SHARED, tmp_path, devices=2))
    assert first == second
    assert first.startswith("{'local': 0, 'average': ")
