"""LocalSGD and nested groups: which group is due, and whose mean it takes."""

import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support.golden_ddp import over_ranks

AXES = {"node": 2, "device": 2}
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


def test_each_group_takes_its_mean():
    tx = js.hierarchical_local_sgd({"device": 2, EVERYONE: 6})
    start = np.float32([1, 2, 3, 10])

    def run(x):
        state, seen = tx.init(x), []
        for _ in range(6):
            updates, state = tx.update(jnp.zeros_like(x), state, x)
            x = optax.apply_updates(x, updates)
            seen.append(x)
        return jnp.stack(seen)

    seen = np.asarray(over_ranks(run, AXES, "shard_map")(start))
    pairs, mean = np.float32([1.5, 1.5, 6.5, 6.5]), np.full(4, 4, np.float32)
    np.testing.assert_array_equal(seen.T, [start, pairs, pairs, pairs, pairs, mean])
