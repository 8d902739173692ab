"""Another number of replicas: what is averaged, what is kept, and that it is said."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, SYNCS, batch, make_step, on_host
from jaxslowmo.algorithms.outer._anchor import ShardedAnchor
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.transform import Exchange, StatePlacement
from support.exhaustive import sweep

KINDS = ("slowmo over sgp", "own anchors", "all_reduce")


def trained(step, replicas: int, updates: int):
    state = step.init(PARAMS, model_state=MODEL_STATE)
    for t in range(updates):
        state, _ = step(state, batch(t, replicas))
    return state


def consensus(state: js.TrainState) -> dict[str, np.ndarray]:
    """Sum of all mass over the sum of all weights, in float64."""
    params, sync = state.params, state.opt_state[-1]
    gossip = getattr(sync, "base", sync)
    terms = [(np.ones(len(state.step)), params)]
    if isinstance(gossip, js.SGPState):
        terms = [(gossip.weight, params), *((a.weight, a.mean) for a in gossip.in_flight)]
    total = sum(np.sum(w, dtype=np.float64) for w, _ in terms)
    return {
        name: sum(np.tensordot(np.float64(w), np.float64(x[name]), 1) for w, x in terms) / total
        for name in params
    }


def anchor(step, state):
    read = js.read_anchor(step.sync, state.opt_state[-1], state.params, mesh=step.mesh)
    return on_host(read)


def momentum(state: js.TrainState):
    replicas = len(state.step)
    at = StatePlacement(replicas, {"replica": replicas})
    shards = on_host(state.opt_state[-1].outer.velocity)
    return ShardedAnchor(Exchange("replica")).join(shards, PARAMS, at)


@pytest.mark.parametrize("name", sweep(KINDS, lambda name: name != "all_reduce"))
def test_4_to_3_to_8(name, tmp_path):
    old_step = make_step(name, js.virtual_mesh({"replica": 4}), mode="traced")
    state = trained(old_step, 4, 6)
    for replicas in (3, 8):
        step = make_step(name, js.virtual_mesh({"replica": replicas}), mode="traced")
        folder = tmp_path / str(replicas)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(6, state, wait=True)
            found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, seed=replicas)
        assert not found.is_exact
        old, new = on_host(state), on_host(found.state)
        for leaf, mean in consensus(old).items():
            assert (new.params[leaf] == new.params[leaf][0]).all()
            rounding = 2e-2 if leaf == "b" else 1e-6  # bfloat16, float32
            np.testing.assert_allclose(
                new.params[leaf][0].astype(np.float64), mean, rtol=rounding, atol=1e-6
            )
        for a, b in zip(
            jax.tree.leaves((old.opt_state[:2], old.model_state)),
            jax.tree.leaves((new.opt_state[:2], new.model_state)),
            strict=True,
        ):
            assert len(b) == replicas
            mean, rounding = a.astype(np.float64).mean(0), 1e-2 if a.itemsize == 2 else 1e-6
            np.testing.assert_allclose(b[-1].astype(np.float64), mean, rtol=rounding, atol=1e-7)
        assert new.step.tolist() == [6] * replicas
        assert len({key.tobytes() for key in new.rng}) == replicas
        assert not {k.tobytes() for k in new.rng} & {k.tobytes() for k in old.rng}
        text = " ".join(found.notes)
        assert f"{replicas} replicas start from the consensus of {len(old.step)}" in text
        if name == "slowmo over sgp":
            outer = new.opt_state[-1]
            assert outer.base.weight.tolist() == [1] * replicas
            assert not any(np.any(x) for x in jax.tree.leaves(outer.base.in_flight))
            assert outer.count.tolist() == [6] * replicas
            assert (outer.base.exchanges == old.opt_state[-1].base.exchanges[0]).all()
            for a, b in zip(
                anchor(old_step, state).values(), anchor(step, found.state).values(), strict=True
            ):
                np.testing.assert_array_equal(a[0], b[-1])
            moved = momentum(found.state)
            for leaf, velocity in momentum(state).items():
                assert np.any(velocity)
                np.testing.assert_array_equal(velocity, moved[leaf])
            for words in ("push-sum", "in flight", "kept exactly", "averaged", "PRNG"):
                assert words in text
        if name == "own anchors":
            assert "anchor and slow momentum of its own" in text
        state, old_step = found.state, step
    if name == "all_reduce":
        state, _ = old_step(state, batch(7, 8))
    assert np.isfinite(np.asarray(state.params["w"])).all()


def scaled_step(replicas: int, around, axes=()):
    tx = js.dynamic_loss_scale(optax.adam(0.1), axes, growth_interval=5, initial=16.0)
    return js.make_train_step(
        lambda params, x: (params["w"] * x).mean(),
        around(tx),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=js.virtual_mesh({"replica": replicas}),
    )


@pytest.mark.parametrize(
    ("around", "axes"),
    [
        (lambda tx: tx, ()),
        (lambda tx: optax.chain(js.accumulate(tx, 2), optax.identity()), ()),
        (lambda tx: tx, "replica"),
    ],
    ids=["alone", "wrapped", "common to all"],
)
def test_the_least_loss_scale_goes_on_with_its_counters(around, axes, tmp_path):
    """Its mean, 12.25, was no power of two, and the counters were those of replica 0."""
    params = {"w": np.ones(3, np.float32)}
    old = scaled_step(4, around, axes)
    state = old.init(params)
    values = {
        "loss_scale": [16.0, 1.0, 16.0, 1.0],
        "growth_count": [4, 3, 2, 1],
        "skipped": [0, 4, 0, 5],
    }
    if axes:
        values = {name: [x[1]] * 4 for name, x in values.items()}

    def is_scale(x):
        return hasattr(x, "growth_count")

    def with_values(x):
        if not is_scale(x):
            return x
        return x._replace(
            **{n: jax.numpy.asarray(v, getattr(x, n).dtype) for n, v in values.items()}
        )

    opt_state = jax.tree.map(with_values, state.opt_state, is_leaf=is_scale)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state._replace(opt_state=opt_state), wait=True)
        for replicas in (1, 3, 4, 6):
            found = checkpoints.restore(scaled_step(replicas, around, axes), params)
            leaves = jax.tree.leaves(found.state.opt_state, is_leaf=is_scale)
            (own,) = filter(is_scale, leaves)
            for name, x in values.items():
                wanted = x if replicas == 4 else [x[-1]] * replicas
                assert getattr(own, name).tolist() == wanted, (replicas, name)
            assert ("loss scale" in " ".join(found.notes)) == (replicas != 4)


def test_new_keys_depend_on_the_seed(tmp_path):
    step = make_step("local_sgd", js.virtual_mesh({"replica": 2}))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, step.init(PARAMS, model_state=MODEL_STATE))
        more = make_step("local_sgd", js.virtual_mesh({"replica": 3}))
        keys = [
            on_host(checkpoints.restore(more, PARAMS, model_state=MODEL_STATE, seed=s).state.rng)
            for s in (0, 0, 1)
        ]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert not np.any(np.all(keys[0] == keys[2], axis=-1))


def test_a_transform_inside_the_optimizer_cannot_be_moved(tmp_path):
    def inside(replicas: int):
        chain = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3)
        return js.make_train_step(
            lambda p, b: (b @ p["w"]).sum() + p["b"].astype("float32").sum(),
            chain,
            mesh=js.virtual_mesh({"replica": replicas}),
        )

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, inside(7).init({k: PARAMS[k] for k in PARAMS}))
        assert checkpoints.restore(inside(7), PARAMS).is_exact
        with pytest.raises(CheckpointError, match=r"hold a parameter transform.*as `sync`"):
            checkpoints.restore(inside(8), PARAMS)


def test_another_bucket_size_is_said(tmp_path):
    def step(replicas: int, bucket_bytes: int | None):
        sync = js.diloco("replica", sync_every=2, bucket_bytes=bucket_bytes)
        return make_step("diloco", js.virtual_mesh({"replica": replicas}), sync=sync)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, step(2, 0).init(PARAMS, model_state=MODEL_STATE))
        with pytest.raises(CheckpointError, match="another model"):
            checkpoints.restore(step(2, None), PARAMS, model_state=MODEL_STATE)
        with pytest.raises(CheckpointError, match="another model"):
            checkpoints.restore(step(3, None), PARAMS, model_state=MODEL_STATE)


def test_all_algorithms_are_here():
    assert {"sgp", "own anchors", "two levels"} < set(SYNCS)


def test_keys_of_the_model_differ_on_other_replicas_too(tmp_path):
    """Copies of replica 0's would make all replicas drop the same units."""
    model_state = {**MODEL_STATE, "dropout": jax.random.key(3)}
    few, more = (make_step("local_sgd", js.virtual_mesh({"replica": n})) for n in (2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, few.init(PARAMS, model_state=model_state))
        found = checkpoints.restore(more, PARAMS, model_state=model_state)
    fresh = more.init(PARAMS, model_state=model_state)
    keys = [on_host(s.model_state["dropout"]) for s in (found.state, fresh)]
    np.testing.assert_array_equal(*keys)
    assert len(np.unique(keys[0], axis=0)) == 4


def test_copies_of_parameters_go_where_the_parameters_go(tmp_path):
    """Replicas weigh, so the consensus is not the plain mean, of which the optimizer has copies."""
    graph = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])
    free = optax.contrib.schedule_free_sgd(0.1)
    steps = [
        make_step("sgp", js.virtual_mesh({"replica": n}), sync=sync, optimizer=free, mode="traced")
        for n, sync in ((4, js.sgp("replica", graph=graph)), (2, js.sgp("replica")))
    ]
    state = trained(steps[0], 4, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        found = checkpoints.restore(steps[1], PARAMS, model_state=MODEL_STATE).state
    weight = np.float64(state.opt_state[-1].weight)
    assert np.ptp(weight) > 0.1
    before = state.opt_state[1].z["w"] - state.params["w"]
    wanted = np.mean(np.float64(before), axis=0)  # what the optimizer has in store stays a mean
    after = found.opt_state[1].z["w"] - found.params["w"]
    np.testing.assert_allclose(after, [wanted] * 2, atol=1e-6)
    plain = np.mean(np.float64(state.params["w"]), axis=0)
    assert np.abs(found.params["w"] - plain).max() > 1e-4
