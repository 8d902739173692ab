"""`js.only_finite`: equal to the transform inside, until a replica is no longer finite."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.promotion import apply_updates

AXES = {"replica": 4}
VIRTUAL = js.virtual_mesh(AXES)
EVERYONE = ("node", "device")
GRID = {"node": 2, "device": 2}


def local(axis="replica", every=2):
    return js.local_sgd(axis, sync_every=every)


def trained(sync, mesh=VIRTUAL, mode="traced", steps=8, **options):
    step = js.make_train_step(
        lambda params, batch: (params["w"][None] * batch).sum(), optax.sgd(0.1), sync=sync,
        mesh=mesh, mode=mode, donate=False, **options,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)})
    random = np.random.default_rng(0)
    for _ in range(steps):
        state, _ = step(state, random.normal(size=(4, 3)).astype(np.float32))
    return step, state


def poisoned(replica):
    """Return a batch that is NaN on one replica, and so are its gradients."""
    batch = np.zeros((4, 3), np.float32)
    batch[replica] = np.nan
    return batch


def diverged(state):
    """Return which replicas hold NaN."""
    return np.flatnonzero(np.isnan(state.params["w"]).any(1)).tolist()


SLOW = js.slowmo("replica", base=js.sgp("replica"), sync_every=4)


@pytest.mark.parametrize(
    ("inner", "mesh", "mode", "refused"),
    [
        (js.diloco("replica", sync_every=2), js.make_mesh(AXES), "host", (0, 1)),
        (SLOW, VIRTUAL, "traced", (1, 2)),
    ],
)
def test_it_trains_as_what_is_inside_and_then_keeps_the_others_finite(inner, mesh, mode, refused):
    """Refused are so many exchanges after one and after two more updates than eight."""
    step, state = trained(js.only_finite(inner), mesh, mode)
    _, plain = trained(inner, mesh, mode)
    # Another program may round differently.
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    assert not np.any(state.exchange.local["refused"])
    for number in refused:
        state, _ = step(state, poisoned(2))
        assert np.asarray(state.exchange.local["refused"]).tolist() == [number] * 4
        assert diverged(state) == [2]


def test_all_axes_of_the_inner_transform_are_asked():
    """A NaN on one device: with a narrower question some would exchange and others not."""
    sync = js.only_finite(js.hierarchical_local_sgd({"device": 2, EVERYONE: 4}))
    assert sync.algorithm.axes == EVERYONE
    step, state = trained(sync, js.make_mesh(GRID), steps=0, axis_name=EVERYONE)
    for t in range(1, 5):
        state, _ = step(state, poisoned(1))
        assert np.asarray(state.exchange.local["refused"]).tolist() == [t // 2] * 4
        assert diverged(state) == [1]


def test_rounds_of_gossip_follow_what_was_refused():
    """On the host, too, an exchange that is refused does not rotate the graph."""
    graph, runs = js.topology.directed_exponential(4), {}
    for mode in ("traced", "host"):
        step, state = trained(js.only_finite(js.sgp("replica", graph=graph)), mode=mode, steps=3)
        healthy = state.params
        state, _ = step(state, poisoned(2))  # refused
        state = state._replace(params=healthy)  # recovered, by hand
        for batch in np.random.default_rng(1).normal(size=(3, 4, 3)):
            state, _ = step(state, np.float32(batch))
        assert np.asarray(state.exchange.local["base"].exchanges).tolist() == [6] * 4
        runs[mode] = np.asarray(state.params["w"])
    np.testing.assert_allclose(runs["traced"], runs["host"], rtol=1e-6)
    assert step.sync.phases() == [("round",)]


def test_a_program_that_sends_in_every_update_counts_what_is_due():
    """Not also what it sends in vain where it takes anew."""
    sync, counts = js.only_finite(js.diloco("replica", sync_every=3, delay=2)), []
    for mode in ("traced", "host"):
        step, state = trained(sync, mode=mode, steps=0)
        for _ in range(4):
            state, _ = step(state, poisoned(2))
        counts.append(np.asarray(state.exchange.local["refused"]).tolist())
    assert counts == [[5] * 4] * 2  # the third both sends and applies


def test_what_travels_is_asked_about():
    """60000 + 9000 is finite in float32 and no float16."""
    tx = js.only_finite(local(every=1))

    def one(p, u):
        updates, state = tx.update(u, tx.init(p), p)
        return apply_updates(p, updates), state.local["refused"]

    params = np.full((4, 1), 60000, np.float16)
    updates = np.float32([[0], [9000], [0], [0]])
    moved, refused = jax.jit(jax.vmap(one, axis_name="replica"))(params, updates)
    assert np.isinf(moved).ravel().tolist() == [False, True, False, False]
    assert refused.tolist() == [1] * 4
