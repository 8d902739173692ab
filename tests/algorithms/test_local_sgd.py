"""LocalSGD and nested groups: which group is due, and whose mean it takes."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js

EVERYONE = ("node", "device")


def test_phases_and_the_period_by_default():
    tx = js.local_sgd("replica", sync_every=2)
    assert [tx.phase(t) for t in (1, 2, 3, 4)] == [(), ("average",)] * 2
    assert [t for t in range(1, 8) if js.local_sgd("replica").due(t)] == [3, 6]


# Nested groups


@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 5), st.integers(0, 5))
def test_the_largest_due_group_averages(k, factor, start, offset):
    small = js.every(k, start=start, offset=offset)
    large = js.every(k * factor, start=start, offset=offset)
    tx = js.hierarchical_local_sgd({EVERYONE: large, "device": small})
    counts = np.arange(1, 40, dtype=np.int32)
    for t in map(int, counts):
        wanted = "average node,device" if large(t) else "average device" if small(t) else None
        assert tx.phase(t) == (() if wanted is None else (wanted,))
        assert tx.due(t) == (wanted is not None)
    assert tx.due(jnp.asarray(counts)).tolist() == [bool(tx.phase(int(t))) for t in counts]
