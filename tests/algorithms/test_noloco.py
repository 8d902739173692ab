"""`js.noloco`: pairs that take turns, and recorded runs."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support import oracle
from support.executions import run
from support.golden_peers import cases, parameters

REPLICAS = 4
START = np.random.default_rng(0).normal(size=(REPLICAS, 5)).astype(np.float32)
matching = js.topology.random_matching


def sync(graph=None, **options):
    graph = matching(REPLICAS, seed=1) if graph is None else graph
    return js.noloco("replica", **{"sync_every": 3, "graph": graph, **options})


@pytest.mark.parametrize("scheduled", ["traced", "host"])
def test_a_skipped_step_repeats_its_pair(scheduled):
    """The sixth and the seventh update are paused; the seventh would not have been due."""
    graph, steps, paused = matching(REPLICAS, seed=2), 12, (6, 7)
    tx = sync(graph, sync_every=2)
    grads = np.random.default_rng(1).normal(size=(steps, REPLICAS, 5)).astype(np.float32)
    seen, state = run(
        optax.chain(optax.sgd(0.1), tx),
        START,
        grads,
        axes={"replica": REPLICAS},
        execution="vmap",
        sync=tx if scheduled == "host" else None,
        paused=paused,
        skipped=(6,),
    )
    matrices = [js.topology.mixing_matrix(graph, None, r) for r in range(graph.num_rounds)]
    pairs = oracle.Pairs(matrices, 2, 0.5, 0.7, 0.7)
    wanted = oracle.train(START, grads, learning_rate=lambda t: 0.1, other=pairs, paused=paused)
    np.testing.assert_allclose(seen, wanted, rtol=2e-6, atol=2e-6)
    assert state[-1].local["exchanges"].tolist() == [5] * REPLICAS


CASES = cases("noloco.npz")


@pytest.mark.parametrize(
    ("case", "sends_anchors"), [(case, bool(i % 2)) for i, case in enumerate(CASES)]
)
def test_recorded_runs(case, sends_anchors):
    """Their groups as a graph; a node sends to all others of its group, of two or of four."""
    meta, arrays = CASES[case]
    size, every = meta["group_size"], meta["local_steps"]
    # Of each rank, over all outer steps, the others of its group.
    others = [
        [int(peer) for group in groups[every - 1 :: every] for peer in group if peer != rank]
        for rank, groups in enumerate(arrays["group"])
    ]
    tx = js.noloco(
        "replica",
        sync_every=every,
        outer_learning_rate=meta["outer_lr"],
        outer_momentum=meta["outer_momentum"],
        pull=meta["outer_lr"] if sends_anchors else None,
        graph=js.topology.from_phone_book(others, size - 1),
    )
    init = parameters(arrays, "init")
    seen, _ = run(
        optax.chain(optax.adam(meta["lr"]), tx),
        {name: np.tile(x, (meta["world"], *[1] * x.ndim)) for name, x in init.items()},
        {name: x.swapaxes(0, 1) for name, x in parameters(arrays, "G").items()},
        axes={"replica": meta["world"]},
        execution="vmap",
        record=lambda params, state: {"param": params, **state[-1].local},
    )
    for key, wanted in {"param": "param", "anchor": "outer", "velocity": "momentum"}.items():
        for name, x in parameters(arrays, wanted).items():
            found = np.stack([step[key][name] for step in seen], 1)
            np.testing.assert_allclose(found, x, atol=2e-6, err_msg=f"{key} {name}")


def test_statistics_are_means_of_pairs():
    tx = sync(sync_every=1)

    def one(x):
        zeros = jax.numpy.zeros_like(x)
        return tx.exchange(zeros, [x], tx.init(x), x, phase=("round 1",))[1][0]

    found = jax.vmap(one, axis_name="replica")(START)
    pair = js.topology.mixing_matrix(matching(REPLICAS, seed=1), None, 1)
    np.testing.assert_allclose(found, pair @ START, rtol=1e-6)
