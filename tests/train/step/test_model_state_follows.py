"""Model state follows the exchange of the parameters: its axes, its weights, its rounds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

KINDS = {"mesh": js.make_mesh, "virtual": js.virtual_mesh}
STATISTICS = {"mean": np.zeros(3, np.float32), "n": np.int32(0)}


def loss(params, batch, *, model_state):
    new = {"mean": batch.mean(0), "n": model_state["n"] + 1}
    return jnp.sum(params["w"] * batch.mean(0)), ({}, new)


def stepped(sync, kind="virtual", axes=None, batches=(), weight=None, gradients=None, **options):
    step = js.make_train_step(
        loss, optax.sgd(0.1), sync=sync, gradients=gradients,
        mesh=KINDS[kind](axes or {"replica": 4}), donate=False, **options,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)}, model_state=STATISTICS)
    seen = []
    for batch in batches:
        state, _ = step(state, batch, weight)
        seen.append(np.asarray(state.model_state["mean"]))
    return step, state, seen


def rows(*values):
    """A batch of one example per replica, all of whose features are its value."""
    return np.repeat(np.float32(values)[:, None], 3, axis=1)


WEIGHED = {
    "local_sgd": {"sync": lambda: js.local_sgd("replica", sync_every=1)},
    "hierarchical": {"sync": lambda: js.hierarchical_local_sgd({"replica": 1})},
    "slowmo": {"sync": lambda: js.slowmo("replica", base=js.local_sgd("replica"), sync_every=1)},
    "diloco": {"sync": lambda: js.diloco("replica", sync_every=1)},
    "only_finite": {"sync": lambda: js.only_finite(js.local_sgd("replica", sync_every=1))},
    "all_reduce": {
        "sync": lambda: None,
        "gradients": lambda: js.all_reduce_gradients("replica"),
    },
}


@pytest.mark.filterwarnings("ignore:slowmo. `sync_every`=1 is not a multiple")
@pytest.mark.parametrize(
    ("kind", "name"),
    sweep(
        itertools.product(KINDS, WEIGHED),
        lambda kind, name: (kind == "mesh") == (name in ("local_sgd", "slowmo")),
    ),
)
def test_means_are_weighted(name, kind):
    """Values 1, 2, 3 of equal weight and one replica without data: 2, not 1.5."""
    parts = {key: make() for key, make in WEIGHED[name].items()}
    for weight, mean in (([1, 1, 1, 0], 2.0), ([3, 1, 0, 0], 1.25), (None, 2.5)):
        weight = None if weight is None else np.float32(weight)
        _, _, (found,) = stepped(**parts, kind=kind, batches=[rows(1, 2, 3, 4)], weight=weight)
        np.testing.assert_allclose(found, np.full((4, 3), mean), rtol=1e-6)


def test_without_any_data_it_stays():
    sync = js.local_sgd("replica", sync_every=1)
    batch = rows(1, 2, np.nan, 4)
    _, _, (found,) = stepped(sync, batches=[batch], weight=np.zeros(4, np.float32))
    np.testing.assert_array_equal(found, np.zeros((4, 3)))


def sent(step, state):
    report = js.comm_report(step, state, jax.ShapeDtypeStruct((4, 3), jnp.float32))
    return {
        (row.kind, row.axis, row.collective): (row.count, row.bytes)
        for row in report.select(level="emitted")
        if row.count
    }


def test_a_device_average_stays_on_the_devices():
    """Statistics and parameters, 12 bytes each, over the axes of the group that is due."""
    everyone = ("node", "device")
    step, state, seen = stepped(
        js.hierarchical_local_sgd({"device": 1, everyone: 2}),
        kind="mesh",
        axes={"node": 2, "device": 2},
        axis_name=everyone,
        mode="host",
        batches=[rows(1, 2, 3, 6)] * 2,
    )
    np.testing.assert_allclose(seen[0][:, 0], [1.5, 1.5, 4.5, 4.5])
    np.testing.assert_allclose(seen[1][:, 0], [3, 3, 3, 3])
    assert sent(step, state) == {
        ("average device", "device", "all-reduce"): (2, 24),
        ("average node,device", "node,device", "all-reduce"): (2, 24),
    }


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_gossip_sends_it_to_the_same_peers(overlap):
    """No all-reduce in any step; statistics go with the parameters, and are mixed at once."""
    graph = js.topology.directed_exponential(4)
    step, state, seen = stepped(
        js.sgp("replica", graph=graph, overlap=overlap),
        kind="mesh",
        mode="host",
        batches=[rows(1, 2, 3, 6)] * 3,
    )
    report = sent(step, state)
    assert {collective for _, _, collective in report} == {"collective-permute"}
    # With late arrivals, push-sum weights move, alike on all nodes of this graph.
    assert set(report.values()) == {(2, 24)}
    start = np.float64([1, 2, 3, 6])
    for t, found in enumerate(seen):
        expected = start / 2
        for node, (peer,) in enumerate(graph.out_peers(t)):
            expected[peer] += start[node] / 2
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)


def test_gossip_over_an_irregular_graph_keeps_the_weighted_sum():
    """The sum of push-sum weight times statistics is kept, as of the parameters."""

    def carried(params, batch, *, model_state):
        return 0.0 * params["w"].sum(), ({}, model_state)

    step = js.make_train_step(
        carried, optax.sgd(0.1), sync=js.sgp("replica", graph=js.topology.star(4)),
        mesh=js.virtual_mesh({"replica": 4}), donate=False,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)}, model_state=np.ones(3, np.float32))
    start = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    state = state._replace(model_state=jnp.asarray(start))
    for _ in range(40):
        state, _ = step(state, rows(0, 0, 0, 0))
        weights = np.asarray(state.opt_state[-1].weight)[:, None]
        kept = (weights * np.asarray(state.model_state)).sum(0)
        np.testing.assert_allclose(kept, start.sum(0), atol=1e-5)
    np.testing.assert_allclose(state.model_state, np.broadcast_to(start.mean(0), (4, 3)), atol=1e-4)


def test_a_local_step_of_slowmo_sends_nothing():
    base = js.local_sgd("replica", sync_every=2)
    step, state, seen = stepped(
        js.slowmo("replica", base=base, sync_every=4),
        kind="mesh",
        mode="host",
        batches=[rows(1, 2, 3, 6)] * 4,
    )
    assert {kind for kind, _, _ in sent(step, state)} == {"average", "slow"}
    assert [np.ptp(x) for x in seen] == [5, 0, 5, 0]


def test_transforms_of_ones_own():
    """One that knows of no other arrays is refused with them, and taken without."""
    plain = js.local_sgd("replica", sync_every=1)
    own = js.ParameterTransform(
        plain.init, plain.update, phase=plain.phase, due=plain.due, schedules=plain.schedules
    )
    with pytest.raises(
        ValueError, match=r'ParameterTransform of your own needs an `exchange`.*"local"'
    ):
        stepped(own, batches=[rows(1, 2, 3, 6)])
    _, state, seen = stepped(own, batches=[rows(1, 2, 3, 6)], model_state="local")
    assert np.ptp(seen[0]) == 5
    assert np.ptp(state.params["w"][:, 0]) < 1e-6
