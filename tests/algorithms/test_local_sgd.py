"""Tests of LocalSGD: averages worked by hand, nested groups, what is sent, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support.golden_ddp import over_ranks

AXES = {"node": 2, "device": 2}
EVERYONE = ("node", "device")
PERIODS = {"device": 2, EVERYONE: 6}


def test_two_replicas_average_in_every_second_update():
    """Replicas start at 0 and 2, move by 1 and 3 per update, and average at updates 2 and 4."""
    tx = js.local_sgd("replica", sync_every=2)

    def one(w, move):
        state, seen = tx.init(w), []
        for _ in range(4):
            update, state = tx.update(move, state, w)
            w = w + update
            seen.append(w)
        return jnp.stack(seen)

    seen = jax.vmap(one, axis_name="replica")(jnp.asarray([0.0, 2.0]), jnp.asarray([1.0, 3.0]))
    np.testing.assert_allclose(seen, [[1, 5, 6, 9], [5, 5, 8, 9]])
    assert [tx.phase(t) for t in (1, 2, 3, 4)] == [(), ("average",)] * 2


# Nested groups


def test_the_largest_due_group_averages():
    tx = js.hierarchical_local_sgd(PERIODS)
    assert [tx.phase(t) for t in range(1, 7)] == [
        (),
        ("average device",),
        (),
        ("average device",),
        (),
        ("average node,device",),
    ]
    assert tx.phases() == [(), ("average device",), ("average node,device",)]
    assert [bool(tx.due(t)) for t in range(1, 7)] == [t % 2 == 0 for t in range(1, 7)]


@pytest.mark.parametrize("execution", ["vmap", "shard_map"])
@pytest.mark.parametrize("scheduled", ["traced", "host"])
def test_each_group_takes_its_mean(execution, scheduled):
    tx = js.hierarchical_local_sgd(PERIODS)
    start = np.float32([1, 2, 3, 10])

    def run(x):
        state, seen = tx.init(x), []
        for t in range(1, 7):
            phase = tx.phase(t) if scheduled == "host" else None
            updates, state = tx.update(jnp.zeros_like(x), state, x, phase=phase)
            x = optax.apply_updates(x, updates)
            seen.append(x)
        return jnp.stack(seen)

    seen = np.asarray(over_ranks(run, AXES, execution)(start))
    pairs, mean = np.float32([1.5, 1.5, 6.5, 6.5]), np.full(4, 4, np.float32)
    np.testing.assert_array_equal(seen.T, [start, pairs, pairs, pairs, pairs, mean])


@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 5), st.integers(0, 5))
def test_phases_follow_the_schedules(k, factor, start, offset):
    small = js.every(k, start=start, offset=offset)
    large = js.every(k * factor, start=start, offset=offset)
    tx = js.hierarchical_local_sgd({EVERYONE: large, "device": small})
    for t in range(1, 40):
        wanted = "average node,device" if large(t) else "average device" if small(t) else None
        assert tx.phase(t) == (() if wanted is None else (wanted,))


def test_each_phase_sends_one_all_reduce_over_its_group():
    step = js.make_train_step(
        lambda p, batch: jnp.mean((batch @ p["w"]) ** 2),
        optax.sgd(0.1),
        sync=js.hierarchical_local_sgd(PERIODS),
        mesh=js.make_mesh(AXES),
        axis_name=EVERYONE,
        mode="host",
    )
    state = jax.eval_shape(step.init, {"w": jax.ShapeDtypeStruct((5,), jnp.float32)})
    report = js.comm_report(step, state, jax.ShapeDtypeStruct((8, 5), jnp.float32))
    collectives = {
        (row.kind, row.axis, row.collective, row.count, row.bytes)
        for row in report.select(level="emitted")
        if row.count
    }
    assert collectives == {
        ("average device", "device", "all-reduce", 1, 20),
        ("average node,device", "node,device", "all-reduce", 1, 20),
    }


@pytest.mark.parametrize(
    ("sync_every", "message"),
    [
        ({}, r"must map the axes of each group to a period.* got \{\}"),
        (4, "must map the axes .* got 4"),
        ({"device": 0}, "must be an int >= 1, got 0"),
        ({"device": 4, EVERYONE: 4}, "longer for the larger group, got 4 for 'device' and 4"),
        ({"device": 2, "node": 4}, "nested groups.* got 'device' and 'node'"),
        ({"device": 2, ("node", "slice"): 4}, "nested groups"),
        ({("node", "node"): 4}, "names an axis twice"),
    ],
)
def test_groups_that_do_not_nest_and_bad_periods_are_refused(sync_every, message):
    with pytest.raises(ValueError, match=message):
        js.hierarchical_local_sgd(sync_every)


def test_a_phase_of_another_transform_is_refused():
    tx = js.hierarchical_local_sgd({"replica": 2})
    step = lambda x: tx.update(x, tx.init(x), x, phase=("slow",))[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"`phase` must come from .*average replica.* got"):
        jax.eval_shape(jax.vmap(step, axis_name="replica"), jnp.ones(4))
