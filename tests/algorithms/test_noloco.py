"""`js.noloco`: pairs that take turns, replicas that stay together, recorded runs, refusals."""

import functools

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.integers(1, 5), st.integers(0, 3), st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_a_round_is_counted_where_it_takes_place(k, start, paused, t):
    """Not in updates that are not due, nor in those that are skipped, however they are counted."""
    schedule = js.every(k, start=start)
    tx = sync(sync_every=schedule)
    rounds = matching(REPLICAS, seed=1).num_rounds
    exchanges = sum(bool(schedule(i)) and i not in paused for i in range(1, t))
    local = {"exchanges": np.int32(exchanges)}
    skipped = tx.algorithm.skip_count(local, t - 1)
    assert skipped == sum(bool(schedule(i)) for i in paused if i < t)
    wanted = (f"round {exchanges % rounds}",) if schedule(t) else ()
    assert tx.algorithm.phase(t, skipped) == wanted
    assert {*tx.phases()} == {tx.phase(i) for i in range(1, start + k * rounds + 1)}


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


def test_replicas_come_together_and_their_mean_moves_by_their_progress():
    """The pull changes no sum over replicas: without updates the mean stays where it was."""
    seen, _ = run(
        sync(sync_every=1),
        START,
        np.zeros((60, REPLICAS, 5), np.float32),
        axes={"replica": REPLICAS},
        execution="vmap",
    )
    assert np.ptp(seen[-1], axis=0).max() < 1e-3 < np.ptp(START, axis=0).max()
    np.testing.assert_allclose(np.mean(seen, 1), np.tile(START.mean(0), (60, 1)), atol=1e-5)


CASES = cases("noloco.npz")


@pytest.mark.parametrize("sends_anchors", [False, True])
@pytest.mark.parametrize("case", CASES)
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


def test_the_pairs_are_random_by_default_and_its_anchor_can_be_read():
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(
        lambda x, batch: (x * batch[0]).mean(), optax.sgd(0.1),
        sync=js.noloco("replica", sync_every=2), mesh=mesh, mode="host",
    )  # fmt: skip
    state = step.init(START[0])
    batches = np.random.default_rng(0).normal(size=(2, REPLICAS, 5)).astype(np.float32)
    for batch in batches:
        state, _ = step(state, batch)
    assert [p for p in step.sync.phases() if p] == [(f"round {i}",) for i in range(4)]
    read = js.read_anchor(step.sync, state.exchange, state.params, mesh=mesh)
    np.testing.assert_array_equal(read, state.params)
    assert np.ptp(read, axis=0).any()


BAD = {
    "`outer_momentum` must be a number in": {"outer_momentum": 1.0},
    "`outer_learning_rate` must be a finite number": {"outer_learning_rate": "x"},
    "`pull` must": {"pull": -0.1},
    "`sync_every` counts updates": {"sync_every": 0},
    "`graph` must be a js.topology.Graph": {"graph": 3},
    "parameters themselves are sent": {"codec": js.codecs.int8()},
    "`axis_name` must be": {"axis_name": ""},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused_at_construction(message):
    with pytest.raises(ValueError, match=message):
        js.noloco(**{"axis_name": "replica", **BAD[message]})


@pytest.mark.parametrize(
    ("replicas", "graph", "message"),
    [
        (3, None, "`num_nodes` must be even"),
        (4, matching(6), "as many nodes as axis 'replica', which has size 4"),
        (4, lambda num_nodes: num_nodes, "must be a function that makes a js.topology.Graph"),
        (4, js.topology.star, "noloco.*push-sum|doubly stochastic"),
    ],
)
def test_what_is_refused_when_the_number_of_replicas_is_known(replicas, graph, message):
    tx = js.noloco("replica", graph=graph)
    with pytest.raises(ValueError, match=message):
        tx.bound({"replica": replicas})


def test_phases_wait_for_the_number_of_replicas():
    tx = js.noloco("replica", graph=functools.partial(matching, seed=5))
    with pytest.raises(ValueError, match="noloco: `graph` is chosen when the number"):
        tx.phases()
    assert len(tx.bound({"replica": 8}).phases()) == 1 + matching(8, seed=5).num_rounds


def test_slow_momentum_over_it_is_refused():
    with pytest.raises(ValueError, match="`base` must have no slow step of its own"):
        js.slowmo("replica", base=sync(), sync_every=6)
