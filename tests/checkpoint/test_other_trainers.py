"""States of `js.with_exchange`: the same bits on the same replicas, the consensus on others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxslowmo as js
from checkpoint.runs import leaf_bytes, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from support.promotion import promoting
from train.libraries import FORMS, MOMENTS, PARAMS, PARTS, SPECS, loss_fn, start, stepped

SYNCS = {
    "slowmo of sgp": lambda: js.slowmo("replica", base=js.sgp("replica", overlap=2), sync_every=4),
    "diloco": lambda: js.diloco("replica", sync_every=4, delay=1, fragments=2),
    "sgp": lambda: js.sgp("replica", overlap=1),
}


def batch(t, replicas):
    return np.random.default_rng(t).normal(size=(2 * replicas, 8)).astype(np.float32)


def mesh_of(where):
    if isinstance(where, int):
        return js.virtual_mesh({"replica": where})
    return js.make_mesh(where)


def made(form, sync, where):
    """Return a step of a library on a mesh or on virtual replicas, and its state of one replica."""
    mesh, params = mesh_of(where), PARAMS
    if "fsdp" in mesh.shape:
        params = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in PARAMS.items()}
    train_step, one, parts, _ = FORMS[form](params)
    step = js.with_exchange(train_step, SYNCS[sync](), mesh=mesh, mode="host", **parts)
    return step, one


def trained(step, state, first, last, replicas):
    for t in range(first, last):
        state, _ = step(state, batch(t, replicas))
    return state


def assert_close(tree, expected, tolerance=2e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        *jax.device_get((tree, expected)),
    )


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_replicas_go_on_with_the_same_bits(form, sync, tmp_path):
    """So they do on other devices, where parameters are sharded inside a replica."""
    step, one = made(form, sync, {"replica": 4})
    state = trained(step, step.init(one), 0, 5, 4)  # at 5 something is in flight
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, extra={"position": 5}, wait=True)
        for where in ({"replica": 4}, {"replica": 4, "fsdp": 2}, 4):
            other, again = made(form, sync, where)
            found = checkpoints.restore(other, again)
            assert (found.step, found.is_exact, found.notes) == (5, True, ())
            assert found.extra == {"position": 5}
            assert leaf_bytes(found.state) == leaf_bytes(state)
            assert other.next_phase(found.state) == step.next_phase(state)
            assert_close(trained(other, found.state, 5, 7, 4), trained_on(step, state))
        same = checkpoints.restore(step, one).state
    assert leaf_bytes(trained(step, same, 5, 7, 4)) == leaf_bytes(trained_on(step, state))


def trained_on(step, state):
    """Return the state after two updates more, of a copy: the step donates."""
    return trained(step, jax.tree.map(jnp.copy, state), 5, 7, 4)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("plain", {"replica": 8}, {"replica": 4, "fsdp": 2}),
        ("flax", {"replica": 4, "fsdp": 2}, {"replica": 8}),
        ("nnx", 8, 4),
        ("nnx", {"replica": 4}, {"replica": 8}),
    ],
    ids=str,
)
def test_other_replicas_begin_at_the_consensus(form, sync, before, after, tmp_path):
    step, one = made(form, sync, before)
    few, many = step.mesh.shape["replica"], mesh_of(after).shape["replica"]
    state = trained(step, step.init(one), 0, 5, few)
    mean = on_host(step.consensus(state))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, wait=True)
        other, again = made(form, sync, after)
        found = checkpoints.restore(other, again)
    old, new = on_host(state), on_host(found.state)
    assert not found.is_exact
    assert f"{many} replicas start from the consensus of {few}" in found.notes[0]
    assert "PRNG" not in " ".join(found.notes)
    means = jax.tree.leaves(mean)
    params = jax.tree.leaves(other.as_train_state(new).params)
    for x, y in zip(params, means, strict=True):
        np.testing.assert_allclose(x, [y] * many, rtol=1e-6, atol=1e-6)
    is_param = [any(x is y for y in params) for x in jax.tree.leaves(new.state)]
    leaves = zip(jax.tree.leaves(old.state), jax.tree.leaves(new.state), is_param, strict=True)
    for x, y, known in leaves:
        assert (y == y[:1]).all()
        if not known:
            np.testing.assert_allclose(y[0], x.mean(0), rtol=1e-5, atol=1e-6)
    assert leaf_bytes(new.exchange.shared) == leaf_bytes(old.exchange.shared)
    assert new.step.tolist() == [5] * many
    assert other.next_phase(found.state) == other.phase(6)
    fresh = other.init(again)
    for x, y in zip(jax.tree.leaves(found.state), jax.tree.leaves(fresh), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    trained(other, found.state, 5, 10, many)


def keyed(state, batch):
    new, metrics = stepped(state, batch)
    return new | {"key": jax.random.split(state["key"])[0], "mean": batch.mean(0)}, metrics


def test_keys_become_each_replicas_own_and_statistics_the_mean(tmp_path):
    def step_on(replicas):
        return js.with_exchange(keyed, SYNCS["sgp"](), mesh=mesh_of(replicas), **PARTS)

    one = start(PARAMS) | {"key": jax.random.key(1), "mean": np.zeros(8, np.float32)}
    few, many = step_on(2), step_on(5)
    state = trained(few, few.init(one), 0, 3, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        found = checkpoints.restore(many, one)
    old, new = on_host(state.state), on_host(found.state.state)
    assert "PRNG" in " ".join(found.notes)
    assert len({x.tobytes() for x in new["key"]}) == 5
    np.testing.assert_array_equal(new["key"][0], old["key"][0])
    np.testing.assert_allclose(new["mean"], [old["mean"].mean(0)] * 5, rtol=1e-6)


@pytest.mark.parametrize("functions", [{}, MOMENTS], ids=["found by their class", "given"])
def test_copies_of_parameters_go_where_the_parameters_go(functions, tmp_path):
    """Replicas weigh, so the consensus is not the plain mean, of which the optimizer has copies."""
    free = promoting(optax.contrib.schedule_free_sgd(0.1))
    graph = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])

    def step_on(replicas, sync):
        def train_step(state, batch):
            return stepped(state, batch, optimizer=free)

        return js.with_exchange(train_step, sync, mesh=mesh_of(replicas), **PARTS, **functions)

    one = start(PARAMS, free)
    step, other = step_on(4, js.sgp("replica", graph=graph)), step_on(2, js.sgp("replica"))
    state = trained(step, step.init(one), 0, 3, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        found = checkpoints.restore(other, one).state.state
    before = state.state["opt"].z["in"] - state.state["params"]["in"]
    after = found["opt"].z["in"] - found["params"]["in"]
    np.testing.assert_allclose(after, [np.mean(np.float64(before), 0)] * 2, atol=1e-6)
    plain = np.mean(np.float64(state.state["params"]["in"]), axis=0)
    assert np.abs(found["params"]["in"] - plain[None]).max() > 1e-5


def test_another_exchange_goes_on_with_what_both_remember(tmp_path):
    def step_of(**options):
        sync = js.diloco("replica", sync_every=4, **options)
        return js.with_exchange(stepped, sync, mesh=mesh_of(4), **PARTS)

    step, other, one = step_of(), step_of(fragments=2, delay=1), start(PARAMS)
    state = trained(step, step.init(one), 0, 6, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, state, wait=True)
        found = checkpoints.restore(other, one)
    assert "other fragments" in " ".join(found.notes)
    assert leaf_bytes(found.state.state) == leaf_bytes(state.state)
    anchors = (leaf_bytes(s.exchange.shared["anchor"]) for s in (state, found.state))
    assert next(anchors) == next(anchors)


def test_the_best_checkpoint_stays_and_counts_are_compared(tmp_path):
    step, one = made("flax", "diloco", 2)
    state = step.init(one)
    with Checkpoints(tmp_path, keep=1, keep_best=("loss", "min")) as checkpoints:
        for t, loss in enumerate((1.0, 3.0, 2.0), 1):
            state = trained(step, state, t, t + 1, 2)
            checkpoints.save(t, state, metrics={"loss": loss}, wait=True)
        assert (checkpoints.best_step(), checkpoints.steps()) == (1, (1, 3))
        assert checkpoints.restore(step, one, step=1).step == 1
        with pytest.warns(UserWarning, match="`step` is 9 and the state counts 3"):
            checkpoints.save(9, state, metrics={"loss": 4.0})


def test_other_states_and_steps_are_refused_by_name(tmp_path):
    step = js.with_exchange(stepped, SYNCS["diloco"](), mesh=mesh_of(2), **PARTS)
    plain = js.make_train_step(loss_fn, optax.sgd(0.1), sync=SYNCS["diloco"](), mesh=mesh_of(2))
    one, wide = start(PARAMS), start(PARAMS | {"bias": np.zeros(9, np.float32)})
    wrong = [
        (step.init(one), step, one | {"ema": np.zeros(3, np.float32)}, "state/ema is missing"),
        (step.init(one), step, wide, r"state/params/bias is float32\[8\] in the checkpoint and"),
        (step.init(one), step, start(PARAMS, optax.sgd(0.1)), "another model, optimizer"),
        (step.init(one), plain, PARAMS, "of js.with_exchange, and `train_step` .* js.make_train"),
        (plain.init(PARAMS), step, one, "of js.make_train_step, and `train_step` .* js.with_ex"),
    ]
    for i, (state, other, template, message) in enumerate(wrong):
        with Checkpoints(tmp_path / str(i)) as checkpoints:
            checkpoints.save(0, state, wait=True)
            with pytest.raises(CheckpointError, match=message):
                checkpoints.restore(other, template)
    with Checkpoints(tmp_path / "0") as checkpoints:
        with pytest.raises(ValueError, match="`model_state` must be None for a step of"):
            checkpoints.restore(step, one, model_state={"n": np.int32(0)})
        with pytest.raises(ValueError, match=r"`train_step` must be made by .*, got function"):
            checkpoints.restore(stepped, one)
        with pytest.raises(ValueError, match=r"`state` must be of a step .*, got dict"):
            checkpoints.save(0, one)


def test_a_loop_counts_the_updates_of_a_restored_state(tmp_path):
    """`num_steps` is the number of the last one, as for `js.make_train_step`."""
    step, one = made("plain", "diloco", 2)
    state = trained(step, step.init(one), 0, 3, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        state = checkpoints.restore(step, one).state
    batches = [batch(t, 2) for t in range(3, 9)]
    assert [x.step for x in js.train_loop(step, state, batches, num_steps=5)] == [4, 5]
